"""Pools all runs and chooses which policy gets the next paired seed.

Trials and further seeds are one pool of measurements. A policy is measured under one more seed while that may still
change the answer: while it is expected to gain something over the incumbent, the best policy that is surely acceptable,
and is not surely acceptable (or surely not) itself. The first accepted policy is the incumbent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.trial.losses import MISMATCH
from autoprec.tuning.decide.decision import Rules, Standing
from autoprec.tuning.decide.problem import Params
from autoprec.tuning.decide.sampler.expectation import FEWEST_SEEDS, LAST_VALUE, MOST_SEEDS, Expectation

#: What is worth so much of the most is worth about the same.
_TIED = 0.9
#: Trials that differ by more than this differ by more than a busy machine alone makes of two runs a minute apart.
_APART = 1.25


@dataclass(frozen=True)
class Ranking:
    """How all policies stand: which are accepted, what another seed may gain, and which policy gets it.

    Attributes:
        standings: every policy that was tried, judged with the upper bound that all runs together give each of them.
        accepted: positions of those that are surely acceptable.
        next: position of the one whose next seed has most value of information; None where no run pays.
        gain: what it is expected to gain, less the price of the runs that it takes.
        best_cost: cost of the incumbent; None where that is the script.
        breaking: names of those that break a limit by what was measured of them.
    """

    standings: tuple[Standing, ...] = ()
    accepted: tuple[int, ...] = ()
    next: int | None = None
    gain: float = 0.0
    best_cost: float | None = None
    breaking: frozenset[str] = frozenset()

    @property
    def sure(self) -> frozenset[str]:
        """Names of those that are surely acceptable."""
        return frozenset(self.standings[i].name for i in self.accepted)


def fewest_seeds(seeds: int, *, uninformative: bool) -> int:
    """Return under how many paired seeds a policy is measured to be accepted: all where the loss is uninformative."""
    return seeds if uninformative else min(FEWEST_SEEDS, seeds)


def rank(expectation: Expectation, entrants: Sequence[tuple[Params, Standing]], rules: Rules, *, seeds: int) -> Ranking:
    """Judge everything that was tried, and say which policy gets the next paired seed.

    Args:
        expectation: fitted to every run so far; its ``best_cost`` becomes the incumbent's.
        entrants: everything that was tried, and how it was measured so far; the script left out.
        seeds: paired seeds that are asked for: as many are run where the loss cannot judge, else from
            :data:`FEWEST_SEEDS` to :data:`MOST_SEEDS`.
    """
    expectation.best_cost = None
    if not entrants:
        return Ranking()
    uninformative = expectation.goals.uninformative
    fewest, most = fewest_seeds(seeds, uninformative=uninformative), seeds if uninformative else MOST_SEEDS
    points = expectation.points([params for params, _ in entrants])
    outlook = expectation.outlook(points)
    standings = tuple(
        rules.judge(replace(one, upper=None if uninformative else float(upper)))
        for (_, one), upper in zip(entrants, outlook.upper, strict=True)
    )
    accepted = tuple(i for i, one in enumerate(standings) if not one.rejection and one.seeds >= fewest)
    best = expectation.best_cost = min((float(outlook.cost[i]) for i in accepted), default=None)
    value = expectation.outlook(points).value

    def is_open(i: int) -> bool:
        """Say whether another seed could make a policy acceptable."""
        one = standings[i]
        if i in accepted or not 0 < one.seeds < most or not all(map(math.isfinite, one.divergences)):
            return False
        return not one.final and (not uninformative or not one.rejection or one.seeds < fewest)

    open_ones = [i for i in range(len(entrants)) if is_open(i)]
    top = max((float(value[i]) for i in open_ones), default=0.0)
    tied = _TIED if expectation.goals.timed else 1.0  # where times are noisy, of about the same what was tried first
    level = [i for i in open_ones if value[i] > 0.0 and value[i] >= tied * top]
    by_speed = expectation.goals.objective == "throughput"
    ahead = _first_of(level, standings, apart=_APART if expectation.goals.timed and by_speed else math.inf)
    gain = float(value[ahead]) if ahead is not None else 0.0
    shown = _shown_faster(standings, open_ones, accepted) if by_speed else None
    if shown is not None:
        ahead, gain = shown
    breaking = frozenset(one.name for one in standings if rules.breaks(one))
    if gain <= 0 and rules.baseline.metric in MISMATCH:
        as_fast = outlook.cost <= expectation.to_beat() + expectation.goals.resolution  # costs are logarithms
        rivals = [i for i in open_ones if as_fast[i] and standings[i].name not in breaking]
        ahead = _closer(standings, rivals, [i for i in accepted if as_fast[i]])
        gain = LAST_VALUE if ahead is not None else 0.0
    return Ranking(standings, accepted, ahead if gain > 0 else None, gain, best, breaking)


def _first_of(level: Sequence[int], standings: Sequence[Standing], *, apart: float) -> int | None:
    """Return the first tried of those of about the same value, or the fastest where its trial was so much faster.

    Values are alike where few runs say what the machine really gives. A search that ends then should not have spent
    its seeds on what came out slower than the script.
    """
    first = min(level, default=None)
    fastest = max(level, key=lambda i: standings[i].speedup, default=None)
    if first is None or fastest is None or standings[fastest].speedup <= apart * standings[first].speedup:
        return first
    return fastest


def _closer(standings: Sequence[Standing], open_ones: Sequence[int], accepted: Sequence[int]) -> int | None:
    """Return which of policies that are as fast brings training and rollout closest; None where an accepted one does.

    No seed of it gains any time, but of those that are tied the closest is taken.
    """

    def apart(i: int) -> float:
        return statistics.fmean(standings[i].excess or (math.inf,))

    found = min(open_ones, key=apart, default=None)
    return None if found is None or apart(found) >= min(map(apart, accepted), default=math.inf) else found


def _shown_faster(
    standings: Sequence[Standing], open_ones: Sequence[int], accepted: Sequence[int]
) -> tuple[int, float] | None:
    """Return the fastest of those that duels show to be faster than all that is accepted, and its gain over the best.

    What was timed beside the script goes before what the models expect of it.
    """
    most = max((standings[i].high or standings[i].speedup for i in accepted), default=1.0)
    surely = [i for i in open_ones if standings[i].is_surely_above(most) and not standings[i].rejection]
    first = max(surely, key=lambda i: standings[i].speedup, default=None)
    best = max((standings[i].speedup for i in accepted), default=1.0)
    return None if first is None else (first, standings[first].speedup / best - 1.0)
