from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.decision import Decision, Standing
from autoprec.tuning.decide.sampler.expectation import Expectation, Goals
from autoprec.tuning.events import Listeners
from autoprec.tuning.phases.measuring import make_prior
from autoprec.tuning.phases.safety import LEAST_SAVING, SAFER, safer_policy, taken_back, what_was_taken_back
from autoprec.tuning.study.run import Run
from tests.tuning.test_engine import here, options, script, search  # noqa: F401

#: A body, and a tied head whose FP8 saves next to nothing and is most of the error: (bf16, fp8).
TIME = np.array([[6.0, 3.0], [1.003, 1.0]])
ERROR = np.array([[0.0, 1.0], [0.0, 4.0]])
FP8 = np.array([1, 1])


def test_a_lowering_that_saves_nothing_and_makes_most_of_the_error_is_taken_back() -> None:
    found = taken_back(FP8, TIME, [ERROR, ERROR], room=0.005 * TIME[:, 1].sum())
    assert found is not None
    assert found.tolist() == [1, 0]


@pytest.mark.parametrize("room", [0.0, -0.1, 0.002], ids=["none", "slower already", "too little"])
def test_nothing_is_taken_back_beyond_what_can_be_told(room: float) -> None:
    assert taken_back(FP8, TIME, [ERROR], room) is None


def test_a_small_part_of_the_error_is_not_worth_a_run() -> None:
    assert taken_back(FP8, TIME, [np.array([[0.0, 1.0], [0.0, 0.05]])], 0.02) is None


def test_nothing_gets_more_of_another_error_in_exchange() -> None:
    """By what the runs have shown it is safer, by the gradient error it is not."""
    assert taken_back(FP8, TIME, [ERROR, np.array([[0.0, 1.0], [2.0, 1.0]])], 0.02) is None


@given(st.integers(0, 10**6), st.floats(0.0, 0.2))
def test_it_is_never_slower_than_asked_and_no_group_gets_worse(seed: int, room: float) -> None:
    rng = np.random.default_rng(seed)
    time, error = rng.uniform(1, 2, (6, 4)), rng.lognormal(0, 2, (6, 4))
    index, rows = rng.integers(0, 4, 6), np.arange(6)
    found = taken_back(index, time, [error], room)
    if found is not None:
        assert np.maximum(time[rows, found] - time[rows, index], 0.0).sum() <= room * (1 + 1e-6) + 1e-9
        assert (error[rows, found] <= error[rows, index]).all()
        assert error[rows, found].sum() <= 0.9 * error[rows, index].sum()


def test_one_run_tells_whether_lowerings_that_save_nothing_are_taken_back(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    totals: dict[str, int] = {}
    monkeypatch.setattr(Listeners, "trial", lambda _self, run, _done, total, *_: totals.update({run.name: total}))
    made, _ = search(script(error_scale=0.5), options(trials=18))
    *_, safer = (run for run in made.records if SAFER in run.tags and run.kind == "search")  # one for each answer
    assert totals[safer.name] == 18, "it was told as trial 25 of 0"
    assert made.setup is not None
    assert made.state is not None
    assert made.state.table is not None
    first = next(run for run in made.records if f"{run.name}, {SAFER}" == safer.name and run.kind != "finalist")
    assert safer["gradient_error"] < first["gradient_error"]
    assert safer["step_time_ms"] <= first["step_time_ms"] * (1.0 + LEAST_SAVING)
    prior = make_prior(made.setup, made.state, made.state.table)
    expectation = Expectation(made.setup.problem, prior, Goals())
    (reason,) = what_was_taken_back(made.setup, expectation, Standing(safer.name, 1.0, (0.0,), run=safer), [first])
    assert reason.code == "taken_back"
    assert reason.data["groups"]
    assert 0.0 < reason.data["error"] <= 1.0
    assert what_was_taken_back(made.setup, expectation, Standing(first.name, 1.0, (0.0,), run=first), [first]) == ()

    def again(run: Run, tried: list[Run]) -> Run | None:
        standing = Standing(run.name, run["speedup"], (0.0,), run=run)
        decision = Decision("adopt", (), (standing,), 0, run=run)
        assert made.setup is not None
        assert made.state is not None
        return safer_policy(made.setup, made.state, expectation, decision, tried)

    found = again(first, [])
    assert found is not None
    assert SAFER in found.tags
    assert again(first, [replace(found, status="ok")]) is None, "it ran before"
    assert again(safer, []) is None, "what was taken back is not looked at again"
