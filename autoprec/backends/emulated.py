"""The ``emulated`` backend: every recipe, on any device, with true numerics and no 8-bit hardware."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoprec.backends.base import Backend
from autoprec.backends.cpu.int8 import int8_parts
from autoprec.numerics.execution import only_once
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import QuantizerState
from autoprec.numerics.rounding import decode, encode
from autoprec.numerics.scaling import amax_of, inverse_of, scale_of
from autoprec.policy import LayerPlan
from autoprec.precision.formats import FORMATS
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import Gemm, Recipe

_E4M3, _E5M2, _AS_IT_IS = "e4m3", "e5m2", ""


class EmulatedBackend(Backend):
    """Quantises and dequantises; the product is computed in bfloat16 or float32, exactly as far as the format is.

    Args:
        casts: emulate bfloat16 too where a CPU has no units for it; what is timed on this machine leaves it off.
    """

    name = "emulated"

    def __init__(self, *, casts: bool = True) -> None:
        self.emulates_casts = casts

    def available(self, device: str) -> Capability:
        return Capability(True, f"emulation runs on any device ({device})")

    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Always yes: sizes that hardware refuses are padded with zeros, which change no sum."""
        del gemm, m, k, n, device
        if recipe.format == "int8":
            return Capability(True, "torch._int_mm, on the integer units of any device")
        return Capability(True, f"{recipe.describe()} is emulated: true numerics, no 8-bit speed")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> LinearExecution:
        """Return an execution whose GEMMs are all emulated; plain casts run natively where the device is fast at it."""
        del name
        state = QuantizerState(seed)
        integer = int8_parts(plan, module, state)
        return LinearExecution(plan, backend=self.name, quantizers=state, emulates_casts=self.emulates_casts, **integer)


def fp8_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attend in FP8 as Transformer Engine's fused kernel does.

    All products multiply operands of 8 bits with one scale per tensor. Forward: Q, K and V in E4M3 under one scale of
    all three, the softmax's weights in E4M3, the result in E4M3. Backward: the result's gradient, the scores' gradient,
    and the gradients of Q, K and V (one scale) in E5M2. That is ``DelayedScaling(fp8_dpa=True)`` with the hybrid format
    (transformer_engine 2.20, ``FP8EmulationFunc`` and ``get_fused_attn_spec``). The kernel takes each scale from the
    step before; here it is this step's, so the first step's underflow and later overflows are not seen.

    Args:
        query: ``[batch, heads, queries, head]``, any floating dtype.
        key, value: ``[batch, groups, keys, head]``; ``groups`` divides ``heads`` (grouped queries).
        causal: a query sees the keys up to its own position.
        scale: multiplies the scores.

    Returns:
        ``[batch, heads, queries, head]``, float32.
    """
    query, key, value = _rounded(_E4M3, _E5M2, query.float(), key.float(), value.float())
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    (scores,) = _rounded(_AS_IT_IS, _E5M2, (query @ key.transpose(-2, -1)) * scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    (weights,) = _rounded(_E4M3, _AS_IT_IS, scores.softmax(-1))
    (out,) = _rounded(_E4M3, _E5M2, weights @ value)
    return out


def _rounded(ahead: str, back: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return float32 tensors rounded under one scale, whose gradients are rounded under one scale, too."""
    found: tuple[Tensor, ...] = _Rounded.apply(ahead, back, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ahead: str, back: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return _together(ahead, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _together(ctx.back, grads)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            found = only_once(found, "operators.attention")
        return None, None, *found


def _together(form: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not form:
        return tuple(x.view_as(x) for x in tensors)
    amax = torch.stack([amax_of(x) for x in tensors]).amax()
    scale = scale_of(amax, FORMATS[form].max)
    inverse = inverse_of(scale, amax)
    return tuple(decode(encode(x * scale, form, bounded=True), torch.float32) * inverse for x in tensors)
