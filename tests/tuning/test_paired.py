from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoprec.tuning.engine import Search
from autoprec.tuning.paired import BEFORE_REFERENCE_S, LEAST_TIMEOUT_S, PairedRunner
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import here, options, script, search  # noqa: F401


@pytest.fixture
def made(here: Path) -> Search:  # noqa: F811
    return search(script(), options(trials=2, seeds=1))[0]


def runner_of(made: Search, folder: Path) -> PairedRunner:
    assert made.setup is not None
    assert made.ledger is not None
    return PairedRunner(made.setup, HostPool(lambda seed, _: SimulatedRunner(script(), seed), folder), made.ledger)


def test_a_trial_may_stand_still_for_twenty_runs_of_the_reference(made: Search, tmp_path: Path) -> None:
    runner = runner_of(made, tmp_path)
    assert made.ledger is not None
    made.ledger.timings["reference_run_s"] = 0.5
    assert runner.trial_timeout() == LEAST_TIMEOUT_S
    made.ledger.timings["reference_run_s"] = 40.0
    assert runner.trial_timeout() == pytest.approx(800.0)
    assert runner.spec(None).timeout_s == pytest.approx(800.0)
    made.ledger.references.clear()
    assert runner.trial_timeout() == BEFORE_REFERENCE_S


def test_forked_trials_share_their_random_state_and_others_are_reseeded(made: Search, tmp_path: Path) -> None:
    runner = runner_of(made, tmp_path)
    assert runner.spec(None).seed is None
    assert runner.spec({}, steps=3, anneal=True).steps == 3
    assert runner.workers == 1


@pytest.mark.parametrize(("load", "told"), [(12.0, True), (1.0, False)])
def test_a_busy_cpu_is_told_where_steps_are_timed_on_it(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    told: bool,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    made, _ = search(script(device="cpu"), options(space="cpu", trials=2, seeds=1))
    assert made.ledger is not None
    assert any("busy with other work (load 11.0 on 2 cores)" in note for note in made.ledger.notes) is told
    rehearsed, _ = search(script(device="cpu"), options(target="h100", trials=2, seeds=1, study="r"))
    assert rehearsed.ledger is not None
    assert not any("busy" in note for note in rehearsed.ledger.notes)
