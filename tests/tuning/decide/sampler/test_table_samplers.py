"""The ways of existing tools, on a synthetic problem."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tuning.decide.sampler.test_other_samplers import BUDGET, run
from tests.tuning.synthetic import synthetic


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
