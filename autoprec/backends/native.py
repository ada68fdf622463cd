"""The ``native`` backend: casts run by torch, and 8-bit and 4-bit GEMMs through torch where the device has them.

What each GPU runs is in :data:`_NEEDS`; on the CPU ``torch._scaled_mm`` exists for tensor and row scales, but converts
upwards and is slower than float32, so it serves there as a reference only. int8 runs by ``torch._int_mm`` anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from autoprec.backends.base import Backend, misaligned
from autoprec.backends.casts import CompiledCasts
from autoprec.backends.cpu.int8 import int8_parts
from autoprec.backends.experts.products import GroupedProducts
from autoprec.backends.scaled_mm import blocked_multiply, scaled_multiply
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import QuantizerState
from autoprec.numerics.plan import Multiply
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import GEMM_OPERANDS, GEMMS, Gemm, Recipe

_CASTS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class _Need:
    """What a kind of GEMM needs: compute capabilities from ``low`` to below ``high``, CUDA, and multiples of sizes."""

    low: tuple[int, int]
    high: tuple[int, int] = (99, 0)
    cuda: tuple[int, int] = (12, 0)
    multiple: int = 16
    e4m3: bool = False


#: By scaling granularity or format; sources: torch ``ScaledBlas.cpp`` (``_check_deepseek_support`` and the recipe
#: checks) and cuBLAS 12.9. Blackwell's blocks run as MXFP8, which is another recipe.
_NEEDS = {
    "tensor": _Need((8, 9)),
    "row": _Need((9, 0)),
    "block": _Need((9, 0), (10, 0), (12, 9), e4m3=True),
    "mxfp8": _Need((10, 0), cuda=(12, 8), multiple=32, e4m3=True),
    "nvfp4": _Need((10, 0), cuda=(12, 8), multiple=32),
}


def _kind(recipe: Recipe) -> str:
    """Return the key of :data:`_NEEDS` for a recipe, or an empty string where torch has no such GEMM."""
    if recipe.format == "fp8" and recipe.scaling is not None:
        return recipe.scaling.granularity
    return recipe.format if recipe.format in _NEEDS else ""


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def _refusal(kind: str, recipe: Recipe, gemm: Gemm, device: str) -> str:
    """Return why a GPU cannot run a kind of GEMM, or an empty string."""
    need, cc = _NEEDS[kind], torch.cuda.get_device_capability(device)
    what = recipe.describe()
    if cc < need.low:
        return f"{what} needs compute capability {need.low[0]}.{need.low[1]}, this device has {cc[0]}.{cc[1]}"
    if cc >= need.high:
        return (
            f"{what} runs below compute capability {need.high[0]}.{need.high[1]} only, this device has {cc[0]}.{cc[1]}"
        )
    if kind in ("block", "mxfp8", "nvfp4"):
        if _cuda_version() < need.cuda:
            return f"{what} needs CUDA {need.cuda[0]}.{need.cuda[1]}, torch is built with {torch.version.cuda}"
        if recipe.accumulation != "full":
            return f"{what} has no fast accumulation on a GPU"
    formats = {recipe.operand_format(operand) for operand in GEMM_OPERANDS[gemm]}
    if need.e4m3 and formats != {"e4m3"}:
        return f"{what} multiplies E4M3 by E4M3 only, {gemm} has {' and '.join(sorted(formats))}"
    return ""


class NativeBackend(Backend):
    """What torch itself runs."""

    name = "native"
    ran_on = frozenset({(9, 0)})

    def available(self, device: str) -> Capability:
        """Say whether torch can run on a device at all: ``cpu``, ``cuda`` or ``cuda:N``."""
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
        kind = _kind(recipe)
        on_cpu = not device.startswith("cuda")
        if not kind or (on_cpu and kind not in ("tensor", "row")):
            return Capability(False, f"torch has no {recipe.describe()} training GEMM on {device}")
        if on_cpu:
            return Capability(True, "torch._scaled_mm on the CPU: correct, but slower than float32")
        why = _refusal(kind, recipe, gemm, device) or misaligned(gemm, m, k, n, _NEEDS[kind].multiple)
        if why:
            return Capability(False, why)
        return Capability(True, "torch._scaled_mm" if kind in ("tensor", "row") else "torch.nn.functional.scaled_mm")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> LinearExecution:
        """Return an execution whose FP8, MXFP8 and NVFP4 GEMMs go through torch's scaled products."""
        del name
        state = QuantizerState(seed)
        integer = int8_parts(plan, module, state)
        if integer:
            return LinearExecution(plan, quantizers=state, backend=self.name, **integer)
        multiply: dict[Gemm, Multiply] = {}
        for gemm in GEMMS:
            recipe = plan.recipe(gemm)
            kind = "" if recipe is None else _kind(recipe)
            if kind:
                multiply[gemm] = scaled_multiply if kind in ("tensor", "row") else blocked_multiply
        casts = CompiledCasts(state) if multiply else None
        return LinearExecution(plan, multiply, state, casts, GroupedProducts(plan), backend=self.name)
