"""How long a search will take, by phase."""

from __future__ import annotations

import pytest

from autoprec.tuning.options import SearchOptions
from autoprec.tuning.schedule import Pace, schedule

OPTIONS = SearchOptions(command=("train.py",), trials=30, steps=20, warmup=3, seeds=4)


def test_every_run_is_counted() -> None:
    found = schedule(OPTIONS, Pace(5.0, 0.1, 20.0), Pace(5.0, 0.1, 74.0), setup_s=10.0, passes=60)
    assert found.reference_s == pytest.approx(10 + 3 * 27.3)
    assert found.scan_s == pytest.approx(5 + 6)
    assert found.trials_s == pytest.approx(30 * 81.3)
    assert (found.trials, found.runs) == (30, 9)
    assert found.finalists_s == pytest.approx(3 * 10 + 9 * 81.3)
    assert found.total_s == pytest.approx(found.reference_s + found.rest_s)


def test_runs_side_by_side_share_the_time() -> None:
    pace = Pace(1.0, 0.1)
    alone = schedule(OPTIONS, pace, pace, setup_s=0.0)
    shared = schedule(OPTIONS, pace, pace, setup_s=0.0, workers=4, final_workers=2)
    assert alone.trials_s == pytest.approx(4 * shared.trials_s)
    assert alone.finalists_s == pytest.approx(2 * shared.finalists_s)


def test_quantised_models_take_longer_to_compile_and_emulated_ones_longer_to_run() -> None:
    written = Pace(2.0, 0.1, 10.0)
    assert written.of_trials(measured=True).compile_s == pytest.approx(32.0)
    assert written.of_trials(measured=True).step_s == 0.1
    assert written.of_trials(measured=False) == Pace(2.0, 0.2, 10.0)


def test_a_person_is_told_what_takes_how_long_and_where_the_budget_ends_it() -> None:
    pace = Pace(5.0, 0.1, 20.0)
    found = schedule(OPTIONS, pace, pace, setup_s=10.0)
    told = found.describe()
    parts = "gradient errors 11 s, 30 trials 14 min, 9 runs under further paired seeds 5 min"
    assert told == f"expected from here on: at most about 18 min ({parts})"
    assert found.describe(600.0) == told + "; --budget ends it after 10 min in all"
    assert found.describe(86_400.0) == told
