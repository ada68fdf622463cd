"""The native backend: ``torch._scaled_mm`` and its conditions."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config, graph
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.runtime.hints import DeviceProperties
from torch.utils._ordered_set import OrderedSet

from autoprec.applying.policy import apply_policy
from autoprec.backends.native import NativeBackend
from autoprec.numerics import rounding
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES

ASKS = {"gemm": "fprop", "m": 64, "k": 64, "n": 64}


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> NativeBackend:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return NativeBackend()


CASTS = {"bf16", "fp16", "fp32", "tf32", "int8", "int8_tensor", "bf16_fp32_output", "fp16_fp32_output"}
TENSOR = {"fp8_tensorwise", "fp8_tensorwise_e4m3", "fp8_delayed"}
BLOCK = {"fp8_block", "fp8_block_fp32_scales"}
BLACKWELL = {"mxfp8", "nvfp4", "nvfp4_plain"}


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((8, 0), CASTS),
        ((8, 9), CASTS | TENSOR),
        ((9, 0), CASTS | TENSOR | {"fp8_rowwise"} | BLOCK),
        ((10, 0), CASTS | TENSOR | {"fp8_rowwise"} | BLACKWELL),
    ],
)
def test_what_each_gpu_runs(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: set[str]) -> None:
    backend = on_gpu(monkeypatch, capability)
    found = {n: backend.capability(r, device="cuda:0", **ASKS) for n, r in BUILTIN_RECIPES.items()}
    assert {n for n, c in found.items() if c} == runs
    assert all(c.reason for c in found.values())


def test_blocks_need_a_newer_torch_and_cuda_and_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    block = BUILTIN_RECIPES["fp8_block"]
    asks = ASKS | {"device": "cuda:0"}
    backend = on_gpu(monkeypatch, (9, 0))
    hybrid = block.model_copy(update={"operands": block.operands.model_copy(update={"grad_output": "e5m2"})})
    assert backend.capability(hybrid, **asks)  # fprop has no grad_output
    assert "dgrad has e4m3 and e5m2" in backend.capability(hybrid, **(asks | {"gemm": "dgrad"})).reason
    fast = block.model_copy(update={"accumulation": "fast"})
    assert "no fast accumulation" in backend.capability(fast, **asks).reason
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "needs CUDA 12.9" in backend.capability(block, **asks).reason


def test_sizes_must_be_multiples_of_16_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = on_gpu(monkeypatch, (9, 0))
    found = backend.capability(BUILTIN_RECIPES["fp8_rowwise"], device="cuda:0", gemm="dgrad", m=0, k=50257, n=64)
    assert "dgrad K = 50257" in found.reason


def test_without_a_gpu() -> None:
    backend = NativeBackend()
    if not torch.cuda.is_available():
        assert "no CUDA device" in backend.available("cuda").reason
        assert not backend.capability(BUILTIN_RECIPES["bf16"], device="cuda", **ASKS)
    assert not backend.capability(BUILTIN_RECIPES["fp16"], device="cpu", **ASKS)


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed"])
def test_scaled_mm_computes_what_the_emulation_computes(name: str) -> None:
    plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
    module, grad = nn.Linear(64, 96), torch.randn(48, 96) * 1e-3
    results = []
    for run in (NativeBackend().bind(plan, module, name="x", seed=0), LinearExecution(plan)):
        module.zero_grad()
        x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = run(x, module.weight, module.bias)
        out.backward(grad)
        results.append((out.detach(), x.grad, module.weight.grad.clone()))
    for theirs, ours in zip(*results, strict=True):
        assert (theirs - ours).norm() / theirs.norm() < 2.5e-3


#: What decides on an H100 in how many kernels a reduction is done; a CPU does each in one.
HOPPER = DeviceProperties("cpu", 0, 132, 90, major=9, max_threads_per_multi_processor=2048, warp_size=32)


@dataclass
class Counted:
    """What the graphs of one compiled layer, forward and backward, launch and move on an H100.

    ``passes`` are kernels over a whole operand; ``kernels`` those and the ones that end a reduction or make a scale.
    """

    kernels: int = 0
    passes: int = 0
    bytes: int = 0


def counted(layer: nn.Module) -> Counted:
    """Compile a layer ``[64, 256] -> [64, 512]`` in bfloat16 as far as its kernels; none is written, and none runs."""
    found = Counted()

    def scheduled(self: Any) -> Any:
        self.init_wrapper_code()
        self._update_scheduler()
        for node in self.scheduler.nodes:
            moved = int(node.get_read_write_buffers_sizes())
            found.bytes += moved
            found.kernels += not node.is_extern()
            found.passes += not node.is_extern() and moved >= 64 * 256
        self.cache_key, self.cache_path, self.cache_linemap = "", "", []
        play = torch.fx.Interpreter(self.orig_gm)
        return SimpleNamespace(call=lambda inputs: list(play.run(*inputs)), __file__="", __name__="")

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        patch.setattr(graph.GraphLowering, "compile_to_module", scheduled)
        patch.setattr(DeviceProperties, "create", lambda _device: HOPPER)
        patch.setattr(CppScheduling, "backend_features", OrderedSet([BackendFeature.INPLACE_BUFFERS]))
        patch.setattr(rounding, "stores_values", lambda _device: False)  # as on a GPU
        x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
        out = torch.compile(layer)(x)
        out.backward(torch.empty_like(out))
    torch._dynamo.reset()
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # Dynamo's, and torchao's own
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_layer_makes_no_more_passes_and_moves_no_more_bytes_than_torchaos(recipe: str) -> None:
    """Forward and backward, tensorwise 15 kernels, 9 of them passes, and 2.17 MB of both; by row fewer of all three.

    Of a whole tensor's amax the maxima of its rows are written and read, which is 1/256 of it here: the first of its
    two reductions is fused with what makes the rows. torchao's is one reduction, which a GPU does in two kernels, too.
    """
    float8, layers = pytest.importorskip("torchao.float8"), pytest.importorskip("torchao.float8.float8_linear")

    def linear() -> nn.Sequential:
        return nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16))

    fast = BUILTIN_RECIPES[f"fp8_{recipe}"].to_dict() | {"accumulation": {"fprop": "fast"}}
    ours = linear()
    apply_policy(Policy.model_validate({"recipes": {"fp8": fast}, "default": "fp8"}), ours, backend="native")
    theirs = layers.Float8Linear.from_float(linear()[0], config=float8.Float8LinearConfig.from_recipe_name(recipe))
    own, other = counted(ours), counted(theirs)
    assert other.passes > 0
    assert own.passes <= other.passes
    assert own.bytes <= other.bytes * (1 + 1 / 256)
    assert own.kernels <= other.kernels
