"""Casts of an uncompiled layer on a GPU: torch's operators, compiled for the cast alone.

A compiler fuses the ten operators of a cast with what comes before. In a script that compiles nothing each is a kernel
of its own, and a linear layer in FP8 launches 80 to 170 of them where bf16 launches 8. So the cast of an operand, for
both of its GEMMs at once, is compiled here by itself, once for each dtype and way of quantising; sizes stay symbolic.
What it computes is compared with torch's operators on the device the first time: they cast where it differs, where
nothing can be compiled, and where a cast needs more than its operand (delayed scales, stochastic rounding, scales that
ranks share).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from autoprec.errors import AutoPrecWarning
from autoprec.numerics.linear import Pair
from autoprec.numerics.operand import QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.quantize import quantize

#: Codes, scale and group scales of each use; None for a part that a way of quantising does not have.
Parts = list[tuple[Tensor | None, Tensor | None, Tensor | None]]


def _is_alone(spec: Spec | None) -> bool:
    """Say whether a cast needs nothing but its operand."""
    delayed = spec is not None and spec.scaling is not None and spec.scaling.scale == "delayed"
    return spec is not None and spec.scheme != "cast" and not delayed and not spec.stochastic


def _parts(x: Tensor, uses: tuple[Spec | None, ...]) -> Parts:
    made = [None if spec is None else quantize(x, spec) for spec in uses]
    found: Parts = [(None, None, None) if one is None else (one.codes, one.scale, one.groups) for one in made]
    last = uses[-1]
    if len(uses) == 2 and last is not None and last.scheme in ("tensor", "row"):
        # the GEMM that sums along columns reads the transposed matrix: written as such here, it is not copied there
        codes, *scales = found[1]
        found[1] = (None if codes is None else codes.t().contiguous().t(), *scales)  # type: ignore[assignment]
    return found


def _own_code(uses: tuple[Spec | None, ...]) -> Callable[[Tensor], Parts]:
    """Return what casts in one way, as code of its own: Dynamo counts what it compiles, and limits it, by code."""

    def parts(x: Tensor) -> Parts:
        return _parts(x, uses)

    return FunctionType(parts.__code__.replace(), parts.__globals__, "parts", closure=parts.__closure__)


#: Whether torch's operators cast in this process: see :func:`leave_to_torch`.
_left = False


def leave_to_torch() -> None:
    """Compile no casts any more in this process, for good: where hundreds of policies are tried, it takes minutes."""
    global _left
    _left = True


def stance() -> str:
    """Return what ``torch.compiler.set_stance`` was last asked for in this process."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return "default" if frames is None else str(frames._stance.stance)


@functools.cache
def _compiled(
    uses: tuple[Spec | None, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Parts] | None:
    """Return the compiled cast; None, with a warning, where it cannot be compiled or gives other codes."""
    compiled: Any = torch.compile(_own_code(uses), dynamic=True)

    def run(x: Tensor) -> Parts:
        if stance() == "default":
            parts: Parts = compiled(x)
        else:  # what a policy or a script says of the script's own code (execution: eager) is not about this
            with torch.compiler.set_stance("default"):
                parts = compiled(x)
        return parts

    line = torch.linspace(-3.0, 5.0, 128 * 256, dtype=torch.float32, device=device)
    x = line.pow(3).reshape(128, 256).to(dtype)
    try:
        same = _equal(run(x), _parts(x, uses))
        why = "it gives other codes than torch's operators"
    except Exception as error:  # whatever a compiler or a driver raises
        same, why = False, f"it does not run here: {type(error).__name__}: {error}"
    if not same:
        warnings.warn(f"torch's operators cast, more slowly than a compiled cast: {why}"[:400], AutoPrecWarning, 2)
    return run if same else None


def _equal(ours: Parts, theirs: Parts) -> bool:
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return all(a is b if a is None or b is None else torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@dataclass(frozen=True, slots=True)
class CompiledCasts:
    """Casts the operands of one layer; see :class:`autoprec.numerics.linear.Casts`."""

    state: QuantizerState
    device: str = "cuda"

    def pair(self, x: Tensor, first: Spec | None, second: Spec | None, operand: str) -> Pair:
        """Quantise ``[rows, columns]`` for a GEMM that sums along rows, and for one that sums along columns.

        Args:
            x: ``[rows, columns]``, float32, bfloat16 or float16.
            first, second: how, for each of the two GEMMs; None where a GEMM does not need it.
            operand: ``input``, ``weight`` or ``grad_output``.
        """
        if torch.compiler.is_compiling() or _left:
            return None, None  # the compiler fuses casts with what comes before
        uses = tuple(spec if _is_alone(spec) else None for spec in (first, second))
        if x.device.type != self.device or uses == (None, None) or self.state.groups.get(operand):
            return None, None
        if self.device == "cuda" and torch.cuda.is_current_stream_capturing():
            return None, None  # a compiler cannot be asked while a graph is captured
        run = _compiled(uses, x.dtype, x.device)
        if run is None:
            return None, None
        made = [
            None
            if spec is None or codes is None
            else QuantizedOperand(codes, scale, spec, x.shape[0], x.shape[1], groups)
            for spec, (codes, scale, groups) in zip(uses, run(x.detach()), strict=True)
        ]
        return made[0], made[1]
