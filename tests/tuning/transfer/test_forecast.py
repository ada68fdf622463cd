"""Predicted errors of a big model: the proxy's table, the law, and a correction."""

import math

import numpy as np
import pytest

from autoprec.graph.roles import places
from autoprec.policy.space import SearchSpace
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.transfer.correction import Correction
from autoprec.tuning.transfer.counterparts import counterparts
from autoprec.tuning.transfer.forecast import Forecast
from autoprec.tuning.transfer.law import Growth, error_factor, noise_factor
from autoprec.tuning.transfer.proxy import Proxy
from tests.tuning.models import gpt
from tests.tuning.transfer.test_proxy import policy, table

WIDER = Growth(width=4.0, depth=2.0)


def forecast(correction: Correction | None = None) -> Forecast:
    """A GPT of four blocks, and one of eight that is four times as wide."""
    found, big = policy(("*.mlp.*", "fp8_rowwise")), gpt(8)
    choices = [{"match": "*", "choices": ["keep", "bf16", "fp8_rowwise"]}]
    space = SearchSpace.model_validate({"name": "t", "baseline": "bf16", "choices": choices, "recipes": found.recipes})
    proxy = Proxy.of(found, gpt(), table())
    matched = counterparts(places(big.tunable), places(gpt().tunable), proxy.choices)
    problem = Problem.build(big, space)
    return Forecast(found, proxy, table(), problem, matched, WIDER, correction or Correction())


def test_a_role_in_all_blocks_errs_as_in_the_proxy_times_the_law() -> None:
    found = forecast()
    column = found.problem.choice_names.index("fp8_rowwise")
    rows = [g for g, group in enumerate(found.problem.groups) if group.name.endswith("mlp.c_fc")]
    assert len(rows) == 8
    in_all = math.sqrt(found.table[rows, column].sum())
    assert in_all == pytest.approx(math.sqrt(4) * 0.01 * error_factor(WIDER))
    assert found.noise == pytest.approx(0.5 * noise_factor(WIDER))
    assert (found.table[:, found.problem.choice_names.index("keep")] == 0.0).all()


def test_a_policy_s_prediction_is_the_root_of_its_squares_segment_by_segment() -> None:
    found = forecast()
    index = np.full(len(found.problem.groups), found.problem.choice_names.index("fp8_rowwise"))
    said = found.prediction(index, budget=0.05)
    assert said.error == pytest.approx(math.sqrt(sum(error**2 for error in said.segments.values())))
    assert (said.budget, said.factors) == (0.05, {})
    assert found.room(0.0) == 0.0


def test_the_budget_is_the_mapped_policy_s_error_up_to_the_limit() -> None:
    found = forecast()
    mapped = ["fp8_rowwise"] * len(found.problem.groups)
    index = np.full(len(mapped), found.problem.choice_names.index("fp8_rowwise"))
    there = found.proxy.predicted(found.policy) / 0.5 * found.noise  # of the MLPs alone, without the law
    assert found.budget(mapped, 10.0) == pytest.approx(max(there, found.error(index)))
    assert found.budget(mapped, 0.01) == pytest.approx(0.01 * found.noise)


def test_a_correction_scales_errors_and_replaces_the_noise() -> None:
    segment = "h.*.mlp.c_fc|fp8_rowwise"
    plain, other = forecast(), forecast(Correction({segment: 3.0}, noise=0.4))
    assert other.noise == 0.4
    column = plain.problem.choice_names.index("fp8_rowwise")
    assert other.table[:, column] == pytest.approx(3.0 * plain.table[:, column])
