"""NVFP4 operands by kernels: against torch's operators, bit for bit, in Triton's interpreter, and inside a graph."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from autoprec.backends import fp4, fused
from autoprec.backends.native import NativeBackend
from autoprec.numerics.grouped import hadamard
from autoprec.numerics.operand import Spec
from autoprec.numerics.quantize import spec_of
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.backends.test_scaled_mm import kernel_around
from tests.conformance.backends import reference_gemms

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
#: By row, by column, square, Hadamard, stochastic: a weight's, an input's, a gradient's, and one GEMM alone.
USES = {
    "plain": (True, True, False, False, False),
    "weight": (True, True, True, False, False),
    "input": (True, True, False, True, False),
    "gradient": (True, True, False, True, True),
    "dgrad alone": (True, False, False, False, True),
    "wgrad alone": (False, True, False, True, True),
}


@pytest.fixture
def interpreted(triton_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels in Triton's interpreter, on the CPU."""
    monkeypatch.setattr(fp4, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fp4, "_PROGRAMS", 4)  # each takes its time here


def odd_values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(rows, columns) * torch.exp(3 * torch.randn(rows, columns))
    x[1], x[2, :3] = 0.0, -0.0
    x[3, :8] = torch.tensor([6.0, -6.0, 0.25, 0.75, -2.5, 5.0, 3.5, 1.75])  # ties, where the scale is a power of two
    return x.to(dtype)


def assert_equal(x: torch.Tensor, flags: fp4.Flags) -> None:
    ours, theirs = fp4._by_kernel(x, fp4._largest(x, True, flags[3]), flags), fp4._by_torch(x, flags)
    for mine, other in zip(ours[:4], theirs[:4], strict=True):
        assert torch.equal(mine, other)
    for index in (0, 1):
        if flags[index]:
            assert torch.equal(ours[4][index].nan_to_num(nan=-1.0), theirs[4][index].nan_to_num(nan=-1.0))


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("flags", USES.values(), ids=list(USES))
@pytest.mark.parametrize(("rows", "columns"), [(144, 80), (37, 50)])
def test_kernels_give_the_codes_of_torchs_operators(rows: int, columns: int, flags: fp4.Flags) -> None:
    assert_equal(odd_values(rows, columns, torch.bfloat16), flags)


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_strides_float32_and_what_is_not_finite() -> None:
    x = odd_values(80, 64, torch.float32)
    assert_equal(x.t(), USES["gradient"])
    x[5, 7] = torch.inf
    assert_equal(x, USES["plain"])
    x[5, 7] = torch.nan
    assert fp4._by_kernel(x, fp4._largest(x, True, True), USES["input"])[4].isnan().all()
    assert fp4._by_torch(x, USES["input"])[4].isnan().all()


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_the_operator_uses_them_after_it_has_compared_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, flags = odd_values(32, 48, torch.bfloat16), USES["input"]
    found = torch.ops.autoprec.nvfp4_cast(x, torch.ops.autoprec.nvfp4_largest(x, True, True), *flags)
    assert list(fused._agreed.values()) == [True]
    monkeypatch.setattr(fp4, "has_kernels", lambda: False)
    for mine, other in zip(found, torch.ops.autoprec.nvfp4_cast(x, x, *flags), strict=True):
        assert torch.equal(mine, other)
    with torch.device("meta"):
        shapes = torch.ops.autoprec.nvfp4_cast(x.to("meta"), x.to("meta"), *flags)
    assert [(s.shape, s.dtype) for s in shapes] == [(mine.shape, mine.dtype) for mine in found]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_gives_the_gemms_of_the_recipe_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", kernel_around(F.scaled_mm))
    monkeypatch.setattr(fp4, "_on_gpu", lambda x: True)
    monkeypatch.setattr("autoprec.backends.native.has_kernels", lambda: True)
    monkeypatch.setattr(fp4, "has_kernels", lambda: False)  # torch's operators stand for the kernels
    recipe = BUILTIN_RECIPES["nvfp4"].model_copy(update={"stochastic_rounding": False})
    plan = LayerPlan.uniform(recipe)
    layer = NativeBackend().bind(plan, torch.nn.Linear(160, 320), name="up", seed=0)
    x, weight = odd_values(48, 160, torch.float32), torch.randn(320, 160) * 0.05
    grad = torch.randn(48, 320) * 1e-3
    wanted = reference_gemms(x, weight, grad, plan)
    torch._dynamo.reset()
    counters.clear()
    x.requires_grad_()
    weight.requires_grad_()
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, weight, None)
    out.backward(grad)
    assert counters["stats"]["unique_graphs"] == 1
    assert x.grad is not None
    assert weight.grad is not None
    for found, gemm in ((out, "fprop"), (x.grad, "dgrad"), (weight.grad, "wgrad")):
        assert (found - wanted[gemm]).norm() / wanted[gemm].norm() < 2.5e-3, gemm  # bfloat16 products
    assert layer.executed == dict.fromkeys(("fprop", "dgrad", "wgrad"), recipe.describe())
    torch._dynamo.reset()


