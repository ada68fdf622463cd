"""How long a search will take, by phase."""

from __future__ import annotations

import dataclasses

import pytest

from autoprec.trial.protocol import NOISE_BATCHES
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.schedule import (
    CACHED_COMPILE,
    QUANTISED_COMPILE,
    Pace,
    describe,
    scan_warmup,
    schedule,
)

OPTIONS = SearchOptions(command=("train.py",), trials=30, steps=20, warmup=3, seeds=4)


def test_every_run_is_counted() -> None:
    found = schedule(OPTIONS, Pace(5.0, 0.1, 20.0), Pace(5.0, 0.1, 74.0), setup_s=10.0, passes=60)
    cached = CACHED_COMPILE * 20
    assert found.reference_s == pytest.approx(10 + 27.3 + 2 * (7.3 + cached))
    assert found.scan_s == pytest.approx(5 + 14 * 0.1 + 1.4 * 6)  # warm-up, noise, and passes in fresh forks
    assert found.trials_s == pytest.approx(30 * 81.3)
    assert (found.trials, found.runs) == (30, 9)
    further = 3 * (7.3 + cached + 2 * (7.3 + CACHED_COMPILE * 74))  # compiled in their first trial
    assert found.finalists_s == pytest.approx(3 * 10 + further)
    assert found.total_s == pytest.approx(found.reference_s + found.rest_s)


def test_a_search_by_our_sampler_usually_ends_sooner() -> None:
    pace = Pace(5.0, 0.1, 20.0)
    usual = schedule(OPTIONS, pace, pace, setup_s=10.0, usual=True)
    assert (usual.trials, usual.runs) == (4, 3)
    assert usual.finalists_s == pytest.approx(10 + 3 * (7.3 + CACHED_COMPILE * 20))
    assert usual.whole == usual.whole_s == 0  # all runs compile the whole model
    other = dataclasses.replace(OPTIONS, sampler="tpe")
    assert schedule(other, pace, pace, setup_s=10.0, usual=True) == schedule(OPTIONS, pace, pace, setup_s=10.0)
    copied = schedule(OPTIONS, pace, pace, setup_s=10.0, host_s=2.0, usual=True)
    assert usual.finalists_s - copied.finalists_s == pytest.approx(8.0)
    assert usual.reference_s == copied.reference_s
    one = dataclasses.replace(OPTIONS, trials=2, seeds=1)
    assert schedule(one, pace, pace, setup_s=10.0, usual=True).runs == 0
    assert schedule(one, pace, pace, setup_s=10.0, usual=True).finalists_s == 0


def test_a_search_that_times_steps_tries_more_and_has_duels() -> None:
    """It said 51 s, and took 130: duels were not counted, and so few trials only rehearsals run."""
    pace = Pace(1.0, 0.2)
    usual, most = (schedule(OPTIONS, pace, pace, setup_s=1.0, usual=usual, duels_s=70.0) for usual in (True, False))
    without = schedule(OPTIONS, pace, pace, setup_s=1.0, duels_s=0.0)
    assert (usual.trials, most.trials) == (10, 30)
    assert most.rest_s - without.rest_s == pytest.approx(73.0)
    assert "10 trials 56 s, 3 runs under further paired seeds 18 s, duels 73 s" in describe(usual, most)
    ranks = schedule(OPTIONS, dataclasses.replace(pace, start_s=100.0), pace, setup_s=1.0, duels_s=70.0)
    assert ranks.duels_s == 370.0, "several ranks start anew for each duel, and take their time"


def test_runs_compile_one_of_the_repeated_blocks_and_need_a_reference_that_does() -> None:
    script, trial = Pace(5.0, 0.1, 120.0, blocks=12), Pace(5.0, 0.1, 360.0, blocks=12)
    found = schedule(OPTIONS, script, trial, setup_s=10.0)
    cached = 7.3 + CACHED_COMPILE * 10
    assert found.reference_s == pytest.approx(10 + 127.3 + 17.3 + 2 * cached)  # once as it is, the others by block
    assert found.trials_s == pytest.approx(30 * 37.3)
    assert found.finalists_s == pytest.approx(3 * (10 + cached + 2 * (7.3 + CACHED_COMPILE * 30)))
    assert (found.whole, found.whole_s) == (2, pytest.approx(2 * 367.3))
    usual = schedule(OPTIONS, script, trial, setup_s=10.0, usual=True)
    assert (usual.whole, usual.whole_s) == (1, pytest.approx(367.3))
    assert usual.trials_s == pytest.approx(4 * 37.3)
    assert usual.finalists_s == pytest.approx(10 + cached + 2 * (7.3 + CACHED_COMPILE * 30))
    assert "4 trials 2 min, 3 runs under further paired seeds 46 s, compiling the whole model 6 min" in describe(
        usual, found
    )


