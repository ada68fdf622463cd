"""The end of a search, replayed: finalists over paired seeds, a decision, and what fresh seeds say about it.

The same steps as :mod:`autoprec.tuning.phases.finalists`, on the table of ground_truth.py: the fastest trials within
the budget, those whose divergence the model of all trials believes, the best preset; four paired seeds, then four for
the uncertain, then safer ones; and what lies between the best of them and faster ones that were rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ground_truth import TRIAL_SEEDS, TRUTH_SEEDS, Case
from search_runs import MAX_DIVERGENCE, PRESETS

from autoprec.tuning.decide.decision import Candidate, Decision, choose
from autoprec.tuning.decide.shortlist import faster_ones, shortlist, smoothed_divergence
from autoprec.tuning.phases.finalists import MODELLED_TIE, SAFER_SHARES, UNCERTAIN_SHARE
from autoprec.tuning.study.records import TrialRecord

FINALISTS, PAIRED, FRESH = 4, 4, 16


@dataclass(frozen=True)
class Ending:
    """What one search decided: its row (empty for "stay"), and the mean over fresh seeds."""

    row: bytes
    mean: float


def ending(case: Case, log: Sequence[bytes], seed: int) -> Ending:
    """Decide at the end of a run."""
    floor = case.scans[seed].floor
    limit = max(MAX_DIVERGENCE, floor)
    table = case.scans[seed].table
    records = [_record(case, number, row, seed) for number, row in enumerate(log)]
    fit = sorted((r for r in records if r.metrics["divergence"] <= limit), key=_step)
    believed = smoothed_divergence(case.problem, table, records, floor)
    worst = {r.number: max(b, r.metrics["divergence"]) for r, b in zip(records, believed, strict=True)}
    short = shortlist(case.problem, table, fit, max_divergence=MAX_DIVERGENCE, noise_floor=floor, count=FINALISTS - 1)
    presets = [r for r in fit if r.kind == "preset"][:1]
    picked = list({r.number: r for r in (*fit[:1], *short, *presets, *fit[1:FINALISTS])}.values())[: FINALISTS + 1]
    tried: list[TrialRecord] = []
    seeds: dict[int, int] = {}
    for turn in range(1 + len(SAFER_SHARES)):
        seeds |= dict.fromkeys((r.number for r in picked), PAIRED)
        tried += picked
        decision = _decide(case, log, tried, seeds, seed, floor)
        if decision.index is None:
            means = {r.number: float(np.mean(_paired(case, log[r.number], seed, PAIRED))) for r in picked}
            uncertain = sorted((r for r in picked if means[r.number] <= UNCERTAIN_SHARE * limit), key=_step)[:3]
            seeds |= dict.fromkeys((r.number for r in uncertain), 2 * PAIRED)
            decision = _decide(case, log, tried, seeds, seed, floor) if uncertain else decision
        if decision.index is not None:
            ahead = _step(tried[decision.index]) * (1 - MODELLED_TIE)
            means = {r.number: float(np.mean(_paired(case, log[r.number], seed, seeds[r.number]))) for r in tried}
            if any(_step(r) < ahead for r in tried):
                between = faster_ones(
                    case.problem, table, records, means, limit=limit, noise_floor=floor, ahead_of_ms=ahead
                )
                seeds |= dict.fromkeys((r.number for r in between), PAIRED)
                tried += between
                decision = _decide(case, log, tried, seeds, seed, floor)
            row = log[tried[decision.index].number]
            fresh = list(TRUTH_SEEDS)[:FRESH]
            case.measure((row, s) for s in fresh)
            return Ending(row, float(np.mean([case.values[row][s] for s in fresh])))
        if turn < len(SAFER_SHARES):
            known = {r.number for r in tried}
            rest = [r for r in fit if r.number not in known]
            safe = [r for r in rest if worst[r.number] <= SAFER_SHARES[turn] * limit][:2]
            safest = sorted(rest, key=lambda r: worst[r.number])[:1]
            picked = list({r.number: r for r in (*safe, *safest)}.values())
    return Ending(b"", 0.0)


def _step(record: TrialRecord) -> float:
    return record.metrics["step_time_ms"]


def _paired(case: Case, row: bytes, seed: int, count: int) -> list[float]:
    seeds = [TRIAL_SEEDS[(seed + k) % len(TRIAL_SEEDS)] for k in range(count)]
    case.measure((row, s) for s in seeds)
    return [case.trial(row, s) for s in seeds]


def _decide(
    case: Case, log: Sequence[bytes], tried: Sequence[TrialRecord], seeds: dict[int, int], seed: int, floor: float
) -> Decision:
    candidates = [
        Candidate(
            str(r.number),
            1e3 / _step(r),
            tuple(_paired(case, log[r.number], seed, seeds[r.number])),
            preset=r.kind == "preset",
        )
        for r in tried
    ]
    return choose(candidates, max_divergence=MAX_DIVERGENCE, noise_floor=floor, timing_noise=0.0)


def _record(case: Case, number: int, row: bytes, seed: int) -> TrialRecord:
    """Return a logged trial as the record the search keeps."""
    params = case.problem.from_indices(np.frombuffer(row, dtype=np.uint8), {})
    metrics = {"step_time_ms": case.time(row), "divergence": case.trial(row, seed)}
    kind = "preset" if number < PRESETS else "search"
    return TrialRecord(number, kind, f"trial {number}", params, {}, "ok", metrics=metrics)
