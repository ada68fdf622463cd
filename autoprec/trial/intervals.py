"""The middle of a few measured ratios, and how far it may be off by chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache

#: Fewer values than this have no distribution-free 95 % interval.
FEWEST = 6


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return (median, low, high): the interval holds the true median with ``confidence``.

    The median is that of the averages of all pairs of values, and the interval's ends are two of these averages, so
    that single disturbed values move neither far (Hodges and Lehmann, Annals of Mathematical Statistics 34, 1963; the
    interval is that of Wilcoxon's signed-rank test). Step times have two or more modes, by which pages a process has
    got: the plain median of a few jumps from one mode to the other, and is half as precise. Where the distribution is
    not symmetric, it is not the plain median that is estimated, but this one.

    Args:
        values: at least one; with fewer than :data:`FEWEST` the interval is unbounded, and the median the plain one.
    """
    n = len(values)
    if n < FEWEST:
        return statistics.median(values), -math.inf, math.inf
    averages = sorted((one + other) / 2.0 for i, one in enumerate(values) for other in values[i:])
    outside = _outside(n, confidence)
    middle = statistics.median(averages)
    return middle, averages[outside], averages[-1 - outside]


def ratio_interval(rounds: Sequence[Mapping[str, float]], base: str, name: str) -> tuple[float, float, float] | None:
    """Return how many times as fast one contender of a duel is as another, with the 95 % interval.

    Args:
        rounds: milliseconds per step by contender, round by round.
        base: the contender that the other is compared with.
        name: the other one.

    Returns:
        As :func:`median_interval`; None where fewer than :data:`FEWEST` rounds have both.
    """
    ratios = [one[base] / one[name] for one in rounds if base in one and name in one]
    return median_interval(ratios) if len(ratios) >= FEWEST else None


@cache
def _outside(n: int, confidence: float) -> int:
    """Return how many averages of pairs of ``n`` values lie below the interval, and as many above it.

    As many as the sum of the ranks of negative values stays below with a chance of ``(1 - confidence) / 2``.
    """
    ways = [1]  # of getting each sum of ranks, by which of the ranks 1 to n belong to negative values
    for rank in range(1, n + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    most, below, outside = (1.0 - confidence) / 2.0 * 2**n, 0, -1
    while below + ways[outside + 1] <= most:
        outside += 1
        below += ways[outside]
    return outside
