"""The race: who of those that were tried is surely acceptable, and whose next paired seed would tell most.

Trials and further seeds are one pool of measurements. A policy is measured under one more seed while that may still
change the answer: while it is expected to gain something over the best policy that is surely acceptable, and is not
surely acceptable (or surely not) itself. The first one that is turns into what the others have to beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.tuning.decide.decision import Candidate, Judgement, Rules
from autoprec.tuning.decide.problem import Params
from autoprec.tuning.decide.sampler.expectation import FEWEST_SEEDS, MOST_SEEDS, Expectation


@dataclass(frozen=True)
class Standings:
    """Where everybody stands.

    Attributes:
        candidates: with the upper bound that all runs together give each of them.
        judged: what is said of each.
        accepted: positions of those that are surely acceptable.
        next: position of the one whose next seed is worth most; None where none is worth a run.
        gain: what it is expected to gain, less the price of the runs that it takes.
        chance: of each, of turning out acceptable.
        best_cost: what has to be beaten; None where that is the script.
    """

    candidates: tuple[Candidate, ...] = ()
    judged: tuple[Judgement, ...] = ()
    accepted: tuple[int, ...] = ()
    next: int | None = None
    gain: float = 0.0
    chance: tuple[float, ...] = ()
    best_cost: float | None = None


def fewest_seeds(seeds: int, *, blind: bool) -> int:
    """Return under how many paired seeds a policy is measured before it is accepted: all where the loss is blind."""
    return seeds if blind else min(FEWEST_SEEDS, seeds)


def standings(
    expectation: Expectation, entrants: Sequence[tuple[Params, Candidate]], rules: Rules, *, seeds: int
) -> Standings:
    """Return where everybody stands.

    Args:
        expectation: fitted to every run so far; its ``best_cost`` becomes that of the best who is surely acceptable.
        entrants: everything that was tried, and how it was measured so far; the script left out.
        seeds: paired seeds that are asked for: as many are run where the loss cannot judge, else from
            :data:`FEWEST_SEEDS` to :data:`MOST_SEEDS`.
    """
    expectation.best_cost = None
    if not entrants:
        return Standings()
    blind = expectation.goals.blind
    fewest, most = fewest_seeds(seeds, blind=blind), seeds if blind else MOST_SEEDS
    points = expectation.points([params for params, _ in entrants])
    outlook = expectation.outlook(points)
    bounds = [None if blind else float(upper) for upper in outlook.upper]
    candidates = tuple(replace(c, upper=bound) for (_, c), bound in zip(entrants, bounds, strict=True))
    judged = tuple(rules.judge(c) for c in candidates)
    runs = [len(c.divergences) for c in candidates]
    accepted = tuple(i for i, j in enumerate(judged) if not j.rejection and runs[i] >= fewest)
    best = expectation.best_cost = min((float(outlook.cost[i]) for i in accepted), default=None)
    worth = expectation.outlook(points).worth

    def is_open(i: int) -> bool:
        """Say whether another seed could make a policy acceptable."""
        if i in accepted or not 0 < runs[i] < most or not all(map(math.isfinite, candidates[i].divergences)):
            return False
        return not judged[i].final and (not blind or not judged[i].rejection or runs[i] < fewest)

    ahead = max(filter(is_open, range(len(entrants))), key=lambda i: worth[i], default=None)
    gain = float(worth[ahead]) if ahead is not None else 0.0
    chance = tuple(float(c) for c in outlook.chance)
    return Standings(candidates, judged, accepted, ahead if gain > 0 else None, gain, chance, best)
