"""What the speeds of trials are worth beside those of duels.

A trial's step time is over that of a reference that ran minutes before, and off by a tenth on a busy machine. Duels say
how far the machine has drifted since, the spread over seeds how noisy trials are, and both together which of them is
still worth a duel of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autoprec.tuning.decide.decision import Standing
from autoprec.tuning.decide.noise import student95
from autoprec.tuning.decide.sampler.expectation import MODEL_RESOLUTION
from autoprec.tuning.study.run import LEAST_NOISE, MOST_NOISE

#: Policies that two duels time: once as many are, no further one that may be faster by its trial alone.
_ENOUGH = 8


def worth_timing(final: Sequence[Standing], noise: float) -> list[Standing]:
    """Leave out what was not timed beside the script once two duels' policies were and one is faster than the script.

    Of a dozen policies whose trials are within the noise of the fastest, a duel each takes minutes to gain a percent.
    What seems faster by more than the noise stays.

    Args:
        final: policies under enough seeds.
        noise: relative difference of two speed-ups of trials that noise alone stays below.
    """
    timed = [one for one in final if one.timed and not one.rejection]
    if len(timed) < _ENOUGH or not any(one.is_surely_above(1.0) for one in timed):
        return list(final)
    most = (1.0 + noise) * max(one.speedup for one in timed)
    return [one for one in final if one.timed or one.rejection or one.speedup > most]


def drift(speedups: Sequence[tuple[float, float]]) -> float:
    """Return by what factor the speed-ups of trials are off on a machine that has changed since the reference ran.

    The reference of all trials ran minutes before them: its time divides every one of their speed-ups. Where policies
    were in a duel as well, their ratios (standard deviation 3 %, that of the reference's time 6 %) say how it is now.

    Args:
        speedups: (by its trial, by its duel) of each policy that has both.
    """
    logs = [math.log(duel / trial) for trial, duel in speedups if trial > 0.0]
    return math.exp(sum(logs) / (len(logs) + 0.25)) if logs else 1.0


def timing_noise(measured_times: bool, speedups: Sequence[Sequence[float]]) -> float:
    """Return the relative difference of two median speed-ups that noise alone stays below with 95 %.

    The spread over the seeds is pooled over the candidates; with few seeds it is itself uncertain (Student's t).
    Modelled ones have the model's resolution instead.
    """
    if not measured_times:
        return MODEL_RESOLUTION
    several = [s for s in speedups if len(s) > 1]
    if not several:
        return MOST_NOISE
    free = sum(len(s) - 1 for s in several)
    spread = math.sqrt(sum((len(s) - 1) * (statistics.stdev(s) / statistics.fmean(s)) ** 2 for s in several) / free)
    error = spread * math.sqrt(2 / statistics.fmean(len(s) for s in several))
    return min(MOST_NOISE, max(LEAST_NOISE, student95(free) * error))
