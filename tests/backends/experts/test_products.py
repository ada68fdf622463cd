"""Grouped GEMMs in FP8 against the loop over experts, through torch's own checks of the call; no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from autoprec.backends.experts import products as experts
from autoprec.backends.experts.products import GroupedProducts
from autoprec.numerics import rounding
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import ScaleRule, Spec
from autoprec.numerics.quantize import quantize
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe
from tests.backends.experts.helpers import BF16, ENDS, MX, ROWWISE, native, step

PLANS = {
    "rowwise": LayerPlan.uniform(ROWWISE),
    "wgrad in bf16": LayerPlan(fprop=ROWWISE, dgrad=ROWWISE, wgrad=BF16),
    "wgrad alone": LayerPlan(fprop=BF16, dgrad=BF16, wgrad=ROWWISE),
    "bf16": LayerPlan.uniform(BF16),
}


def tensors(turned: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(101, 64, generator=generator) * torch.exp2(torch.randint(-9, 9, (101, 1), generator=generator))
    weight = torch.randn(5, 96, 64, generator=generator) * 0.1
    weight = weight.transpose(1, 2).contiguous() if turned else weight
    return x.to(dtype), weight.to(dtype), torch.randn(101, 96, generator=generator).to(dtype)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("turned", [False, True], ids=["[E, N, K]", "[E, K, N]"])
@pytest.mark.parametrize("name", list(PLANS))
def test_one_call_gives_what_a_loop_over_experts_gives(name: str, turned: bool) -> None:
    layer, loop = native(PLANS[name]), LinearExecution(PLANS[name])
    x, weight, gradient = tensors(turned)
    found = step(layer, x, weight, gradient, turned=turned)
    wanted = step(loop, x, weight, gradient, turned=turned)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)  # scales are powers of two: nothing is rounded twice
    assert found[2].stride() == weight.stride()  # the gradient is laid out as its parameter
    assert not layer.uncompiled
    assert layer.executed == loop.executed


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "ends", [[0, 0, 0, 0, 0], [101] * 5, [0, 0, 0, 0, 1], [1, 2, 3, 4, 101]], ids=["none", "first", "one", "most"]
)
def test_whichever_experts_have_tokens(ends: list[int]) -> None:
    """Small integers: exact sums in any order, which is another one in a product of one row."""
    draw = torch.Generator().manual_seed(0)
    shapes = (101, 64), (5, 96, 64), (101, 96)
    x, weight, gradient = (torch.randint(-3, 4, shape, generator=draw).bfloat16() for shape in shapes)
    found = step(native(PLANS["rowwise"]), x, weight, gradient, ends=ends)
    for ours, theirs in zip(
        found, step(LinearExecution(PLANS["rowwise"]), x, weight, gradient, ends=ends), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("hopper")
def test_any_strides_and_dtypes() -> None:
    layer, (x, weight, gradient) = native(PLANS["rowwise"]), tensors(turned=False, dtype=torch.float32)
    loop = LinearExecution(PLANS["rowwise"])
    odd = x.t().contiguous().t()
    spread = gradient[:1].expand(101, 96)  # as a sum's gradient comes: torch's own grouped product refuses it
    found, wanted = step(layer, odd, weight, spread), step(loop, odd, weight, spread)
    assert [t.dtype for t in found] == [torch.float32] * 3
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() < 3e-3 * theirs.norm()  # the kernel's result is bfloat16
    bf16 = native(PLANS["wgrad in bf16"])
    step(bf16, x.bfloat16(), weight.bfloat16(), spread.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert step(layer, x, weight, gradient)[0].dtype is torch.float32  # as torch._grouped_mm, which is not cast


@pytest.mark.usefixtures("hopper")
def test_what_needs_no_gradient_gets_none() -> None:
    layer, (x, weight, _) = native(PLANS["rowwise"]), tensors(turned=False)
    ends = torch.tensor([*ENDS[:4], 101], dtype=torch.int32)
    layer.grouped(x, weight.requires_grad_().transpose(1, 2), ends).sum().backward()
    assert layer.executed.keys() == {"fprop", "wgrad"}
    frozen = native(PLANS["rowwise"])
    frozen.grouped(x.requires_grad_(), weight.detach().transpose(1, 2), ends).sum().backward()
    assert frozen.executed.keys() == {"fprop", "dgrad"}


@pytest.mark.usefixtures("hopper")
def test_no_tokens_at_all() -> None:
    x, weight, gradient = tensors(turned=False)
    out, dx, dw = step(native(PLANS["rowwise"]), x[:0], weight, gradient[:0], ends=[0] * 5)
    assert (out.shape, dx.shape, dw.count_nonzero()) == ((0, 96), (0, 64), 0)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("plan", [PLANS["rowwise"], LayerPlan.uniform(MX)], ids=["rowwise", "mxfp8"])
def test_the_host_waits_for_no_size(plan: LayerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9 + (plan.fprop is MX), 0))
    with FakeTensorMode():  # which raises where data is asked for
        x, weight = torch.randn(101, 64, requires_grad=True), torch.randn(5, 96, 64, requires_grad=True)
        out = native(plan).grouped(x, weight.transpose(1, 2), torch.zeros(5, dtype=torch.int32))
        out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("plan", [PLANS["rowwise"], LayerPlan.uniform(MX)], ids=["rowwise", "mxfp8"])
def test_one_graph_for_all_batches(plan: LayerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9 + (plan.fprop is MX), 0))
    monkeypatch.setattr(rounding, "stores_values", lambda _: False)  # as on a GPU
    torch._dynamo.reset()
    counters.clear()
    layer, (x, weight, gradient) = native(plan), tensors(turned=False)

    @torch.compile(backend="aot_eager" if plan.fprop is ROWWISE else "eager", fullgraph=True)  # of MXFP8: 7 s
    def compiled(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return layer.grouped(x, weight.transpose(1, 2), ends)

    for rows in (97, 101, 98, 99, 64):
        ends = torch.tensor([10, 10, 43, 60, rows], dtype=torch.int32)
        a, b = (x[:rows].detach().requires_grad_() for _ in range(2))
        (v, w) = (weight.detach().requires_grad_() for _ in range(2))
        compiled(a, v, ends).backward(gradient[:rows])
        layer.grouped(b, w.transpose(1, 2), ends).backward(gradient[:rows])
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        assert torch.equal(v.grad, w.grad)  # type: ignore[arg-type]
    assert counters["stats"]["unique_graphs"] == 2  # one for the first size, one for every other
    assert layer.traced == dict.fromkeys(("fprop", "dgrad", "wgrad"), plan.recipes[0].describe())
    torch._dynamo.reset()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_delayed", "fp8_block", "nvfp4", "int8", "fp16"])
def test_what_has_no_grouped_kernel_is_refused_with_a_reason(name: str) -> None:
    products = GroupedProducts(LayerPlan.uniform(BUILTIN_RECIPES[name]))
    assert "no grouped GEMM runs" in products.refusal(torch.zeros(5, 64, 96))


@pytest.mark.usefixtures("hopper")
def test_formats_sizes_and_devices_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(plan: LayerPlan, weight: Tensor) -> str:
        return GroupedProducts(plan).refusal(weight)

    weight = torch.zeros(5, 64, 96)
    mixed = Recipe.model_validate(ROWWISE.model_dump() | {"operands": {"grad_output": "e5m2"}})
    assert "E4M3 by E4M3" in refusal(LayerPlan.uniform(mixed), weight)
    assert "64 x 90 is not a multiple of 16" in refusal(PLANS["rowwise"], weight[..., :90])
    assert "rounded to 16 bits" in refusal(LayerPlan.uniform(BUILTIN_RECIPES["bf16_fp32_output"]), weight)
    assert not refusal(PLANS["bf16"], weight[..., :90])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "9.0 only, this is 10.0" in refusal(PLANS["rowwise"], weight)
    both = LayerPlan(fprop=MX, dgrad=ROWWISE)
    monkeypatch.setattr(torch.__config__, "show", lambda: "-DUSE_CUDA")
    assert "is built without MSLK" in refusal(LayerPlan.uniform(MX), weight)
    monkeypatch.setattr(torch.__config__, "show", lambda: "-DUSE_MSLK")
    assert not refusal(LayerPlan.uniform(MX), weight)
    assert "64 x 48 is not a multiple of 32" in refusal(LayerPlan.uniform(MX), weight[..., :48])
    assert "9.0 only" in refusal(both, weight)
    e5m2 = Recipe.model_validate({"format": "mxfp8", "operands": {"grad_output": "e5m2"}})
    assert "E4M3 by E4M3" in refusal(LayerPlan.uniform(e5m2), weight)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert "10.0 only, this is 9.0" in refusal(LayerPlan.uniform(MX), weight)


@pytest.mark.parametrize("power_of_2", [False, True])
def test_groups_of_rows_are_quantised_as_each_expert_by_itself(power_of_2: bool) -> None:
    spec = Spec("row", "e4m3", 0, ScaleRule("row", power_of_2=power_of_2))
    x = tensors(turned=False)[0]
    x[5, 3], x[43, 3], x[12, 7] = 0.0, torch.nan, torch.inf
    ends = torch.tensor(ENDS, dtype=torch.int32)
    for values in (x, x.float(), x.t().contiguous().t()):
        _assert_each_expert(values, experts._columns(values, ends, spec), spec)


def _assert_each_expert(x: Tensor, found: tuple[Tensor, Tensor, Tensor], spec: Spec) -> None:
    codes, inverse, padded = found
    start = begin = 0
    for group, (end, stop) in enumerate(zip(ENDS, padded.tolist(), strict=True)):
        assert stop - begin >= max(16, end - start)
        assert (stop - begin) % 16 == 0
        assert codes[:, begin + end - start : stop].float().count_nonzero() == 0
        wanted = quantize(x[start:end], spec)
        assert wanted.scale is not None
        assert torch.equal(inverse[group].nan_to_num(nan=-1.0), wanted.scale[0].nan_to_num(nan=-1.0))
        sound = inverse[group].isfinite()
        mine, theirs = codes[:, begin : begin + end - start].float(), wanted.codes.float().t()
        assert torch.equal(mine[sound], theirs[sound])
        start, begin = end, stop
    assert codes.shape == (x.shape[1], 192)
