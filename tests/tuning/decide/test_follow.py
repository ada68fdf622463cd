from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.applying.following.deciding import Desk
from autoprec.policy import Follow, policy_from_dict
from autoprec.tuning.decide.follow import follow_section
from autoprec.tuning.decide.table import Misfit, SensitivityTable
from tests.tuning.synthetic import synthetic

FOUND = synthetic(space="te-delayed")
TABLE = SensitivityTable(
    tuple(g.name for g in FOUND.problem.groups),
    FOUND.problem.choice_names,
    FOUND.prior.error2,
    noise=0.5,
    misfit=Misfit(ratio=2.0),
)


def section(table: SensitivityTable = TABLE, limit: float | None = 0.06, choice: str = "") -> Follow | None:
    problem = FOUND.problem
    params = problem.params_of(choice or problem.choice_names[-1])
    return follow_section(
        problem, params, FOUND.prior.time_ms, table, max_gradient_error=0.12, limit=limit, step_time_ms=10.0
    )


@pytest.mark.parametrize("choice", FOUND.problem.choice_names)
def test_a_run_reads_the_assignment_and_its_error_back_from_the_file(choice: str) -> None:
    problem, made = FOUND.problem, section(choice=choice)
    params = problem.params_of(choice)
    policy = problem.policy(params).model_copy(update={"follow": made})
    read = policy_from_dict(policy.to_dict())
    assert read.follow == made
    desk = Desk.of(read.follow, read)
    assert desk is not None
    assert math.sqrt(desk.predicted2(desk.now)) == pytest.approx(TABLE.predict(problem, params), rel=1e-3)
    assert made.most_error is None
    assert len(made.choices) <= 8


def test_without_a_budget_nothing_is_recorded_and_a_stricter_one_is() -> None:
    assert section(limit=None) is None
    assert section(replace(TABLE, noise=None)) is None
    assert section(limit=0.01).most_error == 0.01
