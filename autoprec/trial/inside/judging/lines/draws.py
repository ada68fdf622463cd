"""Outcomes drawn by comparing a uniform number with a cumulative sum of probabilities, of which one is in 16 bits.

Near 1 such a sum moves in steps of 2**-8 (bfloat16) or 2**-11 (float16): an outcome less likely than that is drawn
never, or in place of its neighbours; and a uniform number in 16 bits has no more values than these to hit one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autoprec.graph.census import Observation
from autoprec.trial.inside.judging.forward import LOW, Step, observed

#: Operators by which a uniform number is looked up in a cumulative sum.
LOOKS_UP = frozenset(("lt", "le", "gt", "ge", "searchsorted", "bucketize"))
#: Values between 0 and 1 that ``torch.rand`` draws in 16 bits.
_DRAWN = {"bf16": 1 << 8, "fp16": 1 << 11}
#: Share of the probability from which on something is said.
MOVED = 0.01
#: Most elements of a cumulative sum that are looked at.
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Draw:
    """What a comparison with a cumulative sum draws.

    Attributes:
        sum, source: the calls that summed the probabilities and that drew the number.
        sum_dtype, source_dtype: of their results.
        moved: share of the probability that other outcomes have than in FP32.
    """

    sum: int
    source: int
    sum_dtype: str
    source_dtype: str
    moved: float


def moved(found: Tensor, exact: Tensor, dtype: str) -> float:
    """Return the share of the probability that goes to other outcomes, the mean over rows.

    Args:
        found, exact: cumulative sums, ``[..., outcomes]``, as they are and in FP32.
        dtype: of the uniform number that is looked up in them.
    """
    if exact.shape and exact.shape[-1] == 1:
        found, exact = found.squeeze(-1), exact.squeeze(-1)
    if not exact.shape or not 1 < exact.shape[-1] <= _MOST:
        return 0.0
    outcomes = exact.shape[-1]
    rows = [one.reshape(-1, outcomes)[: max(1, _MOST // outcomes)].double() for one in (found.detach(), exact.detach())]
    total = rows[1][:, -1:]
    rising = bool((rows[1].diff(dim=-1) >= -1e-6 * total).all())
    if not rising or not bool(torch.cat(rows).isfinite().all()) or not bool((total > 0).all()):
        return 0.0
    if not bool(((total - 1).abs() < 0.02).all()):  # not divided by their sum yet: the number is multiplied with it
        rows = [row / row[:, -1:] for row in rows]
    shares = []
    for row, values in zip(rows, (_DRAWN.get(dtype, 0), 0), strict=True):
        until = torch.cat([torch.zeros_like(total), row[:, :-1], torch.ones_like(total)], -1).clamp(0, 1)
        until = until.cummax(-1).values
        shares.append((torch.ceil(until * values) / values if values else until).diff(dim=-1))
    return float((shares[0] - shares[1]).abs().sum(-1).mean()) / 2


def draws(step: Step, found: dict[int, Draw]) -> Iterator[Observation]:
    """Yield each line at which 16 bits move the probability of what is drawn.

    Args:
        step: the recorded step.
        found: what comparisons draw, by the index of the call.
    """
    operators, told = step.report.operators, set[str]()
    for index, one in found.items():
        summed = one.sum_dtype in LOW
        at, to = (one.sum, one.sum_dtype) if summed else (one.source, one.source_dtype)
        if index not in step.trained or index >= len(operators) or one.moved < MOVED or operators[at].where in told:
            continue
        told.add(operators[at].where)
        also = tuple({operators[index].where} - {operators[at].where})
        yield observed("noise-16bit", operators[at], also=also, infinite=0.0, tail=0.0, moved=one.moved, to=to)
