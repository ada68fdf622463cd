from __future__ import annotations

import optuna

from autoprec.policy.space import load_space
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.base import PointSampler, finished
from tests.tuning.models import gpt


class Baseline(PointSampler):
    """Proposes the baseline, always."""

    def sample_relative(self, study, trial, search_space):  # type: ignore[no-untyped-def]
        return self.problem.params_of(self.problem.baseline)

    def finished(self, study):  # type: ignore[no-untyped-def]
        return "all asked" if len(study.trials) > 1 else ""

    def sample_independent(self, study, trial, param_name, param_distribution):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{param_name} was not in the relative sample")


def test_layers_and_parameters_are_decided_in_one_sample() -> None:
    problem = Problem.build(gpt(2), load_space("te-delayed"))
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=Baseline(problem))
    asked = study.ask(problem.distributions())
    assert asked.params == problem.params_of(problem.baseline)
    assert set(asked.params) == set(problem.distributions())


def test_only_a_point_sampler_says_that_the_space_is_used_up() -> None:
    problem = Problem.build(gpt(2), load_space("te-delayed"))
    sampler = Baseline(problem)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    study.ask(problem.distributions())
    assert finished(sampler, study) == ""
    study.ask(problem.distributions())
    assert finished(sampler, study) == "all asked"
    assert finished(optuna.samplers.RandomSampler(seed=0), study) == ""
