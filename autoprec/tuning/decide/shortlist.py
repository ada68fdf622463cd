"""Which trials deserve more time: which running one is hopeless, and which finished ones are measured again.

A trial is useful when it ends within the divergence budget, or on the Pareto front of step time and divergence. Its
step time is known before it ends (modelled, or after the first steps), so the front says which divergence would still
be worth having; beyond a multiple of it the trial is ended early.

The fastest of many noisy single-seed trials within the budget is within it partly by luck. The divergence model, fitted
to all of them, knows what such a point usually costs; finalists are ranked by what both say together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from autoprec.tuning.decide.noise import screening_limit
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.prior import divergence_model, observation
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.study.records import TrialRecord

__all__ = ["MARGIN", "faster_ones", "shortlist", "smoothed_divergence", "stop_gap"]

#: A gap shrinks again at times: it may still fall by this factor until the end of a trial. That early gaps are smaller
#: than late ones only makes the rule later, never wrong.
MARGIN = 4.0
#: Shares of the budget that the trials of a shortlist are chosen for, in turn: one that just fits, then safer ones.
SHARES = (0.9, 0.7, 0.5)
#: The same for those that are measured once the first finalists have shown what the seeds make of such points.
FASTER_SHARES = (0.75, 0.64)


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


def smoothed_divergence(
    problem: Problem, table: SensitivityTable, records: Sequence[TrialRecord], noise_floor: float = 0.0
) -> list[float]:
    """Return what each record's divergence would be under fresh seeds, by the model fitted to all of them.

    Args:
        problem: the search problem.
        table: its sensitivity table (the model's prior).
        records: trials that were measured to their end.
        noise_floor: divergence of the benign perturbation.
    """
    model = divergence_model(problem, table.error2, noise_floor)
    rows = [
        observation(problem, r.params, partial(table.parameter_error2, problem), r.metrics["divergence"])
        for r in records
    ]
    model.fit(rows)
    law = model.mean()
    return [law.divergence(row.index, row.features, row.base2) for row in rows]


def shortlist(
    problem: Problem,
    table: SensitivityTable,
    records: Sequence[TrialRecord],
    *,
    max_divergence: float,
    noise_floor: float = 0.0,
    count: int = 3,
) -> list[TrialRecord]:
    """Return up to ``count`` records, fastest first: for falling shares of the budget the fastest that both fit.

    A record fits a share when neither its own measurement exceeds the budget nor its smoothed divergence the share.
    """
    limit = screening_limit(max_divergence, noise_floor)
    usable = [r for r in records if r.ok and math.isfinite(r.metrics["divergence"])]
    smoothed = dict(
        zip((r.number for r in usable), smoothed_divergence(problem, table, usable, noise_floor), strict=True)
    )
    ordered = sorted(usable, key=lambda r: r.metrics["step_time_ms"])
    kept: dict[int, TrialRecord] = {}
    for turn in range(count):
        share = SHARES[min(turn, len(SHARES) - 1)] * limit
        for record in ordered:
            fits = record.metrics["divergence"] <= limit and smoothed[record.number] <= share
            if fits and record.number not in kept:
                kept[record.number] = record
                break
    return sorted(kept.values(), key=lambda r: r.metrics["step_time_ms"])


def faster_ones(
    problem: Problem,
    table: SensitivityTable,
    records: Sequence[TrialRecord],
    means: Mapping[int, float],
    *,
    limit: float,
    noise_floor: float,
    ahead_of_ms: float,
) -> list[TrialRecord]:
    """Return trials between the fastest finalist that was accepted and the faster ones that were not.

    The first finalists jump over the budget: the fastest of them are beyond it, the next is well within. What their
    seeds say about all of them, against what the model expected, tells where in between the budget lies.

    Args:
        problem: the search problem.
        table: its sensitivity table.
        records: every trial that was measured to its end.
        means: number -> mean divergence over the paired seeds, of those that were finalists already.
        limit: the divergence budget, or what noise explains (:func:`~autoprec.tuning.decide.noise.screening_limit`).
        noise_floor: divergence of the benign perturbation.
        ahead_of_ms: step time that they have to beat.
    """
    usable = [r for r in records if r.ok and math.isfinite(r.metrics["divergence"])]
    expected = dict(
        zip((r.number for r in usable), smoothed_divergence(problem, table, usable, noise_floor), strict=True)
    )
    ratios = [
        math.log(mean / expected[n]) for n, mean in means.items() if n in expected and math.isfinite(mean) and mean > 0
    ]
    scale = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
    waiting = [r for r in usable if r.number not in means and r.metrics["step_time_ms"] < ahead_of_ms]
    waiting.sort(key=lambda r: r.metrics["step_time_ms"])
    found: list[TrialRecord] = []
    for share in FASTER_SHARES:
        fits = [r for r in waiting if r not in found and scale * expected[r.number] <= share * limit]
        found += fits[:1]
    return found
