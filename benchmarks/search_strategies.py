"""The alternatives search_quality.py compares with, beside those that ``--sampler`` offers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
from ground_truth import Case
from search_cases import MAX_DIVERGENCE

from autoprec.policy.solver import solve
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import IntVector, Problem
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.other_samplers import make_sampler
from autoprec.tuning.decide.sampler.prior import Prior

STRATEGIES = ("ours", "ilp", "one-pass", "tpe", "nsga2", "gp", "random")
#: Points of the sweep and of the bisection; factor between the largest and smallest squared error that is solved for.
_STEPS, _SWEPT = 600, 1e6


class IlpSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """The knapsack on the prior tables, never corrected: a sweep over the whole front, and a bisection to the budget.

    What ModelOpt-style tools do, who never look at reality again; the bisection of the budget on measured divergence is
    generous to them. Every parameter stays at its default.
    """

    def __init__(self, problem: Problem, prior: Prior, seed: int) -> None:
        self.problem, self.prior, self.seed = problem, prior, seed
        self._solved: dict[float, IntVector | None] = {}

    def infer_relative_search_space(self, *_study_and_trial: Any) -> dict[str, Any]:
        """Return the distributions of everything there is to decide."""
        return dict(self.problem.distributions())

    def sample_relative(self, study: optuna.Study, trial: optuna.trial.FrozenTrial, *_space: Any) -> dict[str, Any]:
        """Return the first proposal that no other trial has, a random point when there is none left."""
        results = {
            self.problem.key(other.params): float((other.user_attrs.get("metrics") or {}).get("divergence", math.inf))
            for other in study.get_trials(deepcopy=False)
            if other.number != trial.number and other.params
        }
        for index in self._proposals(results):
            params = self.problem.from_indices(index, {})
            if self.problem.key(params) not in results:
                return params
        rng = np.random.default_rng([self.seed, trial.number])
        index = np.array([rng.choice(np.flatnonzero(row)) for row in self.problem.allowed], dtype=np.int64)
        return self.problem.from_indices(index, {})

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        """Leave what is not in the problem to chance."""
        return optuna.samplers.RandomSampler(seed=self.seed).sample_independent(study, trial, name, distribution)

    def _at(self, budget: float) -> IntVector | None:
        if budget not in self._solved:
            self._solved[budget] = solve(self.prior.time_ms, self.prior.error2, budget)
        return self._solved[budget]

    def _proposals(self, results: dict[Any, float]) -> Iterator[IntVector]:
        """Yield points of the sweep and of the bisection by turns."""
        error2 = self.prior.error2
        finite = np.where(np.isfinite(error2), error2, 0.0)
        high = math.log(max(float(finite.max(axis=1).sum()), 1e-30))
        low = high - math.log(_SWEPT)
        left, right = low, high
        for k in range(_STEPS):
            at = (left + right) / 2
            index = self._at(math.exp(at))
            if index is not None and right - left > 1e-3:
                yield index
                gap = results.get(self.problem.key(self.problem.from_indices(index, {})))
                if gap is not None:
                    left, right = (at, right) if gap <= MAX_DIVERGENCE else (left, at)
            swept = self._at(math.exp(low + (high - low) * _van_der_corput(k)))
            if swept is not None:
                yield swept


def _van_der_corput(k: int) -> float:
    value, unit = 0.0, 0.5
    k += 1
    while k:
        value, k, unit = value + unit * (k & 1), k >> 1, unit / 2
    return value


def goals(case: Case, seed: int) -> Goals:
    """Return what a search of this case is for."""
    floor, slowest = case.scans[seed].floor, case.time(case.baseline)
    return Goals(MAX_DIVERGENCE, noise_floor=floor, reference=(slowest, 1.0))


def sampler(name: str, case: Case, seed: int, trials: int) -> optuna.samplers.BaseSampler:
    """Return a sampler by name; the search's own are made by ``make_sampler``.

    ``ilp`` is our own sensitivity table and solver without the learning; ``one-pass`` has ModelOpt's scores instead.
    """
    problem, prior = case.problem, case.prior(seed)
    if name == "ilp":
        return IlpSampler(problem, prior, seed)
    if name == "one-pass":
        return IlpSampler(problem, replace(prior, error2=case.scans[seed].one_pass), seed)
    return make_sampler(name, problem, prior, goals(case, seed), presets=presets(problem), seed=seed, trials=trials)
