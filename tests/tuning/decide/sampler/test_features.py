from __future__ import annotations

import numpy as np

from autoprec.policy.space import load_space
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.features import HEAD_WEIGHT, divergence_model, features_of, observation
from tests.tuning.models import gpt


def test_every_value_but_the_default_is_a_feature() -> None:
    problem = Problem.build(gpt(2), load_space("te-delayed"))
    features = features_of(problem)
    assert len(features) == sum(len(values) - 1 for values in problem.parameters.values())
    assert not {(name, values[0]) for name, values in problem.parameters.items()} & set(features)


def test_an_error_in_the_head_counts_more() -> None:
    problem = Problem.build(gpt(2), load_space("hopper-fp8"))
    heads = [g for g, group in enumerate(problem.groups) if "head" in group.flags]
    assert heads
    table = problem.table(lambda _g, c: 0.0 if c == "bf16" else 1e-4)
    belief = divergence_model(problem, table).mean()
    low = problem.choice_names.index("bf16")
    fp8 = next(c for c in range(len(problem.choice_names)) if problem.allowed[heads[0], c] and c != low)
    other = next(g for g in range(len(problem.groups)) if g not in heads and problem.allowed[g, fp8])
    assert belief.error2[heads[0], fp8] == HEAD_WEIGHT * belief.error2[other, fp8]


def test_an_observation_carries_the_points_parameters() -> None:
    problem = Problem.build(gpt(2), load_space("te-delayed"))
    name, value = features_of(problem)[0]
    seen = observation(problem, problem.params_of(problem.baseline, **{name: value}), lambda _params: 3.0, 0.01)
    assert seen.features.sum() == 1.0
    assert seen.features[0] == 1.0
    assert (seen.base2, seen.value) == (3.0, 0.01)
    np.testing.assert_array_equal(seen.index, problem.indices(problem.params_of(problem.baseline)))
