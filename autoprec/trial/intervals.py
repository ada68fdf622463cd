"""The median of a few measured ratios, and how far it may be off by chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Fewer values than this have no distribution-free 95 % interval.
FEWEST = 6


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return (median, low, high): the interval holds the true median with ``confidence``, whatever the distribution.

    Its ends are order statistics (the sign test's interval), so that single disturbed values move neither the median
    nor the interval. Whole ranks alone are too wide where values are few: between the two that enclose the confidence
    it is interpolated (Hettmansperger and Sheather, Statistics & Probability Letters 4, 1986).

    Args:
        values: at least one; with fewer than :data:`FEWEST` the interval is unbounded.
    """
    ordered, n = sorted(values), len(values)
    middle = statistics.median(ordered)
    if n < FEWEST:
        return middle, -math.inf, math.inf
    tail = [0.5**n]  # chance that at most k of n values lie below the median
    for k in range(1, n // 2 + 1):
        tail.append(tail[-1] + math.comb(n, k) * 0.5**n)
    # the k-th value from either end: the largest k that still covers
    k = max((k for k in range(1, n // 2 + 1) if 1 - 2 * tail[k - 1] >= confidence), default=1)
    covered, next_covered = 1 - 2 * tail[k - 1], 1 - 2 * tail[k]
    part = (covered - confidence) / (covered - next_covered) if covered > confidence else 0.0
    weight = (n - k) * part / (k + (n - 2 * k) * part)
    inner = min(k, n // 2)
    low = (1 - weight) * ordered[k - 1] + weight * ordered[inner]
    high = (1 - weight) * ordered[n - k] + weight * ordered[n - 1 - inner]
    return middle, min(low, middle), max(high, middle)
