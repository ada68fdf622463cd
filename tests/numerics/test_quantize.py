"""Operands against torchao's and by their own laws: reuse, axes, zeros, non-finite values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.numerics.operand import QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.quantize import dequantize, for_backward, operand_values, quantize, restore, save, spec_of
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS

QUANTISED = [name for name, recipe in BUILTIN_RECIPES.items() if recipe.scaled]
#: Largest relative error of one value at the scale's own amax: half a step of the format.
STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 0.25, "int8": 1 / 254}


def sample(rows: int = 96, columns: int = 160, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator) * 2)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("gemm", GEMMS)
def test_largest_values_survive_within_half_a_step(name: str, gemm: str) -> None:
    recipe = BUILTIN_RECIPES[name]
    for operand in GEMM_OPERANDS[gemm]:
        spec = spec_of(recipe, gemm, operand)
        if spec.hadamard or spec.stochastic:
            continue
        x = sample()
        back = dequantize(quantize(x, spec, operand=operand))
        assert back.shape == x.shape
        top = x.abs() == x.abs().max()
        # group scales of NVFP4 and E8M0 are rounded themselves
        slack = 1.35 if spec.scheme in ("nvfp4", "mx") else 1.01
        assert ((back - x).abs()[top] <= x.abs()[top] * STEP[spec.format] * slack).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_stay_zero_and_non_finite_values_show(name: str) -> None:
    recipe = BUILTIN_RECIPES[name]
    for gemm in GEMMS:
        for operand in GEMM_OPERANDS[gemm]:
            spec = spec_of(recipe, gemm, operand)
            assert not dequantize(quantize(torch.zeros(64, 48), spec, operand=operand)).any()
            for bad in (float("nan"), float("inf")):
                x = sample(64, 48)
                x[5, 7] = bad
                assert not dequantize(quantize(x, spec, operand=operand)).isfinite().all()


@pytest.mark.parametrize("name", QUANTISED)
def test_bfloat16_holds_the_values_exactly(name: str) -> None:
    recipe = BUILTIN_RECIPES[name]
    inexact = name == "fp8_block_fp32_scales"
    made = quantize(sample(), spec_of(recipe, "fprop", "input"))
    same = torch.equal(operand_values(made, torch.bfloat16).float(), operand_values(made, torch.float32))
    assert same != inexact


def test_specs_are_shared_where_the_result_does_not_depend_on_the_axis() -> None:
    tensor, row, block = (BUILTIN_RECIPES[n] for n in ("fp8_tensorwise", "fp8_rowwise", "fp8_block"))
    assert spec_of(tensor, "fprop", "input") == spec_of(tensor, "wgrad", "input")
    assert spec_of(row, "fprop", "input") != spec_of(row, "wgrad", "input")
    assert spec_of(block, "fprop", "weight") == spec_of(block, "dgrad", "weight")
    assert spec_of(block, "dgrad", "grad_output") != spec_of(block, "wgrad", "grad_output")


def test_row_scales_follow_the_contraction_axis() -> None:
    x = sample()
    for gemm, axis in (("fprop", 1), ("wgrad", 0)):
        made = quantize(x, spec_of(BUILTIN_RECIPES["fp8_rowwise"], gemm, "input"))
        assert made.scale is not None
        assert made.scale.shape == ((96, 1) if axis == 1 else (1, 160))


def test_delayed_scales_are_kept_per_operand() -> None:
    spec = spec_of(BUILTIN_RECIPES["fp8_delayed"], "fprop", "input")
    state = QuantizerState()
    quantize(torch.ones(4, 4), spec, operand="input", state=state)
    state.history("input", spec).roll()
    assert dequantize(quantize(torch.full((4, 4), 8.0), spec, operand="input", state=state)).max() == 1.0  # saturates
    assert dequantize(quantize(torch.full((4, 4), 8.0), spec, operand="weight", state=state)).max() == 8.0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from(QUANTISED), st.sampled_from([-3.0, 0.0, 3.0]))
def test_any_shape_and_scale(rows: int, columns: int, name: str, exponent: float) -> None:
    x = sample(rows, columns, seed=rows) * 10.0**exponent
    recipe = BUILTIN_RECIPES[name]
    back = dequantize(quantize(x, spec_of(recipe, "fprop", "input")))
    assert back.shape == x.shape
    limit = 0.35 if recipe.format == "nvfp4" else 0.15
    assert (back - x).norm() <= limit * x.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_scaled_in_float32(dtype: torch.dtype) -> None:
    x = sample().to(dtype)
    for name in QUANTISED:
        recipe = BUILTIN_RECIPES[name]
        spec = spec_of(recipe, "fprop", "input")
        assert torch.equal(dequantize(quantize(x, spec)), dequantize(quantize(x.float(), spec)))


def test_casts() -> None:
    x = sample()
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64)):
        assert torch.equal(operand_values(quantize(x, Spec("cast", name)), torch.float64), x.to(dtype).double())


class TestAgainstTorchao:
    @pytest.fixture(autouse=True)
    def _needs_torchao(self, recwarn: pytest.WarningsRecorder) -> None:
        pytest.importorskip("torchao", reason="torchao is not installed: pip install --no-deps torchao")

    @staticmethod
    def wide(count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(count, generator=generator) * torch.exp(torch.randn(count, generator=generator) * 6)
        x[::997] = 0.0
        x[5::4999] = 1e-41
        return x.reshape(-1, 128)

    @pytest.mark.parametrize("granularity", ["tensor", "row"])
    @pytest.mark.parametrize("power_of_2", [False, True])
    def test_float8(self, granularity: str, power_of_2: bool) -> None:
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

        from autoprec.precision.recipes import Recipe

        x = self.wide(1 << 18)
        recipe = Recipe.model_validate(
            {"format": "fp8", "scaling": {"granularity": granularity, "power_of_2": power_of_2}}
        )
        made = quantize(x, spec_of(recipe, "fprop", "input"))
        row = granularity == "row"
        theirs = hp_tensor_to_float8_dynamic(
            x,
            torch.float8_e4m3fn,
            LinearMMConfig(),
            scaling_granularity=ScalingGranularity.AXISWISE if row else ScalingGranularity.TENSORWISE,
            axiswise_dim=-1 if row else None,
            round_scales_to_power_of_2=power_of_2,
        )
        assert torch.equal(made.codes.view(torch.uint8), theirs._data.view(torch.uint8))

    def test_mxfp8(self) -> None:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        x = self.wide(1 << 18)
        x[7, 3], x[9, 40] = float("inf"), float("nan")
        theirs = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        made = quantize(x, spec_of(BUILTIN_RECIPES["mxfp8"], "fprop", "input"))
        assert made.groups is not None
        assert torch.equal(made.groups.flatten(), theirs.scale.view(torch.uint8).flatten())
        expected = theirs.dequantize(torch.float32)
        assert torch.equal(dequantize(made).nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))

    def test_nvfp4(self) -> None:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

        x = self.wide(1 << 16)
        theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
        made = quantize(x, spec_of(BUILTIN_RECIPES["nvfp4_plain"], "fprop", "input"))
        assert torch.equal(dequantize(made), theirs.dequantize(torch.float32))


def _context() -> Any:
    ctx = SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    return ctx


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "mxfp8", "int8"])
@pytest.mark.parametrize("values", [False, True])
def test_what_is_saved_comes_back(name: str, values: bool) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    one = quantize(x, spec_of(BUILTIN_RECIPES[name], "fprop", "input"), values=values)
    ctx = _context()
    save(ctx, one, None, x)
    found, nothing, plain = restore(ctx)
    assert isinstance(found, QuantizedOperand)
    assert nothing is None
    assert plain is x
    assert torch.equal(found.codes.float(), one.codes.float())  # rounded values are exact in bfloat16
    assert (found.spec, found.rows, found.columns) == (one.spec, 64, 32)
    assert found.codes.element_size() <= 2


def test_codes_at_hand_serve_or_a_parameter_is_cast_later() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    rowwise, tensorwise = BUILTIN_RECIPES["fp8_rowwise"], BUILTIN_RECIPES["fp8_tensorwise"]
    ready = quantize(x, spec_of(tensorwise, "fprop", "weight"), operand="weight")
    assert for_backward(x, ready, ready.spec, "weight", None) is ready
    across = spec_of(rowwise, "dgrad", "weight")
    assert for_backward(x, ready, across, "weight", None) is x
    made = for_backward(x, ready, across, "weight", {})
    assert isinstance(made, QuantizedOperand)
    assert made.spec == across
    assert for_backward(x, ready, spec_of(BUILTIN_RECIPES["fp32"], "wgrad", "input"), "input", {}) is x
