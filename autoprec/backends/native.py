"""The ``native`` backend: casts run by torch, and 8-bit GEMMs by ``torch._scaled_mm`` where the device has them.

Requirements of ``torch._scaled_mm`` on CUDA: compute capability 8.9 (tensor scales) or 9.0 (row scales), both K and N
multiples of 16. On the CPU it exists for tensor and row scales but converts upwards and is slower than float32, so
it serves there as a reference only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoprec.backends.base import Capability
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import QuantizedOperand, QuantizerState
from autoprec.numerics.plan import GemmStep, multiply_emulated
from autoprec.policy import LayerPlan
from autoprec.recipes import GEMMS, Gemm, Recipe

__all__ = ["NativeBackend", "scaled_multiply"]

_CASTS = ("fp32", "tf32", "bf16", "fp16")


def scaled_multiply(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, out_dtype: torch.dtype) -> Tensor:
    """Multiply two FP8 operands through ``torch._scaled_mm``; sizes it cannot take are emulated.

    The first operand must be row-major and the second column-major, both contracted over their inner axis.
    """
    axes = step.axes
    left = a.codes if axes[0] == 1 else a.codes.t()
    right = b.codes.t() if axes[1] == 1 else b.codes
    on_gpu = left.device.type == "cuda"
    if on_gpu and (left.shape[0] % 16 or left.shape[1] % 16 or right.shape[1] % 16):
        return multiply_emulated(a, b, step, out_dtype)  # e.g. a ragged last batch in wgrad
    if left.numel() == 0 or right.numel() == 0:
        return multiply_emulated(a, b, step, out_dtype)
    if a.scale is None or b.scale is None:
        return multiply_emulated(a, b, step, out_dtype)
    scale_a = a.scale if axes[0] == 1 else a.scale.t()
    scale_b = b.scale.t() if axes[1] == 1 else b.scale
    rowwise = "row" in (a.spec.scheme, b.spec.scheme)
    if rowwise:
        # a transposed scale has stride 1 in the wrong dimension, which _scaled_mm checks
        scale_a = scale_a.expand(left.shape[0], 1).reshape(-1).contiguous().unsqueeze(1)
        scale_b = scale_b.expand(1, right.shape[1]).reshape(-1).contiguous().unsqueeze(0)
    else:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    # row scales return bfloat16 only on GPUs
    produced = torch.bfloat16 if rowwise and on_gpu else out_dtype
    out: Tensor = torch._scaled_mm(
        left.contiguous(),
        right.t().contiguous().t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=produced,
        use_fast_accum=step.fast,
    )
    return out.to(out_dtype)


def _capability_of(device: str) -> tuple[int, int] | None:
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


class NativeBackend:
    """What torch itself runs."""

    name = "native"

    def available(self, device: str) -> Capability:
        """Say whether torch runs on the device at all."""
        if device.startswith("cuda") and not torch.cuda.is_available():
            return Capability(False, "torch sees no CUDA device")
        return Capability(True, "casts run anywhere; 8-bit GEMMs depend on the device")

    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Say whether torch has a kernel for one GEMM on a device; 0 stands for a size not known yet."""
        found = self.available(device)
        if not found:
            return found
        if recipe.format in _CASTS:
            if device == "cpu" and recipe.format in ("fp16", "tf32"):
                return Capability(False, f"{recipe.format} GEMMs on a CPU are emulated (no fast hardware path)")
            return Capability(True, f"{recipe.format} GEMMs run natively")
        if recipe.format == "int8":
            return Capability(True, "torch._int_mm")
        if recipe.format != "fp8" or recipe.scaling is None or recipe.scaling.granularity == "block":
            return Capability(False, f"torch has no {recipe.describe()} training GEMM on {device}")
        cc = _capability_of(device)
        if cc is None:
            return Capability(True, "torch._scaled_mm on the CPU: correct, but slower than float32")
        need = (9, 0) if recipe.scaling.granularity == "row" else (8, 9)
        if cc < need:
            return Capability(
                False,
                f"{recipe.describe()} needs compute capability {need[0]}.{need[1]}, this device has {cc[0]}.{cc[1]}",
            )
        for label, size in (("M", m), ("K", k), ("N", n)):
            if size % 16:
                return Capability(False, f"{gemm} {label} = {size} is not a multiple of 16")
        return Capability(True, "torch._scaled_mm")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> LinearExecution:
        """Return an execution whose FP8 GEMMs go through ``torch._scaled_mm``."""
        del module, name
        multiply = {}
        for gemm in GEMMS:
            recipe = plan.recipe(gemm)
            if recipe is not None and recipe.format == "fp8" and recipe.scaling is not None:
                multiply[gemm] = scaled_multiply
        return LinearExecution(plan, self.name, multiply, QuantizerState(seed))
