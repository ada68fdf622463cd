"""When a running trial is hopeless: the loss gap from which on no outcome could make it useful.

A trial is useful when it ends within the divergence budget, or on the Pareto front of step time and divergence. Its
step time is known before it ends (modelled, or after the first steps), so the front says which divergence would still
be worth having. A gap shrinks again at times, and early gaps are smaller than late ones; the margin covers the first,
and the second only makes the rule later, never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["MARGIN", "stop_gap"]

#: A gap may still fall by this factor until the end of a trial.
MARGIN = 4.0


def stop_gap(
    expected_ms: float,
    front: Sequence[tuple[float, float]],
    *,
    max_divergence: float,
    noise_floor: float = 0.0,
    margin: float = MARGIN,
) -> float:
    """Return the gap beyond which a trial is ended as pruned; infinity where any divergence would be worth having.

    Args:
        expected_ms: step time the trial will have; infinity when it cannot be foreseen.
        front: (step time, divergence) of the measured front.
        max_divergence: budget, a fraction.
        noise_floor: divergence of the benign perturbation: gaps of its size mean nothing.
        margin: how much a gap may still shrink.
    """
    better = [gap for step, gap in front if step <= expected_ms]
    if not better or not math.isfinite(expected_ms):
        return math.inf
    # the best divergence at this speed or faster: above it the trial would be dominated
    return margin * max(min(better), max_divergence, 2.0 * noise_floor)
