"""Fused casts against torch's own operators, bit for bit, in Triton's interpreter."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends import fused, scaled_mm
from autoprec.backends.fused import FusedCasts, fused_casts
from autoprec.backends.native import NativeBackend
from autoprec.numerics.operand import QuantizerState, Spec
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, Recipe
from benchmarks.gpu.fake_cuda import counter

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
USES: dict[str, Any] = {
    operand: [g for g, o in GEMM_OPERANDS.items() if operand in o] for operand in ("input", "weight", "grad_output")
}
ROWWISE, TENSORWISE = BUILTIN_RECIPES["fp8_rowwise"], BUILTIN_RECIPES["fp8_tensorwise"]


@pytest.fixture
def interpreted(triton_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels in Triton's interpreter, on the CPU."""
    monkeypatch.setattr(fused, "_on_gpu", lambda x: True)


def recipe(granularity: str, grad: str = "e4m3", **scaling: Any) -> Recipe:
    document = {"format": "fp8", "scaling": {"granularity": granularity, **scaling}}
    return Recipe.model_validate(document | {"operands": {"input": "e4m3", "weight": "e4m3", "grad_output": grad}})


RECIPES = {
    "tensor": TENSORWISE,
    "tensor, powers of two": recipe("tensor", "e5m2", power_of_2=True, amax_epsilon=0.5),
    "row": recipe("row", "e5m2"),
    "row, powers of two": recipe("row", power_of_2=True, amax_epsilon=1e-3),
    "block": recipe("block", power_of_2=True),
    "block, any scale": recipe("block"),
}


def odd_values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values over 40 powers of two, ties, subnormals, a row of zeros and a column of one sign."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.randint(-30, 10, (rows, 1)).float())
    x[0] = torch.arange(columns) / 16
    x[1] = 0.0
    x[:, 2] = x[:, 2].abs()
    return x.to(dtype)


def specs_of(chosen: Recipe, operand: Any) -> tuple[Spec, Spec]:
    first, second = USES[operand]
    return spec_of(chosen, first, operand), spec_of(chosen, second, operand)


