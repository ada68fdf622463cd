"""What tests of libraries' block products share: plans, the product of codes and scales, a comparison; no GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoprec.backends.base import Backend
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import BUILTIN_RECIPES

BLOCK, FP32_SCALES, BF16 = (BUILTIN_RECIPES[name] for name in ("fp8_block", "fp8_block_fp32_scales", "bf16"))
PLANS = {
    "block": LayerPlan.uniform(BLOCK),
    "float32 scales": LayerPlan.uniform(FP32_SCALES),
    "wgrad in bf16": LayerPlan(fprop=BLOCK, dgrad=BLOCK, wgrad=BF16),
    "wgrad alone": LayerPlan(wgrad=BLOCK),
}


def multiplied(codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]) -> Tensor:
    """Multiply ``[M, K]`` by ``[N, K]``; scales ``[M or M/128, K/128]`` and ``[N or N/128, K/128]``; float32."""
    values = []
    for code, scale in zip(codes, scales, strict=True):
        assert code.dtype is torch.float8_e4m3fn
        assert scale.dtype is torch.float32
        rows = scale if scale.shape[0] == code.shape[0] else scale.repeat_interleave(128, 0)[: code.shape[0]]
        values.append(code.float() * rows.repeat_interleave(128, 1)[:, : code.shape[1]])
    return values[0] @ values[1].t()


def on_cpu(backend: Backend) -> Backend:
    """Let a backend be asked about the CPU as if it were a GPU."""

    class OnCpu(type(backend)):  # type: ignore[misc]
        def available(self, device: str) -> Capability:
            return Capability(True, device)

        def capability(self, recipe, *, device, **asks):
            return super().capability(recipe, device=device.replace("cpu", "cuda"), **asks)

    return OnCpu()


def compare(
    backend: Backend, plan: LayerPlan, *, tokens: int, dtype: torch.dtype = torch.bfloat16, most: float = 0.0
) -> None:
    """Compare output and gradients of a layer with the emulation's.

    ``most`` is the relative error that is accepted; 0: none, of values of whose sums none is rounded.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        if most:
            return torch.randn(shape, generator=generator).to(dtype)
        powers = torch.exp2(torch.randint(-2, 3, (shape[0], shape[1] // 128), generator=generator))
        return (torch.randint(-3, 4, shape, generator=generator) * powers.repeat_interleave(128, 1)).to(dtype)

    x, weight, grad = drawn(tokens, 256), drawn(384, 256), drawn(tokens, 384)
    found = []
    for layer in (backend.bind(plan, nn.Identity(), name="x", seed=0), LinearExecution(plan)):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = layer(a, w, None)
        out.backward(grad)
        assert a.grad is not None
        assert w.grad is not None
        found.append((out.detach(), a.grad, w.grad, layer.executed))
    assert found[0][3] == found[1][3]
    for ours, theirs in zip(found[0][:3], found[1][:3], strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours - theirs).norm() <= most * theirs.norm()