def test_gemms_that_round_differently_cast_an_operand_each_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fp4, "has_kernels", lambda: False)
    x = odd_values(48, 64, torch.float32)
    plain, square = Spec("nvfp4", "e2m1", 1), Spec("nvfp4", "e2m1", -1, square=True)
    down, random = Spec("nvfp4", "e2m1", 0), Spec("nvfp4", "e2m1", 0, stochastic=True)
    for first, second in ((plain, random), (square, down), (plain, square)):
        found = fp4.packed_pair(x, first, second)
        wanted = fp4.packed_pair(x, first, None)[0], fp4.packed_pair(x, None, second)[1]
        for mine, other in zip(found, wanted, strict=True):
            assert mine is not None
            assert other is not None
            assert mine.groups is not None
            assert other.groups is not None
            assert torch.equal(mine.codes, other.codes)
            assert torch.equal(mine.groups, other.groups)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_takes_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4, "_on_gpu", lambda x: True)
    monkeypatch.setattr("autoprec.backends.native.has_kernels", lambda: True)
    monkeypatch.setattr(fp4, "has_kernels", lambda: False)
    layer = NativeBackend().bind(LayerPlan.uniform(BUILTIN_RECIPES["nvfp4"]), torch.nn.Linear(64, 20), name="", seed=0)
    x, weight = torch.randn(0, 64, requires_grad=True), torch.randn(20, 64, requires_grad=True)
    torch._dynamo.reset()
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, weight, None)
    out.sum().backward()
    torch._dynamo.reset()
    assert out.shape == (0, 20)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_what_is_not_nvfp4_and_lies_on_a_cpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(BUILTIN_RECIPES["nvfp4"], "fprop", "input")
    assert fp4.packed_pair(torch.randn(32, 32), spec, None) == (None, None)
    monkeypatch.setattr(fp4, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fp4, "has_kernels", lambda: False)
    assert fp4.packed_pair(torch.randn(32, 32), Spec("cast", "bf16"), None) == (None, None)
    first, second = fp4.packed_pair(torch.randn(32, 32), Spec("cast", "bf16"), Spec("nvfp4", "e2m1", 0))
    assert first is None
    assert second is not None
    assert (
        NativeBackend().bind(LayerPlan.uniform(BUILTIN_RECIPES["mxfp8"]), torch.nn.Linear(2, 2), name="", seed=0).packed
        is None
    )


def test_the_transform_is_sylvesters_matrix_with_fixed_signs() -> None:
    rows = hadamard(torch.eye(16)).mul(4).to(torch.int64)
    order = torch.arange(16)
    parity = torch.tensor([[bin(int(i & j)).count("1") % 2 for j in order] for i in order])
    signs = 1 - 2 * ((0b1101_0111_1110_1000 >> order) & 1)
    assert torch.equal(rows, (1 - 2 * parity) * signs)
