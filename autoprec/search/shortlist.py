"""Which trials deserve to be measured again: the fast ones whose divergence the model of all trials believes.

The fastest of many noisy single-seed trials within the budget is within it partly by luck. The divergence model, fitted
to all of them, knows what such a point usually costs; points are ranked by what both say together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from autoprec.search.beliefs import divergence_model, observation
from autoprec.search.problem import Problem
from autoprec.search.records import TrialRecord
from autoprec.search.sensitivity import SensitivityTable

__all__ = ["shortlist", "smoothed_divergence"]

#: Shares of the budget that the members of a shortlist are chosen for, in turn: one that just fits, then safer ones.
SHARES = (0.9, 0.7, 0.5)


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
    belief = model.mean()
    return [belief.divergence(row.index, row.features, row.base2) for row in rows]


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
    limit = max(max_divergence, noise_floor)
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
