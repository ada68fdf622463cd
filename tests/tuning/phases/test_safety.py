from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autoprec.tuning.decide.decision import Decision, Standing
from autoprec.tuning.decide.sampler.expectation import Expectation, Goals
from autoprec.tuning.decide.taking_back import LEAST_SAVING
from autoprec.tuning.phases.measuring import make_prior
from autoprec.tuning.phases.safety import SAFER, safer_policy, what_was_taken_back
from autoprec.tuning.study.run import Run
from tests.tuning.test_engine import here, options, script, search  # noqa: F401


def test_one_run_tells_whether_lowerings_that_save_nothing_are_taken_back(here: Path) -> None:  # noqa: F811
    made, _ = search(script(error_scale=0.5), options(trials=14))
    (safer,) = (run for run in made.records if SAFER in run.tags and run.kind == "search")
    assert made.setup is not None
    assert made.ledger is not None
    assert made.ledger.table is not None
    first = next(run for run in made.records if f"{run.name}, {SAFER}" == safer.name and run.kind == "search")
    assert safer["gradient_error"] < first["gradient_error"]
    assert safer["step_time_ms"] <= first["step_time_ms"] * (1.0 + LEAST_SAVING)
    prior = make_prior(made.setup, made.ledger, made.ledger.table)
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
        assert made.ledger is not None
        return safer_policy(made.setup, made.ledger, expectation, decision, tried)

    found = again(first, [])
    assert found is not None
    assert SAFER in found.tags
    assert again(first, [replace(found, status="ok")]) is None, "it ran before"
    assert again(safer, []) is None, "what was taken back is not looked at again"
