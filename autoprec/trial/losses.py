"""The unit in which loss gaps are measured, for the trial that ends itself early and for the search that scores it.

A gap is relative to the reference's loss at the same step. Where a loss goes to zero (regression on clean data, a
classifier that has learnt its training set) that ratio is meaningless: 1e-6 against 3e-6 is a gap of 200 % that does
not matter. So the unit never falls below a tenth of the loss that training started from; curves that stay above it, as
those of language models do, are measured relatively throughout.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Share of the initial (or usual, whichever is larger) loss below which gaps are absolute.
_LEAST_SHARE = 0.1


def loss_units(reference: Sequence[float]) -> list[float]:
    """Return the unit of a loss gap at every step of a reference: positive, finite where the loss is."""
    sizes = [abs(v) for v in reference]
    finite = [v for v in sizes if math.isfinite(v)]
    if not any(finite):
        return [1.0] * len(sizes)
    start = statistics.fmean(finite[: max(1, len(finite) // 4)])
    least = _LEAST_SHARE * max(start, statistics.median(finite))
    return [max(v, least) if math.isfinite(v) else v for v in sizes]
