"""The Pareto front of measured trials."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.tuning.study.run import Run


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


def front(records: Sequence[Run]) -> list[Run]:
    """Return the records on the Pareto front of step time and divergence, fastest first.

    Only records that were measured to their end and have both metrics take part.
    """
    metrics = ("step_time_ms", "divergence")
    usable = [r for r in records if r.ok and all(name in r.metrics for name in metrics)]
    points = [[r[name] for name in metrics] for r in usable]
    return [usable[i] for i in nondominated(points)]
