"""The Pareto front of measured trials, and the area that one more point would add to what it dominates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autoprec.tuning.study.records import TrialRecord

__all__ = ["added_area", "front", "nondominated"]


def nondominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of points that no other point beats or equals in everything and beats in something.

    Of equal points the first is kept. Points with a non-finite coordinate are never on the front. Any number of
    minimised objectives; the result is ordered by the first objective.
    """
    kept: list[int] = []
    finite = [i for i, p in enumerate(points) if all(math.isfinite(v) for v in p)]
    for i in sorted(finite, key=lambda k: tuple(points[k])):
        if not any(all(a <= b for a, b in zip(points[j], points[i], strict=True)) for j in kept):
            kept.append(i)
    return kept


def front(records: Sequence[TrialRecord], metrics: Sequence[str] = ("step_time_ms", "divergence")) -> list[TrialRecord]:
    """Return the records on the Pareto front of the named metrics (all minimised), fastest first.

    Only records that were measured to their end and have every metric take part.
    """
    usable = [r for r in records if r.ok and all(name in r.metrics for name in metrics)]
    points = [[r.metrics[name] for name in metrics] for r in usable]
    return [usable[i] for i in nondominated(points)]


def added_area(
    points: npt.NDArray[np.float64], candidates: npt.NDArray[np.float64], reference: tuple[float, float]
) -> npt.NDArray[np.float64]:
    """Return by how much each candidate ``[M, 2]`` alone would enlarge the hypervolume of points ``[N, 2]``.

    Both coordinates are minimised; the area is bounded by the reference point.
    """
    inside = points[(points < reference).all(axis=1)] if len(points) else points.reshape(0, 2)
    order = np.lexsort((inside[:, 1], inside[:, 0]))
    x = np.concatenate([inside[order, 0], [reference[0]]])
    height = np.minimum.accumulate(np.concatenate([[reference[1]], inside[order, 1]]))
    left = np.concatenate([[-np.inf], x[:-1]])
    # between two neighbouring points the front is as low as the lowest point so far
    width = np.maximum(x[None, :] - np.maximum(left[None, :], candidates[:, :1]), 0.0)
    return np.asarray((width * np.maximum(height[None, :] - candidates[:, 1:], 0.0)).sum(axis=1))
