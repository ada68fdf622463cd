"""The deepgemm backend through a stand-in with DeepGEMM's signature and its checks of arguments; no GPU."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from autoprec.backends import deepgemm, get
from autoprec.backends.deepgemm import DeepGemmBackend
from autoprec.errors import UnsupportedError
from autoprec.numerics import rounding
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.backends.block_kernels import BLOCK, FP32_SCALES, PLANS, compare, multiplied, on_cpu
from tests.conformance.backends import BackendSuite

Operand = tuple[Tensor, Tensor]


def fp8_gemm_nt(
    a: Operand,
    b: Operand,
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """``csrc/apis/gemm.hpp`` of 2.1 (2.5 adds recipes of one operand), ``check_sf_layout``, and what kernels assert."""
    hopper = torch.cuda.get_device_capability()[0] == 9
    (m, k), (n, _) = a[0].shape, b[0].shape
    assert a[0].is_contiguous()
    assert b[0].is_contiguous()
    assert d.shape == (m, n)
    assert k % 128 == 0
    assert recipe in ((1, 1, 128), (1, 128, 128))
    assert a[1].shape == (m, k // 128)
    assert b[1].shape == (-(-n // recipe[1]), k // 128)
    if k > 128:  # else they are copied, slowly, before each product
        assert a[1].stride() == (1, -(-m // 4) * 4)
        assert recipe[1] == 128 or b[1].stride() == (1, -(-n // 4) * 4)
    if recipe[1] == 128:
        rows, columns = b[1].shape
        assert b[1].stride() in ((columns, 1), (1, rows))
    if not hopper:
        assert not disable_ue8m0_cast
        for scale in (a[1], b[1]):  # else the kernel that packs them stops, and the device with it
            assert (scale.view(torch.int32) & -0x7F800001 == 0).all()
        assert c is None
    elif recipe[1] == 1:
        assert c is not None
        assert c.data_ptr() == d.data_ptr()
        assert d.dtype is torch.float32
    else:
        assert c is None
        assert d.dtype is torch.bfloat16
    assert compiled_dims == ("mn" if recipe[1] == 1 else "nk")  # sizes a kernel is compiled for: never the tokens
    d.copy_(multiplied((a[0], b[0]), (a[1], b[1])) + (0 if c is None else c))


@pytest.fixture(params=[(9, 0), (10, 0)], ids=["9.0", "10.0"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Take the CPU for a GPU with DeepGEMM."""
    module = types.ModuleType("deep_gemm")
    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(deepgemm, "_library", functools.cache(deepgemm._library.__wrapped__))  # forgotten after a test
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: request.param)
    return request.param


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tokens", [256, 101])
@pytest.mark.parametrize("name", ["block", "wgrad in bf16", "wgrad alone"])
def test_it_computes_what_the_emulation_computes(name: str, tokens: int) -> None:
    compare(get("deepgemm"), PLANS[name], tokens=tokens)
    compare(get("deepgemm"), PLANS[name], tokens=tokens, most=4e-3)


def test_products_do_not_look_for_the_package_again(gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(deepgemm, "require", lambda name, **_: (asked.append(name), sys.modules[name])[1])
    compare(get("deepgemm"), PLANS["block"], tokens=128)
    assert asked == ["deep_gemm"]


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_scales_that_are_no_powers_of_two_on_hopper(gpu: tuple[int, int]) -> None:
    compare(get("deepgemm"), PLANS["float32 scales"], tokens=128, most=4e-3)


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo and Inductor
def test_a_compiled_step_is_one_graph(gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "stores_values", lambda _: False)  # as on a GPU
    torch._dynamo.reset()
    counters.clear()
    layer = get("deepgemm").bind(PLANS["block"], nn.Identity(), name="x", seed=0)
    compiled = torch.compile(lambda x, w: layer(x, w, None), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(128, 256), torch.randn(384, 256)
    grads = []
    for run in (compiled, lambda x, w: layer(x, w, None)):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        run(a, w).square().sum().backward()
        grads.append((a.grad, w.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_every_no_has_a_reason(gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend, asks = DeepGemmBackend(), {"gemm": "fprop", "m": 0, "k": 256, "n": 384, "device": "cuda"}
    assert backend.capability(BLOCK, **asks)
    assert backend.capability(BUILTIN_RECIPES["bf16"], **asks)
    assert "K = 192 is not a multiple of 128" in backend.capability(BLOCK, **asks | {"k": 192}).reason
    assert "not fp8 row" in backend.capability(BUILTIN_RECIPES["fp8_rowwise"], **asks).reason
    assert "NVIDIA GPUs only" in backend.capability(BLOCK, **asks | {"device": "cpu"}).reason
    fast = BLOCK.model_copy(update={"accumulation": "fast"})
    assert "no fast accumulation" in backend.capability(fast, **asks).reason
    mixed = BLOCK.model_validate(BLOCK.model_dump() | {"operands": {"grad_output": "e5m2"}})
    assert "E4M3 by E4M3" in backend.capability(mixed, **asks | {"gemm": "dgrad"}).reason
    scales = backend.capability(FP32_SCALES, **asks)
    assert scales.ok == (gpu == (9, 0))
    assert scales.ok or "powers of two" in scales.reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    assert "9.0 or 10.x, this device has 12.0" in backend.capability(BLOCK, **asks).reason
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert "build it: https://github.com/deepseek-ai/DeepGEMM" in backend.available("cuda").reason


def test_other_scaled_gemms_are_refused() -> None:
    row = BUILTIN_RECIPES["fp8_rowwise"]
    for plan, reason in (
        (LayerPlan(fprop=BLOCK, wgrad=row), "row"),
        (LayerPlan.uniform(BUILTIN_RECIPES["bf16"]), "in blocks"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            get("deepgemm").bind(plan, nn.Identity(), name="x", seed=0)


@pytest.mark.usefixtures("gpu")
class TestConformance(BackendSuite):
    backend = on_cpu(DeepGemmBackend())
