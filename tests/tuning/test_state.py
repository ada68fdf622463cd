from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoprec.errors import SearchInterruptedError
from autoprec.tuning.decide.decision import Rules, Standing
from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.decide.ranking import Ranking
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.state import SearchState, Seconds, Work, compared, objective_cost, rules_of
from autoprec.tuning.study.run import Run, metrics_of
from autoprec.tuning.study.study import StudyStore, default_storage
from tests.tuning.test_engine import here, options, script, search  # noqa: F401


def record(number: int, step_ms: float, gap: float = 0.001, **fields: object) -> Run:
    metrics = {"step_time_ms": step_ms, "divergence": gap, "noise_floor": 0.0, "gradient_error": 0.0}
    values: dict[str, object] = {"kind": "search", "name": f"trial {number}", "status": "ok", "seconds": step_ms}
    return Run(
        number,
        params={"number": number},
        policy={},
        metrics=metrics_of(metrics | {"memory_bytes": 1.0}),
        **(values | fields),
    )  # type: ignore[arg-type]


@pytest.fixture
def state(tmp_path: Path) -> SearchState:
    store = StudyStore(default_storage(tmp_path), "study", ("step_time_ms", "divergence"), resume=False)
    return SearchState(store, Listeners(), SearchOptions(("train.py",)), started=0.0)


def test_the_best_is_the_fastest_within_the_limits(state: SearchState) -> None:
    assert state.best() is None
    for one in (record(0, 3.0), record(1, 1.0, gap=0.1), record(2, 2.0), record(3, 0.5, status="crashed")):
        state.store.add(one)
    assert [r.number for r in state.acceptable_ones()] == [2, 0]
    assert state.best() == state.store.records[2]
    assert state.exceeded(state.store.records[1]) == ("divergence",)


def test_a_run_costs_what_trials_took_and_before_them_what_the_reference_took(state: SearchState) -> None:
    state.seconds.reference_run_s = 40.0
    assert state.seconds_per_run() == 40.0
    for number, seconds in enumerate((1.0, 2.0, 30.0)):
        state.store.add(record(number, seconds))
    assert state.seconds_per_run() == 2.0


