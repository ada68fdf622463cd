"""Neither a clock that jumps nor the order in which parallel trials end changes what is found."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from autoprec.policy import load_policy
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph
from tests.tuning.synthetic import Synthetic, synthetic


def search(study: str) -> Search:
    script = SimulatedScript(graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3")
    options = SearchOptions(
        command=("train.py",), study=study, trials=8, steps=8, seeds=2, space="hopper-fp8", force=True, budget_s=3000
    )
    command = ScriptCommand.parse(options.command)
    made = Search(options, command, Listeners(), lambda seed, _: SimulatedRunner(script, seed))
    made.run()
    return made


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    search("plain")
    expected, real = load_policy("policy.yaml"), time.time
    jumps = itertools.cycle([0.0, 86400.0, -3 * 365 * 86400.0, 3600.0, -1.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    jumped = search("jumped")
    monkeypatch.undo()
    assert load_policy(tmp_path / "policy.yaml").layers == expected.layers
    assert all(0 <= record.seconds < 600 for record in jumped.records)
    print(f"{len(jumped.records)} trials under a clock that jumps by years, 0 affected")


def asked(found: Synthetic, order: tuple[int, ...]) -> list[dict[str, Any]]:
    """Ask four trials at once, tell them in an order, and return what is asked next."""
    sampler = PrecisionSampler(found.problem, found.prior, Goals(0.0025))
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    next_asked: list[dict[str, Any]] = []
    for _ in range(3):
        trials = [study.ask(found.problem.distributions()) for _ in range(4)]
        outcomes = [found.step(trial.params) for trial in trials]
        for k in order:
            step, gap = outcomes[k]
            trials[k].set_user_attr("metrics", {"step_time_ms": step, "divergence": gap})
            study.tell(trials[k], [step, gap])
        next_asked += [dict(trial.params) for trial in trials]
    return next_asked


def test_the_order_in_which_trials_end_does_not_matter() -> None:
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]
    runs = []
    for order in orders:
        found = synthetic(blocks=2)
        runs.append(asked(found, order))
    assert runs[0] == runs[1] == runs[2]
    keys = {found.problem.key(params) for params in runs[0]}
    assert len(keys) == len(runs[0]) == 12
    print(f"{len(orders)} orders of completion, 12 proposals, the same and all different")
