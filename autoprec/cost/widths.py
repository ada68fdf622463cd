"""In which width each operator of a step runs under a policy's activations, and what is cast in front of it on a CPU.

Autocast casts the operands of products; what a policy keeps in float32 casts its narrow inputs up; and an operator on
two widths runs in the wider, of which torch makes a copy first. Backward does the opposite of each of these casts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autoprec.cost.peak import Lifetimes, gradient
from autoprec.cost.saved import Setting, Value, Walk, forward, operand_width, walked
from autoprec.graph.report import Operator

_FLOATS = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True, slots=True)
class Widths:
    """What a policy's activations change of a recorded step, by position of the operators.

    Attributes:
        low: operators that run in 16 bits.
        casts: values that are widened in front of an operator, and those that are narrowed.
        inputs: bytes of a value of what each layer reads.
    """

    low: frozenset[int]
    casts: Mapping[int, tuple[float, float]]
    inputs: Mapping[str, float]


def widths(lifetimes: Lifetimes, activations: str, wide: Collection[str]) -> Widths:
    """Follow a step under autocast; ``wide``: what stays in float32, see :class:`autoprec.cost.saved.Setting`."""
    report = lifetimes.report
    walk = walked(report, Setting(activations=activations, wide=wide))
    low: set[int] = set()
    casts: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for index, row in enumerate(report.operators):
        if row.phase == "recompute":
            forward(walk, index, row)
        elif row.phase != "forward":
            if row.out_shapes and lifetimes.base[index][0] >= 0:
                walk.made[index] = _gradient(walk, lifetimes, index, row)
            if index in walk.made and _runs_in(walk, row, walk.made[index]) < 4.0:
                low.add(index)
            continue
        if row.cls in ("view", "allocation") or walk.layer(row) is not None or index not in walk.made:
            continue
        runs = _runs_in(walk, row, walk.made[index])
        if runs < 4.0:
            low.add(index)
        for read in walk.reads(row):
            if read.value is not None and read.dtype in _FLOATS and read.value.width != runs:
                up, down = casts[index]
                casts[index] = (up + read.size, down) if runs == 4.0 else (up, down + read.size)
    return Widths(frozenset(low), dict(casts), walk.inputs)


def _gradient(walk: Walk, lifetimes: Lifetimes, index: int, row: Operator) -> Value:
    made = gradient(walk, lifetimes, index, row)
    if walk.layer(row) is None:  # as wide as what was saved of the forward pass, where that says it
        for read in walk.reads(row)[1:]:
            maker = lifetimes.base[read.maker][0] if read.maker >= 0 else -1
            if maker >= 0 and read.value is not None and lifetimes.report.operators[maker].phase == "forward":
                return Value(made.script, read.value.width)
    return made


def _runs_in(walk: Walk, row: Operator, made: Value) -> float:
    """Return the bytes of a value of what an operator computes on."""
    if row.attends or (row.cls in ("attention", "gemm", "conv") and row.phase == "forward" and walk.layer(row) is None):
        return operand_width(walk, row, row.op.rpartition("::")[2].rstrip("_"), made)
    return max(4.0, made.script) if row.cls == "norm" and "norm" in walk.wide else made.width
