"""Group scales: E8M0 codes, padding, square blocks, the Hadamard transform, private random streams."""

from __future__ import annotations

import pytest
import torch

from autoprec.numerics.grouped import decode_e8m0, encode_e8m0, grouped_values, hadamard, quantize_grouped
from autoprec.numerics.operand import QuantizerState, Spec
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.precision.recipes import BUILTIN_RECIPES


def test_e8m0_rounds_up_so_that_nothing_saturates() -> None:
    amax = torch.tensor([448.0, 449.0, 896.0, 1.0, 0.0, float("inf"), float("nan"), 3e38, 448 * 2.0**-126, 1e-44])
    code = encode_e8m0(amax, 448.0)
    assert code.tolist() == [127, 128, 128, 119, 0, 254, 255, 247, 1, 0]
    scale = decode_e8m0(code)
    assert scale[:4].tolist() == [1.0, 2.0, 2.0, 2.0**-8]
    assert scale[4] == 2.0**-127
    assert scale[6].isnan()
    finite = amax.isfinite() & (amax > 1e-36)
    assert (amax[finite] / scale[finite] <= 448.0).all()


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4_plain"])
def test_padding_changes_nothing(name: str) -> None:
    x = torch.randn(70, 150, generator=torch.Generator().manual_seed(0))
    for gemm in ("fprop", "wgrad"):
        spec = spec_of(BUILTIN_RECIPES[name], gemm, "input")
        padded = torch.zeros(128, 256)
        padded[:70, :150] = x
        assert torch.equal(dequantize(quantize(x, spec)), dequantize(quantize(padded, spec))[:70, :150])


def test_blocks_have_the_scale_of_their_own_largest_value() -> None:
    x = torch.ones(256, 256)
    x[:128, 128:] = 100.0
    tile = quantize(x, spec_of(BUILTIN_RECIPES["fp8_block_fp32_scales"], "fprop", "input"))
    assert tile.groups is not None
    assert tile.groups.shape == (256, 2, 1)
    square = quantize(x, spec_of(BUILTIN_RECIPES["fp8_block_fp32_scales"], "fprop", "weight"))
    assert square.groups is not None
    assert torch.allclose(square.groups.squeeze(), torch.tensor([[1.0, 100.0], [1.0, 1.0]]) / 448.0)


def test_nvfp4_weight_blocks_are_square_and_serve_both_gemms() -> None:
    recipe = BUILTIN_RECIPES["nvfp4"]
    assert spec_of(recipe, "fprop", "weight") == spec_of(recipe, "dgrad", "weight")
    made = quantize(torch.randn(32, 48), spec_of(recipe, "fprop", "weight"))
    assert made.groups is not None
    assert made.groups.shape == (2, 1, 3, 1)


def test_hadamard_is_orthogonal_and_spreads_outliers() -> None:
    x = torch.zeros(32, 8)
    x[3, 2] = 16.0
    y = hadamard(x)
    assert torch.allclose(y.norm(), x.norm())
    assert y[:16, 2].abs().unique().tolist() == [4.0]
    a, b = torch.randn(48, 5), torch.randn(48, 7)
    assert torch.allclose(hadamard(a).t() @ hadamard(b), a.t() @ b, atol=1e-4)


def test_stochastic_gradients_repeat_for_equal_states_and_differ_from_call_to_call() -> None:
    spec = spec_of(BUILTIN_RECIPES["nvfp4"], "dgrad", "grad_output")
    x = torch.randn(32, 64)
    states = QuantizerState(5), QuantizerState(5)
    first, second = (dequantize(quantize_grouped(x, spec, s)) for s in states)
    assert torch.equal(first, second)
    assert not torch.equal(first, dequantize(quantize_grouped(x, spec, states[0])))


def test_grouped_values_need_group_scales() -> None:
    made = quantize(torch.randn(4, 4), Spec("cast", "bf16"))
    with pytest.raises(ValueError, match="group scales"):
        grouped_values(made, torch.float32)


def test_scales_of_tiny_blocks_are_clamped_as_deepgemm_clamps_them() -> None:
    """Amax is at least 1e-4 (DeepGEMM, utils/math.py): what lies far below is zero, not a noise of full range."""
    x = torch.ones(128, 128) * 1e-5
    x[0] = 1e-12
    made = quantize(x, spec_of(BUILTIN_RECIPES["fp8_block_fp32_scales"], "fprop", "input"))
    assert made.groups is not None
    assert torch.allclose(made.groups, torch.tensor(1e-4 / 448.0))
    assert (dequantize(made)[0] == 0.0).all()
    free = quantize(x, spec_of(BUILTIN_RECIPES["fp8_block"], "fprop", "input"))  # Transformer Engine's default
    assert torch.allclose(dequantize(free)[0], torch.tensor(1e-12), rtol=0.07)


def test_scales_of_tiny_nvfp4_groups_are_the_smallest_normal_e4m3() -> None:
    x = torch.ones(16, 32)
    x[:, 16:] = 1e-6
    made = quantize(x, spec_of(BUILTIN_RECIPES["nvfp4_plain"], "fprop", "input"))
    assert made.groups is not None
    assert made.groups.float().flatten().unique().tolist() == [2.0**-6, 448.0]
    assert (dequantize(made)[:, 16:] == 0.0).all()


@pytest.mark.parametrize("limit", [448.0, 57344.0, 6.0])
def test_group_scales_are_the_smallest_power_of_two_that_fits(limit: float) -> None:
    edge = int(torch.tensor(limit).view(torch.int32)) & 0x7FFFFF
    fractions = [*torch.randint(0, 1 << 23, (200,)).tolist(), 0, 1, 0x7FFFFF, *range(edge - 2, edge + 3)]
    bits = torch.arange(255).unsqueeze(1) << 23 | torch.tensor(fractions)
    amax = bits.to(torch.int32).view(torch.float32)
    code = encode_e8m0(amax, limit)
    room = limit * torch.exp2(code.double() - 127)
    assert (amax.double() <= room).all()
    assert ((amax.double() > room / 2) | (code == 0)).all()
    assert encode_e8m0(torch.tensor([torch.inf, torch.nan]), limit).tolist() == [254, 255]
