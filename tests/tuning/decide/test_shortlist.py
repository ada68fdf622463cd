from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.shortlist import MARGIN, faster_ones, shortlist, smoothed_divergence, stop_gap
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.study.records import TrialRecord
from tests.tuning.synthetic import Synthetic, synthetic

BUDGET = 0.0025


def records(found: Synthetic, noise: float, count: int = 60) -> list[TrialRecord]:
    rng = np.random.default_rng(1)
    out = []
    for k in range(count):
        index = np.array([rng.choice([0, 1, 2]) if rng.random() < (k % 10) / 10 else 0 for _ in found.problem.groups])
        params = found.problem.from_indices(index, {})
        step, gap = found.step(params)
        metrics = {"step_time_ms": step, "divergence": gap * float(np.exp(noise * rng.normal()))}
        out.append(TrialRecord(k, "search", f"trial {k}", params, {}, "ok", metrics=metrics))
    return out


def table(found: Synthetic) -> SensitivityTable:
    names = tuple(g.name for g in found.problem.groups)
    return SensitivityTable(names, found.problem.choice_names, found.prior.error2)


def test_smoothing_takes_away_most_of_the_noise() -> None:
    found = synthetic(misfit=0.3)
    noisy = records(found, 0.5)
    true = np.log([found.step(r.params)[1] for r in noisy])
    raw = np.log([r.metrics["divergence"] for r in noisy]) - true
    smooth = np.log(smoothed_divergence(found.problem, table(found), noisy)) - true
    assert np.std(smooth) < 0.7 * np.std(raw)


def test_a_lucky_trial_is_not_shortlisted() -> None:
    found = synthetic(misfit=0.2)
    noisy = records(found, 0.1)
    fast = found.problem.params_of("fp8_tensorwise")
    step, gap = found.step(fast)
    assert gap > 1.5 * BUDGET
    lucky = TrialRecord(
        99, "search", "lucky", fast, {}, "ok", metrics={"step_time_ms": step, "divergence": 0.9 * BUDGET}
    )
    picked = shortlist(found.problem, table(found), [*noisy, lucky], max_divergence=BUDGET)
    assert 1 <= len(picked) <= 3
    assert lucky not in picked
    assert all(found.step(r.params)[1] <= 1.2 * BUDGET for r in picked)
    steps = [r.metrics["step_time_ms"] for r in picked]
    assert steps == sorted(steps)


def test_nothing_within_the_budget_is_an_empty_list() -> None:
    found = synthetic()
    assert shortlist(found.problem, table(found), records(found, 0.1), max_divergence=1e-9) == []


def test_what_lies_between_a_rejected_finalist_and_the_best_is_found() -> None:
    found = synthetic(misfit=0.1)
    known = records(found, 0.05, 120)
    ordered = sorted(known, key=lambda r: r.metrics["step_time_ms"])
    limit = float(np.median([r.metrics["divergence"] for r in known]))
    fast = next(r for r in ordered if r.metrics["divergence"] > 1.5 * limit)
    slow = next(r for r in reversed(ordered) if r.metrics["divergence"] < 0.5 * limit)
    seen = {r.number: 2.0 * r.metrics["divergence"] for r in (fast, slow)}  # these seeds show twice what the trials did
    ahead = slow.metrics["step_time_ms"]

    def between(means: dict[int, float]) -> list[TrialRecord]:
        return faster_ones(found.problem, table(found), known, means, limit=limit, noise_floor=0.0, ahead_of_ms=ahead)

    picked = between(seen)
    assert 1 <= len(picked) <= 2
    for record in picked:
        assert record.number not in seen
        assert record.metrics["step_time_ms"] < ahead
        assert 2.0 * found.step(record.params)[1] <= limit
    bolder = between({fast.number: fast.metrics["divergence"], slow.number: slow.metrics["divergence"]})
    assert bolder[0].metrics["step_time_ms"] < picked[0].metrics["step_time_ms"]  # their seeds show nothing worse
    assert between({r.number: r.metrics["divergence"] for r in known}) == []  # everything was a finalist already


FRONT = [(10.0, 0.03), (15.0, 0.004), (20.0, 0.001)]


def test_a_trial_faster_than_anything_measured_is_never_stopped() -> None:
    assert stop_gap(9.0, FRONT, max_divergence=0.0025) == math.inf
    assert stop_gap(9.0, [], max_divergence=0.0025) == math.inf
    assert stop_gap(math.inf, FRONT, max_divergence=0.0025) == math.inf


def test_a_trial_is_stopped_once_something_as_fast_is_out_of_reach() -> None:
    assert stop_gap(12.0, FRONT, max_divergence=0.0025) == MARGIN * 0.03
    assert stop_gap(16.0, FRONT, max_divergence=0.0025) == MARGIN * 0.004
    assert stop_gap(25.0, FRONT, max_divergence=0.0025) == MARGIN * 0.0025


def test_gaps_within_the_noise_stop_nothing() -> None:
    assert stop_gap(25.0, FRONT, max_divergence=0.0025, noise_floor=0.02) == MARGIN * 0.04


@given(st.floats(5, 40), st.floats(0, 0.1))
def test_whatever_could_still_be_acceptable_goes_on(step: float, gap: float) -> None:
    if gap <= 0.0025:
        assert stop_gap(step, FRONT, max_divergence=0.0025) > gap
