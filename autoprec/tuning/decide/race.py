"""The race: who of those that were tried is surely acceptable, and whose next paired seed would tell most.

Trials and further seeds are one pool of measurements. A policy is measured under one more seed while that may still
change the answer: while it is expected to gain something over the best policy that is surely acceptable, and is not
surely acceptable (or surely not) itself. The first one that is turns into what the others have to beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoprec.tuning.decide.decision import Candidate, Judgement
from autoprec.tuning.decide.sampler.expectation import FEWEST_SEEDS, MOST_SEEDS, Expectation

__all__ = ["Entrant", "Standings", "fewest_seeds", "standings", "stop_gap"]

#: A gap shrinks again at times: it may still fall by this factor until the end of a trial. That early gaps are smaller
#: than late ones only makes the rule later, never wrong.
MARGIN = 4.0


@dataclass(frozen=True)
class Entrant:
    """A policy that was tried: its params, and how it was measured so far."""

    params: Mapping[str, Any]
    candidate: Candidate

    @property
    def runs(self) -> int:
        """Return under how many paired seeds it was measured."""
        return len(self.candidate.divergences)


@dataclass(frozen=True)
class Standings:
    """Where everybody stands.

    Attributes:
        candidates: with the upper bound that all runs together give each of them.
        judged: what is said of each.
        accepted: positions of those that are surely acceptable.
        next: position of the one whose next seed is worth most; None where none is worth a run.
        gain: what it is expected to gain for each run that it takes.
        chance: of each, of turning out acceptable.
        best_cost: what has to be beaten; None where that is the script.
    """

    candidates: tuple[Candidate, ...]
    judged: tuple[Judgement, ...]
    accepted: tuple[int, ...]
    next: int | None
    gain: float
    chance: tuple[float, ...]
    best_cost: float | None


def fewest_seeds(seeds: int, *, blind: bool) -> int:
    """Return under how many paired seeds a policy is measured before it is accepted: all where the loss is blind."""
    return seeds if blind else min(FEWEST_SEEDS, seeds)


def standings(
    expectation: Expectation,
    entrants: Sequence[Entrant],
    judge: Callable[[Sequence[Candidate]], Sequence[Judgement]],
    *,
    seeds: int,
) -> Standings:
    """Return where everybody stands.

    Args:
        expectation: fitted to every run so far.
        entrants: everything that was tried, the script left out.
        judge: says of candidates which limits they break (:func:`autoprec.tuning.decide.decision.judge`).
        seeds: paired seeds that are asked for: as many are run where the loss cannot judge, else up to
            :data:`MOST_SEEDS` times as many, and as few as two.
    """
    if not entrants:
        return Standings((), (), (), None, 0.0, (), None)
    blind = expectation.goals.blind
    fewest = fewest_seeds(seeds, blind=blind)
    points = expectation.points([e.params for e in entrants])
    expectation.best_cost = None
    outlook = expectation.outlook(points)
    bounds = [None if blind else float(upper) for upper in outlook.upper]
    candidates = tuple(replace(e.candidate, upper=bound) for e, bound in zip(entrants, bounds, strict=True))
    judged = tuple(judge(candidates))
    accepted = tuple(i for i, e in enumerate(entrants) if not judged[i].rejection and e.runs >= fewest)
    best = min((float(outlook.cost[i]) for i in accepted), default=None)
    expectation.best_cost = best
    gains = expectation.outlook(points).worth
    most = seeds if blind else MOST_SEEDS
    left = [
        i for i, e in enumerate(entrants) if i not in accepted and _is_open(e, judged[i], fewest, most, blind=blind)
    ]
    ahead = max(left, key=lambda i: gains[i], default=None)
    gain = float(gains[ahead]) if ahead is not None else 0.0
    chance = tuple(float(c) for c in outlook.chance)
    return Standings(candidates, judged, accepted, ahead if gain > 0 else None, gain, chance, best)


def _is_open(entrant: Entrant, judged: Judgement, fewest: int, most: int, *, blind: bool) -> bool:
    """Say whether another seed could make a policy acceptable."""
    candidate = entrant.candidate
    if not entrant.runs or entrant.runs >= most or not all(math.isfinite(gap) for gap in candidate.divergences):
        return False
    return not judged.final and (not blind or not judged.rejection or entrant.runs < fewest)


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
