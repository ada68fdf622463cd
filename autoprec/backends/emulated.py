"""The ``emulated`` backend: every recipe, on any device, with true numerics and no 8-bit hardware."""

from __future__ import annotations

from torch import nn

from autoprec.backends.base import Backend
from autoprec.backends.cpu.int8 import int8_parts
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import QuantizerState
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import Gemm, Recipe


class EmulatedBackend(Backend):
    """Quantises and dequantises; the product is computed in bfloat16 or float32, exactly as far as the format is.

    Args:
        casts: emulate bfloat16 too where a CPU has no units for it; what is timed on this machine leaves it off.
    """

    name = "emulated"

    def __init__(self, *, casts: bool = True) -> None:
        self.emulates_casts = casts

    def available(self, device: str) -> Capability:
        """Always yes."""
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
