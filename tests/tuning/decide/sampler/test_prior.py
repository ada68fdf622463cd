from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from autoprec.cost import CostModel, CostScale
from autoprec.graph.report import Operator
from autoprec.policy import LayerPlan
from autoprec.policy.space import load_space
from autoprec.precision.hardware import target
from autoprec.tuning.decide.problem import UNFUSED, Problem, layer_key
from autoprec.tuning.decide.sampler.prior import (
    HEAD_WEIGHT,
    build_prior,
    divergence_model,
    features_of,
    points_of,
)
from autoprec.tuning.decide.table import SensitivityTable
from tests.tuning.models import gpt

PROBLEM = Problem.build(gpt(2), load_space("cpu"))
TABLE = SensitivityTable(
    tuple(g.name for g in PROBLEM.groups), PROBLEM.choice_names, PROBLEM.table(lambda _g, c: 1e-6 * (c != "keep"))
)


def layer_time(_name: str, plan: LayerPlan, _activations: str) -> float:
    return 1.0 if plan.keeps else 0.4


def step_cost(params: Mapping[str, Any]) -> tuple[float, float]:
    """A step of 20 ms: GEMMs, and 10 ms of the rest, of which autocast saves 3 and fp32 attention gives back 1."""
    cast = params.get("activations") == "bf16"
    gemms = sum(0.4 if PROBLEM.effective(params, group) == "bf16" else 1.0 for group in PROBLEM.groups)
    rest = 10.0 - 3.0 * cast + (1.0 if params.get("attention") == "fp32" else 0.0)
    low = sum(PROBLEM.effective(params, group) == "bf16" for group in PROBLEM.groups)
    return gemms + rest, 1000.0 - 10.0 * low


def test_autocast_is_not_counted_twice() -> None:
    prior = build_prior(PROBLEM, TABLE, layer_time, step_cost, measured=True)
    assert prior.base_time_ms == pytest.approx(10.0)
    assert prior.parameter_time_ms["activations", "bf16"] == pytest.approx(-3.0)
    assert prior.parameter_time_ms["attention", "fp32"] == pytest.approx(1.0)
    params = PROBLEM.params_of("keep", activations="bf16", attention="fp32")
    index = PROBLEM.indices(params)
    predicted = prior.base_time_ms + prior.time_ms[np.arange(len(index)), index].sum() - 3.0 + 1.0
    assert predicted == pytest.approx(step_cost(params)[0])


def test_what_is_about_16_bits_is_priced_in_them() -> None:
    """Attention written out gains nothing in fp32, and no search tried it."""
    sdpa = Operator("", "h", "aten::_scaled_dot_product_x", "forward", "attention", "", "", (), ("fp32",), 0, 0)
    problem = Problem.build(replace(gpt(2), operators=(sdpa,)), load_space("cpu"))

    def cost(params: Mapping[str, Any]) -> tuple[float, float]:
        return 20.0 - 3.0 * (params.get(UNFUSED) == "unfused" and problem.in_effect(params, UNFUSED) == "unfused"), 0.0

    prior = build_prior(problem, TABLE, layer_time, cost, measured=True)
    assert prior.parameter_time_ms[UNFUSED, "unfused"] == pytest.approx(-3.0)
    at = features_of(problem).index((UNFUSED, "unfused"))
    many = [problem.params_of("keep", **{UNFUSED: "unfused"}, activations=dtype) for dtype in ("keep", "bf16")]
    assert points_of(problem, many, lambda _: 0.0).features[:, at].tolist() == [0.0, 1.0]


def test_memory_is_a_table_against_the_baseline() -> None:
    prior = build_prior(PROBLEM, TABLE, layer_time, step_cost, measured=False, with_memory=True)
    table = prior.memory
    assert table is not None
    assert prior.base_memory == 1000.0
    assert set(table[:, PROBLEM.choice_names.index("bf16")]) == {-10.0}
    assert set(table[:, PROBLEM.choice_names.index("keep")]) == {0.0}
    assert build_prior(PROBLEM, TABLE, layer_time, step_cost, measured=False).memory is None


def test_the_cost_model_has_no_costs_between_layers_so_a_table_of_times_says_it_all() -> None:
    """A layer returns its input's dtype and casts its own operands: nothing depends on what the neighbour runs."""
    problem = Problem.build(gpt(2), load_space("hopper-fp8"))
    cost = CostModel(problem.report, target("h100"), scale=CostScale.parse("width=64,tokens=64"))

    def step(**choices: str) -> float:
        params = problem.params_of("bf16") | {layer_key(name): choice for name, choice in choices.items()}
        return cost.estimate(problem.plans(params), activations="bf16").time_ms

    names = [group.name for group in problem.groups]
    base = step()
    for a, b in pairwise(names):
        alone = step(**{a: "fp8_rowwise"}) + step(**{b: "fp8_rowwise"}) - base
        assert step(**{a: "fp8_rowwise", b: "fp8_rowwise"}) == pytest.approx(alone, rel=1e-9)
    assert step(**{names[0]: "fp8_rowwise"}) != base


def test_every_value_but_the_default_is_a_feature() -> None:
    problem = Problem.build(gpt(2), load_space("te-delayed"))
    features = features_of(problem)
    assert len(features) == sum(len(values) - 1 for values in problem.parameters.values())
    assert not {(name, values[0]) for name, values in problem.parameters.items()} & set(features)


def test_two_ways_to_ask_for_one_thing_are_one_point() -> None:
    """Attention in bf16 under bf16 activations was a feature of its own: what it gained was learnt of the other."""
    problem = Problem.build(gpt(2), load_space("cpu"))
    assert {"keep", "bf16"} <= set(problem.parameters["attention"])
    asked = [problem.params_of("bf16", activations="bf16", attention=value) for value in ("keep", "bf16", "fp32")]
    features = points_of(problem, asked, lambda _params: 0.0).features
    assert (features[0] == features[1]).all()
    assert (features[0] != features[2]).any()


def test_an_error_in_the_head_counts_more() -> None:
    problem = Problem.build(gpt(2), load_space("hopper-fp8"))
    heads = [g for g, group in enumerate(problem.groups) if "head" in group.flags]
    assert heads
    table = problem.table(lambda _g, c: 0.0 if c == "bf16" else 1e-4)
    squares, *_ = divergence_model(problem, table).law()
    low = problem.choice_names.index("bf16")
    fp8 = next(c for c in range(len(problem.choice_names)) if problem.allowed[heads[0], c] and c != low)
    other = next(g for g in range(len(problem.groups)) if g not in heads and problem.allowed[g, fp8])
    assert squares[heads[0], fp8] == pytest.approx(HEAD_WEIGHT * squares[other, fp8])