def test_a_paired_seed_costs_what_they_took_and_the_end_is_counted(
    state: SearchState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs and a start of the script: a budget that knew of one run only was overrun by the rest."""
    state.seconds.reference_run_s = 4.0
    assert state.seconds_per_seed(10.0, 1) == 18.0
    assert state.seconds_per_seed(10.0, 2) == 14.0
    state.store.add(record(0, 7.0, kind="finalist", name="a", seed=1))
    assert state.seconds_per_seed(10.0, 1) == 7.0
    told = []
    for load in (0.1, 2.0 * (os.cpu_count() or 1), 1000.0):
        monkeypatch.setattr("autoprec.tuning.state.os.getloadavg", lambda load=load: (load, load, load))
        told.append(state.seconds_to_close())
    assert told == [8.0, 12.0, 20.0]


def test_what_was_cut_short_is_told_and_kept(state: SearchState) -> None:
    state.cut("the time is up")
    assert state.cut_short == state.notes == ["the time is up"]


def test_the_work_of_trials_adds_up_and_nothing_is_told_of_none() -> None:
    work = Work(1.0, 0.5, 1.5, 2.0, 10.0).plus(Work(1.0, 1.5, 1.0, 3.0, 5.0))
    assert work == Work(2.0, 2.0, 2.5, 5.0, 15.0)
    assert work.start_s == 1.0
    assert work.to_json()["training_s"] == 2.5
    assert Work().to_json() == {}
    assert Work().start_s == 0.0


def test_only_phases_that_ran_have_seconds() -> None:
    assert Seconds(verdict_s=0.0, duels_s=2.0).to_json() == {"verdict_s": 0.0, "duels_s": 2.0}


@pytest.mark.parametrize(("only", "told"), [(False, "ran out of time after 3"), (True, "tried 16 bit alone")])
def test_why_trials_ended_is_noted_and_told_by_the_verdict_where_16_bit_alone_was_tried(
    state: SearchState, only: bool, told: str
) -> None:
    state.only_sixteen_bit = only
    assert state.stopped == ""
    state.end("ran out of time after 3")
    assert state.stopped == told
    assert state.notes == ["ran out of time after 3"]


def test_the_best_is_not_one_that_is_known_to_break_a_limit(state: SearchState) -> None:
    """A gap that noise may explain passes the screening of a trial, and may be beyond the budget."""
    for one in (record(0, 3.0), record(1, 1.0), record(2, 2.0)):
        state.store.add(one)
    state.ranking = Ranking(breaking=frozenset({"trial 1"}))
    assert state.best() == state.store.records[2]
    state.ranking = replace(state.ranking, standings=(Standing("trial 0", 1.0, ()),), accepted=(0,))
    assert state.best() == state.store.records[0]


GOOD = {"divergence": 0.001, "noise_floor": 0.0005, "gradient_error": 0.05, "memory_bytes": 100.0, "step_time_ms": 2.0}


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, ()),
        ({"divergence": 0.003}, ("divergence",)),
        ({"divergence": 0.003, "noise_floor": 0.004}, ()),  # noise explains it
        ({"gradient_error": 0.07}, ("gradient_error",)),
        ({"memory_bytes": 101.0}, ("memory_bytes",)),
        (
            {"divergence": 0.1, "gradient_error": 1.0, "memory_bytes": 1e9},
            ("divergence", "gradient_error", "memory_bytes"),
        ),
    ],
)
def test_every_broken_limit_is_named(changed: dict[str, float], broken: tuple[str, ...]) -> None:
    assert Rules(0.0025, max_gradient=0.06, max_memory=100).exceeded(GOOD | changed) == broken


def test_without_a_known_noise_or_a_memory_limit_neither_forbids_anything(state: SearchState) -> None:
    assert state.rules().exceeded(GOOD | {"gradient_error": 9.0, "memory_bytes": 1e15}) == ()
    assert state.gradient_limit() is None
    state.table = SimpleNamespace(noise=0.5)  # type: ignore[assignment]
    assert state.gradient_limit() == pytest.approx(0.06)


@pytest.mark.parametrize(("moves", "limit"), [(1e-6, 0.24), (0.02, 0.1)])
def test_a_loss_that_cannot_judge_beside_a_metric_makes_the_gradients_limit_stricter(
    moves: float, limit: float
) -> None:
    own = Baseline(1e-6, (1e-6,), metric="rollout_kl", loss=Baseline(moves, (moves,) * 4))
    asked = SearchOptions(("train.py",), metric="rollout_kl", max_change=0.5, max_divergence=0.01)
    assert [budget for budget, _ in compared(asked, own)] == [0.5, 0.01]
    rules = rules_of(asked, own, 2.0)
    assert rules.max_gradient == pytest.approx(limit)
    assert rules.loss is not None
    assert (rules.loss.max_divergence, rules.loss.baseline) == (0.01, own.loss)
    assert rules.loss.gradient_limit == rules.max_gradient
    assert rules_of(asked, replace(own, loss=None), 2.0).loss is None


def test_further_seeds_whose_gaps_are_small_make_no_limit_laxer(state: SearchState) -> None:
    state.table = SimpleNamespace(noise=2.0)  # type: ignore[assignment]
    noisy = Baseline(0.02, (0.02,) * 4, loss=Baseline(0.02, (0.02,) * 4))
    state.own = SimpleNamespace(baseline=noisy)  # type: ignore[assignment]
    calm = Baseline(1e-6, (1e-6,) * 4, loss=Baseline(1e-6, (1e-6,) * 4))
    rules = state.rules(calm)
    assert rules.max_gradient == pytest.approx(0.1)
    assert rules.loss is not None
    assert (rules.baseline, rules.loss.baseline, rules.loss.max_gradient) == (calm, calm.loss, rules.max_gradient)


def test_each_objective_ranks_by_its_own_figure() -> None:
    assert [objective_cost(GOOD, name) for name in ("throughput", "memory", "balanced")] == [2.0, 100.0, 200.0]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgresql://me:pa55w0rd@host/db is locked", "pa55w0rd"),
        ("mysql+pymysql://me:pa55w0rd@host:3306/db", "pa55w0rd"),
        ("(psycopg2.OperationalError) password=pa55w0rd", "pa55w0rd"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz", "hf_abcdefghij"),
        ("crashed: RuntimeError: https://tok3n@host/x", "tok3n"),
    ],
)
def test_what_is_noted_and_what_was_cut_hold_no_secret(state: SearchState, text: str, secret: str) -> None:
    """Both are in the result, and ``cut_short`` is in the policy's evidence."""
    state.cut(text)
    state.cut(text)
    state.note(text)
    assert len(state.cut_short) == 1
    assert len(state.notes) == 2
    assert secret not in "".join([*state.notes, *state.cut_short])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_an_interrupted_search_says_what_was_measured(after: int) -> None:
    """It said that nothing was measured, one second after the figures of a trial: none was acceptable yet."""
    count = 0

    def interrupt(policy: object) -> None:
        nonlocal count
        count += policy is not None
        if count > after:
            raise KeyboardInterrupt

    with pytest.raises(SearchInterruptedError) as stopped:
        search(script(fail=interrupt), options(study="cut", max_memory=2**20))
    assert "nothing was measured" not in stopped.value.what
    assert "--resume" in stopped.value.fix
    if not after:
        assert "the script as written was measured, and no policy yet" in stopped.value.what
    else:
        trials = f"{after} trial{'s' if after > 1 else ''} measured, and no policy is acceptable yet: "
        assert trials in stopped.value.what
        assert "x over " in stopped.value.what
