from __future__ import annotations

import numpy as np
import optuna
import pytest

from autoprec.tuning.decide.sampler.expectation import Goals
from benchmarks.search.other_samplers import SAMPLERS, make_sampler
from tests.tuning.synthetic import drive, synthetic

BUDGET = 0.0025


def run(name: str, trials: int = 40, seed: int = 0) -> list[tuple[float, float]]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = synthetic(seed=seed)
    sampler = make_sampler(name, found.problem, found.prior, Goals(BUDGET), seed=seed, trials=trials)
    return drive(found, optuna.create_study(directions=["minimize", "minimize"], sampler=sampler), trials)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_runs_and_repeats_itself(name: str) -> None:
    trials = 12  # two more than the GP draws at random
    first, second = run(name, trials), run(name, trials)
    assert len(first) == trials
    assert first == second


def found_all_bf16() -> float:
    found = synthetic()
    return float(found.prior.time_ms[:, found.problem.choice_names.index("bf16")].sum())


@pytest.mark.parametrize("name", ["ilp", "greedy"])
def test_solvers_find_something_within_the_budget(name: str) -> None:
    log = run(name, 60)
    uniform = 10.0 + found_all_bf16()
    assert min(step for step, gap in log if gap <= BUDGET) < 0.95 * uniform
    assert len(set(log)) > 20


def test_greedy_walks_back_from_the_fastest() -> None:
    log = run("greedy", 12)
    steps = [step for step, _ in log]
    assert steps[0] == min(steps)
    until = next((k for k, (_, gap) in enumerate(log) if gap <= BUDGET), len(log))
    assert np.all(np.diff(steps[:until]) >= 0)