@pytest.mark.parametrize(("steps", "warmup"), [(4, 2), (8, 4), (20, 10), (500, 10)])
def test_the_scan_comes_after_the_initialisation_and_early(steps: int, warmup: int) -> None:
    assert scan_warmup(steps) == warmup


def test_runs_side_by_side_share_the_time() -> None:
    pace = Pace(1.0, 0.1)
    alone = schedule(OPTIONS, pace, pace, setup_s=0.0)
    shared = schedule(OPTIONS, pace, pace, setup_s=0.0, workers=4, final_workers=2, probes_at_once=2)
    assert alone.scan_s - shared.scan_s == pytest.approx(1.4 * 60 * 0.1 / 2)  # the warm-up is one process's
    assert alone.trials_s == pytest.approx(4 * shared.trials_s)
    assert alone.finalists_s == pytest.approx(2 * shared.finalists_s)


def test_a_probe_has_one_thread_of_those_that_a_step_was_timed_with() -> None:
    pace = Pace(1.0, 0.1)
    one = schedule(OPTIONS, pace, pace, setup_s=0.0)
    many = schedule(OPTIONS, pace, pace, setup_s=0.0, threads=4, probes_at_once=4)
    assert many.scan_s - pace.start_s == pytest.approx(one.scan_s - pace.start_s + 3 * (10 + NOISE_BATCHES) * 0.1)
    assert many.trials_s == one.trials_s


def test_of_runs_that_take_turns_all_but_the_steps_is_beside_each_other() -> None:
    pace = Pace(1.0, 0.1, 8.0)
    alone = schedule(OPTIONS, pace, pace, setup_s=0.0)
    turns = schedule(OPTIONS, pace, pace, setup_s=0.0, workers=2, final_workers=2, turns=True)
    steps_s = (OPTIONS.steps + OPTIONS.warmup) * 0.1
    assert alone.trials_s == pytest.approx(OPTIONS.trials * (9.0 + steps_s))
    assert turns.trials_s == pytest.approx(OPTIONS.trials * (4.5 + steps_s))
    assert turns.finalists_s == alone.finalists_s  # what they compile is cached


def test_quantised_models_take_longer_to_compile_and_emulated_ones_longer_to_run() -> None:
    written = Pace(2.0, 0.1, 10.0, 12)
    assert written.of_trials(measured=True).compile_s == pytest.approx(10.0 * QUANTISED_COMPILE)
    assert written.of_trials(measured=True).step_s == 0.1
    assert written.of_trials(measured=False) == Pace(2.0, 0.2, 10.0, 12)


def test_a_person_is_told_what_takes_how_long_and_where_the_budget_ends_it() -> None:
    pace = Pace(5.0, 0.1, 20.0)
    usual, most = (schedule(OPTIONS, pace, pace, setup_s=10.0, usual=usual) for usual in (True, False))
    told = describe(usual, most)
    parts = "gradient errors 15 s, 4 trials 109 s, 3 runs under further paired seeds 44 s"
    assert told == (
        f"expected from here on: about 3 min ({parts}), about 16 min if nothing converges (30 trials, 9 runs; "
        "more where a decision takes further seeds)"
    )
    assert describe(usual, most, 600.0) == told + "; --budget would end it after 10 min in all"
    assert describe(usual, most, 230.0, 80.0) == told + "; --budget ends it after 230 s in all"
    assert describe(usual, most, 110.0, 1.0).endswith("ends it after 110 s in all"), "not 2 min"
    assert describe(usual, most, 60.0, 50.0) == (
        f"{told}; --budget is too short: one trial and one further seed end it after about 2 min in all"
    )
    assert describe(usual, most, 86_400.0) == told + "; --budget is enough for that (24.0 h in all)"
    assert "if nothing converges" not in describe(usual, usual)
    assert "if nothing converges" not in describe(usual, dataclasses.replace(usual, trials_s=usual.trials_s + 1.0)), (
        "both 3 min"
    )
    closing = schedule(OPTIONS, pace, pace, setup_s=10.0, usual=True, closing_s=7.0)
    assert closing.rest_s == pytest.approx(usual.rest_s + 7)
    assert "paired seeds 44 s, the answer 7 s)" in describe(closing, closing)