def assert_same(found: Any, wanted: Any) -> None:
    """Compare two operands: codes and scales bit for bit, except where the scale says that all is lost."""
    assert (found.spec, found.rows, found.columns) == (wanted.spec, wanted.rows, wanted.columns)
    assert found.codes.shape == wanted.codes.shape
    for name in ("scale", "groups"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.shape == theirs.shape
            assert torch.equal(ours.nan_to_num(nan=-1.0), theirs.nan_to_num(nan=-1.0))
    assert torch.equal(dequantize(found).nan_to_num(), dequantize(wanted).nan_to_num())
    scale = wanted.scale if wanted.scale is not None else wanted.groups
    if scale.isfinite().all():
        assert torch.equal(found.codes.contiguous().view(torch.uint8), wanted.codes.contiguous().view(torch.uint8))


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("name", list(RECIPES))
def test_codes_and_scales_are_those_of_torch_operators(name: str, operand: Any) -> None:
    first, second = specs_of(RECIPES[name], operand)
    casts = FusedCasts(QuantizerState())
    for x in (
        odd_values(70, 136, torch.float32),
        odd_values(136, 70, torch.bfloat16).t(),
        odd_values(3, 5, torch.float16),
    ):
        for found, spec in zip(casts.pair(x, first, second, operand), (first, second), strict=True):
            assert_same(found, quantize(x, spec, operand=operand))


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_what_is_not_finite_spoils_what_shares_its_scale(name: str, value: float) -> None:
    first, second = specs_of(RECIPES[name], "input")
    x = torch.randn(20, 136)
    x[3, 130] = value
    for found, spec in zip(FusedCasts(QuantizerState()).pair(x, first, second, "input"), (first, second), strict=True):
        wanted = dequantize(quantize(x, spec)).isnan()
        assert wanted.any()
        assert torch.equal(dequantize(found).isnan(), wanted)


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_the_codes_of_a_second_gemm_are_contiguous_along_its_sum() -> None:
    first, second = specs_of(TENSORWISE, "input")
    a, b = FusedCasts(QuantizerState()).pair(torch.randn(70, 136), first, second, "input")
    assert a is not None
    assert b is not None
    assert a.codes.is_contiguous()
    assert b.codes.t().is_contiguous()


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_delayed_scales_are_used_and_what_was_seen_is_noted() -> None:
    chosen = BUILTIN_RECIPES["fp8_delayed"]
    spec, second = specs_of(chosen, "grad_output")
    state, x = QuantizerState(), torch.randn(70, 136)
    casts = FusedCasts(state)
    state.prepare([("grad_output", spec)], x.device)
    assert casts.pair(x, spec, second, "grad_output", update=True) == (None, None)  # nothing is known yet
    history = state.history("grad_output", spec)
    history.given = True
    for scale, factor in ((0.0, 1.0), (16.0, 4.0), (16.0, 1e6), (16.0, float("inf"))):
        history.scale.fill_(scale)
        history.seen.fill_(0.25)
        found = casts.pair(x * factor, spec, second, "grad_output", update=True)
        assert history.seen == (x * factor).abs().max()
        used = QuantizerState()
        used.history("grad_output", spec).scale = torch.tensor(scale or 1.0)
        wanted = quantize(x * factor, spec, operand="grad_output", state=used)
        for one in found:
            assert_same(one, wanted)
    before = history.seen.clone()
    casts.pair(x * 1e30, spec, None, "grad_output", update=False)
    assert history.seen == before


def layers(name: str) -> tuple[nn.Linear, Any, Any]:
    torch.manual_seed(0)
    module, plan = nn.Linear(48, 32), LayerPlan.uniform(BUILTIN_RECIPES[name])
    ours, torchs = (NativeBackend().bind(plan, module, name="x", seed=0) for _ in range(2))
    torchs.fused = None
    return module, ours, torchs


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_a_layer_computes_the_same_bits(name: str, dtype: torch.dtype) -> None:
    module, *executions = layers(name)
    found = []
    for execution in executions:
        module.zero_grad()
        x = torch.randn(3, 8, 48, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = execution(x, module.weight, module.bias)
        out.backward(torch.ones_like(out) * 1e-3)
        found.append([out, x.grad, module.weight.grad.clone(), module.bias.grad.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_a_delayed_layer_learns_the_same_scales() -> None:
    module, ours, torchs = layers("fp8_delayed")
    found = []
    for execution in (ours, torchs):
        slots = list(execution.delayed_operands().values())
        execution.quantizers.prepare(slots, torch.device("cpu"))
        scales = [execution.quantizers.history(*slot) for slot in slots]
        for step in range(3):
            x = torch.randn(24, 48, generator=torch.Generator().manual_seed(step)).requires_grad_()
            execution(x, module.weight, module.bias).square().sum().backward()
            for scale in scales:  # what is done before a forward on a GPU: what was noted is learned
                if execution is ours and step:
                    scale.learn(scale.seen)
                scale.prepare(torch.device("cpu"))
                scale.given = True
        found.append([x.grad, *(scale.scale for scale in scales)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "most"), [("fp8_tensorwise", 11), ("fp8_rowwise", 12), ("fp8_delayed", 8)])
def test_how_much_a_layer_launches(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    if name == "fp8_rowwise" and not scaled_mm._ROWS_ON_CPU:
        pytest.skip("the CPU's kernel of this torch, which stands in for a GPU's, has tensor scales alone")
    launched: list[str] = []
    monkeypatch.setattr(fused, "launch", lambda kernel, *_: launched.append(kernel))
    monkeypatch.setattr(fused, "_agrees", lambda *_: True)  # nothing is computed here
    module, execution, _ = layers(name)
    execution.quantizers.prepare(execution.delayed_operands().values(), torch.device("cpu"))
    for key in execution.delayed_operands().values():
        execution.quantizers.history(*key).given = True
    x = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(32, 32, dtype=torch.bfloat16)
    fused._zeros.take(1, x.device)
    counted = counter()
    with counted:
        with torch.autocast("cpu", torch.bfloat16):
            out = execution(x, module.weight, module.bias)
        out.backward(gradient)
    assert len(launched) + sum(counted.operators.values()) <= most, (launched, counted.operators)


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_a_weight_is_cast_once_for_the_micro_batches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    really = fused.launch
    monkeypatch.setattr(fused, "launch", lambda k, g, a, c: (shapes.append(tuple(a[0].shape)), really(k, g, a, c)))
    module, execution, _ = layers("fp8_tensorwise")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def weights_cast(*, micro: int = 3, training: bool = True) -> int:
        shapes.clear()
        for _ in range(micro):
            execution(torch.randn(16, 48), module.weight, module.bias, training=training).sum().backward()
        return shapes.count((32, 48)) // 2

    assert weights_cast() == 3  # nobody has been seen to update it
    optimizer.step()
    assert weights_cast() == 2  # the second use says that there is more than one
    optimizer.step()
    assert weights_cast() == 1
    with torch.no_grad():
        module.weight.mul_(2)
    assert weights_cast() == 1
    out = execution(torch.eye(48), module.weight, None)
    assert torch.allclose(out, module.weight.t(), rtol=0.1, atol=0.02)
    optimizer.step()
    assert not execution.fused.kept
    assert weights_cast(training=False) == 3
    copied = copy.deepcopy(execution)
    assert copied.fused.state is copied.quantizers
    assert not copied.fused.kept


def test_triton_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fused_casts(QuantizerState()) is None


def test_torchs_operators_cast_on_a_cpu_and_what_is_not_fused() -> None:
    x, spec = torch.randn(8, 8), spec_of(ROWWISE, "fprop", "input")
    casts = FusedCasts(QuantizerState())
    assert casts.pair(x, spec, None, "input") == (None, None)
    assert casts.pair(x, spec_of(BUILTIN_RECIPES["mxfp8"], "fprop", "input"), None, "input") == (None, None)


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_kernels_that_fail_or_give_other_codes_are_not_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first, second = specs_of(RECIPES[name], "input")
    x, really = torch.randn(16, 32), fused.launch

    def other_codes(kernel: str, grid: Any, arguments: Any, constants: Any) -> None:
        really(kernel, grid, arguments, constants | ({"LIMIT": 0x43000000} if kernel == "cast_kernel" else {}))

    def fails(*_: Any) -> None:
        raise RuntimeError("no image for this device")

    for launch, told in ((other_codes, "other codes"), (fails, "no image for this device")):
        monkeypatch.setattr(fused, "_agreed", {})
        monkeypatch.setattr(fused, "launch", launch)
        with pytest.warns(UserWarning, match=told):
            assert FusedCasts(QuantizerState()).pair(x, first, second, "input") == (None, None)
        assert FusedCasts(QuantizerState()).pair(x, first, second, "input") == (None, None)  # told once


def test_a_scale_that_ranks_agree_on_is_not_found_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fused, "_agrees", lambda *_: True)
    monkeypatch.setattr(fused, "_scaled", lambda *_: ("cast", "cast"))
    casts = FusedCasts(QuantizerState())
    casts.state.groups = {"weight": ("a process group",)}
    x = torch.randn(32, 32)
    tensor, row = (spec_of(chosen, "fprop", "weight") for chosen in (TENSORWISE, ROWWISE))
    assert casts.pair(x, tensor, None, "weight") == (None, None)
    assert casts.pair(x, row, None, "weight") == ("cast", "cast")
    assert casts.pair(x, tensor, None, "input") == ("cast", "cast")


def test_parameters_that_were_stepped_can_still_be_swapped() -> None:
    """``torch.utils.swap_tensors`` refuses what weak references point to; optimizers that store weights use it."""
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert not fused._is_stepped(weight)
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    optimizer.step()
    assert fused._is_stepped(weight)
    assert not fused._is_stepped(other)
    torch.utils.swap_tensors(weight, other)
    assert weight.tolist() == [1.0, 1.0]
    del optimizer
    assert not fused._is_stepped(weight)
