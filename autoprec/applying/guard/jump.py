"""A loss that jumps: found within a few steps, where medians over a hundred steps would take tens of them.

The last 4, 8 and 16 losses are compared with the hundred before them. The lower median of the last ones (so that two
batches with outliers among four are not enough) counts as a jump from where it lies above the median of the past by
more than 4.5 standard errors, and by more than any earlier run of as many losses did, by three quarters: what the
batches do by themselves is in the past as well, however heavy its tails are. Where the gradient norm has jumped at the
same time, which noise of the batches rarely does, 2.5 standard errors and a quarter are enough. The numbers were chosen
on two seeds of the runs of benchmarks/results/2026-11-22_long_run.md, and judged there on others and on another model.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

#: How many last losses are looked at; where all figures are from says the head of this file.
SCALES = (4, 8, 16)
#: Losses that must have been seen before the last ones: fewer say too little about what is usual.
LEAST_PAST = 40
#: Standard errors, and how much more than was ever seen: by the loss alone, and where the gradient norm jumps as well.
ALONE, WITH_NORM = (4.5, 1.75), (2.5, 1.25)
#: Standard errors by which the gradient norm must lie above what was usual.
NORM_ERRORS = 4.0


class LossJump:
    """Takes in one loss per step and says how far the last ones lie above what was usual.

    Args:
        window: how many losses are the past.
    """

    def __init__(self, window: int = 100) -> None:
        length = window + max(SCALES)
        self._values: deque[float] = deque(maxlen=length)
        self._norms: deque[float] = deque(maxlen=length)
        self._medians = {n: deque[float](maxlen=length - n) for n in SCALES}

    def clear(self) -> None:
        """Forget the losses seen so far."""
        for kept in (self._values, self._norms, *self._medians.values()):
            kept.clear()

    def add(self, value: float, norm: float | None = None) -> float:
        """Return the largest jump over all scales as a share of the past's median; 0.0 where too little is past.

        Args:
            value: a loss. What is not finite is left out.
            norm: the gradient norm of the step, where known.
        """
        if not math.isfinite(value):
            return 0.0
        self._values.append(value)
        if norm is not None and math.isfinite(norm):
            self._norms.append(norm)
        values, norms, found = list(self._values), list(self._norms), 0.0
        for n in SCALES:
            if len(values) < n:
                continue
            now = median_low(values[-n:])
            self._medians[n].append(now)
            past, highest = values[:-n], max(list(self._medians[n])[:-n], default=math.inf)
            if len(past) < LEAST_PAST or now <= highest:
                continue
            errors, beyond = WITH_NORM if _rises(norms, n) else ALONE
            usual = median(past)
            noise = errors * _standard_error(past, n)
            found = max(found, (now - usual - max(noise, beyond * (highest - usual))) / max(abs(usual), 1e-12))
        return found


def _rises(norms: Sequence[float], n: int) -> bool:
    past = norms[:-n]
    return len(past) >= LEAST_PAST and median(norms[-n:]) - median(past) > NORM_ERRORS * _standard_error(past, n)


def _standard_error(values: Sequence[float], n: int) -> float:
    """Return the standard error of a median of ``n``."""
    return 1.2533 * sigma_of(values) / math.sqrt(n)


def sigma_of(values: Sequence[float]) -> float:
    """Return the noise of a series (one standard deviation) from its neighbours' differences: trends stay out of it."""
    jumps = [abs(b - a) for a, b in itertools.pairwise(values)]
    return median(jumps) / 0.954 if len(jumps) >= 4 else 0.0  # of normal noise: median |difference| = 0.954 sigma
