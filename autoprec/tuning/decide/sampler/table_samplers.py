"""The two ways existing tools search, for comparison: both use the table as it was measured and never correct it.

``ilp`` is what ModelOpt-style tools do: solve the knapsack on one-pass scores and never look at reality again (with a
bisection of the budget on measured divergence, which is generous to it). ``greedy`` is AIMET's and INC's way: start
from the fastest point, put the most sensitive groups back until the budget holds, then try single changes. Both leave
every parameter at its default.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autoprec.policy.solver import solve
from autoprec.tuning.decide.problem import IntVector, Problem
from autoprec.tuning.decide.sampler.prior import Prior

__all__ = ["GreedySampler", "IlpSampler"]

#: Known proposals that are passed over before a random point is taken; points of the sweep and the bisection.
_MOST_PROPOSALS, _STEPS = 4000, 600
#: Factor between the largest and the smallest squared error that the sweep solves for.
_SWEPT = 1e6


class _TableSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """A sampler that proposes whole assignments ``[G]`` and leaves every parameter at its default."""

    def __init__(self, problem: Problem, prior: Prior, *, max_divergence: float, seed: int) -> None:
        self.problem, self.prior, self.max_divergence, self.seed = problem, prior, max_divergence, seed

    def infer_relative_search_space(self, *_study_and_trial: Any) -> dict[str, BaseDistribution]:
        """Return the distributions of everything there is to decide."""
        return dict(self.problem.distributions())

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, *_space: Any) -> dict[str, Any]:
        """Return the first proposal that no other trial has, a random point when there is none left."""
        results: dict[tuple[Any, ...], float | None] = {}
        for other in study.get_trials(deepcopy=False):
            if other.number != trial.number and (other.params or other.state.is_finished()):
                results[self.problem.key(other.params)] = _divergence(other)
        proposals = self.proposals(lambda params: results.get(self.problem.key(params), math.nan))
        for _, index in zip(range(_MOST_PROPOSALS), proposals, strict=False):
            params = self.problem.from_indices(index, {})
            if self.problem.key(params) not in results:
                return params
        rng = np.random.default_rng([self.seed, trial.number])
        drawn = np.array([rng.choice(np.flatnonzero(row)) for row in self.problem.allowed], dtype=np.int64)
        return self.problem.from_indices(drawn, {})

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw what is not in the problem at random."""
        sampler = optuna.samplers.RandomSampler(seed=self.seed * 1_000_003 + trial.number)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    @abc.abstractmethod
    def proposals(self, measured: Callable[[Mapping[str, Any]], float | None]) -> Iterator[IntVector]:
        """Yield assignments in order; ``measured`` gives a point's divergence, NaN when it was not tried."""


def _divergence(trial: FrozenTrial) -> float | None:
    if trial.state == TrialState.COMPLETE:
        metrics = trial.user_attrs.get("metrics") or {}
        return float(metrics.get("divergence", (trial.values or [math.inf, math.inf])[1]))
    return math.inf if trial.state.is_finished() else None


class IlpSampler(_TableSampler):
    """The knapsack on the prior tables: a sweep over the whole front, and a bisection to the budget."""

    def __init__(self, problem: Problem, prior: Prior, *, max_divergence: float, seed: int) -> None:
        super().__init__(problem, prior, max_divergence=max_divergence, seed=seed)
        self._solved: dict[float, IntVector | None] = {}

    def _at(self, budget: float) -> IntVector | None:
        if budget not in self._solved:
            self._solved[budget] = solve(self.prior.time_ms, self.prior.error2, budget)
        return self._solved[budget]

    def proposals(self, measured: Callable[[Mapping[str, Any]], float | None]) -> Iterator[IntVector]:
        """Yield sweep and bisection points by turns."""
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
                gap = measured(self.problem.from_indices(index, {}))
                if gap is not None and not math.isnan(gap):
                    left, right = (at, right) if gap <= self.max_divergence else (left, at)
            swept = self._at(math.exp(low + (high - low) * _van_der_corput(k)))
            if swept is not None:
                yield swept


def _van_der_corput(k: int) -> float:
    value, unit = 0.0, 0.5
    k += 1
    while k:
        value, k, unit = value + unit * (k & 1), k >> 1, unit / 2
    return value


class GreedySampler(_TableSampler):
    """Walk back from the fastest point by sensitivity until the budget holds, then try to speed up single groups."""

    def proposals(self, measured: Callable[[Mapping[str, Any]], float | None]) -> Iterator[IntVector]:
        """Yield the walk; it stops where a result is still missing and goes on from it at the next ask."""
        time, error2 = self.prior.time_ms, self.prior.error2
        current: IntVector = np.argmin(time, axis=1)
        safest: IntVector = np.argmin(error2, axis=1)
        added = error2[np.arange(len(time)), current]
        order = np.argsort(-np.where(np.isfinite(added), added, np.inf))
        for step in range(len(order) + 1):
            yield current
            gap = measured(self.problem.from_indices(current, {}))
            if gap is not None and gap <= self.max_divergence:
                break
            if step < len(order):
                current = current.copy()
                current[order[step]] = safest[order[step]]
        for g in order[::-1]:
            for c in np.argsort(time[g]):
                if not np.isfinite(time[g, c]) or time[g, c] >= time[g, current[g]]:
                    break
                changed: IntVector = current.copy()
                changed[g] = c
                yield changed
                gap = measured(self.problem.from_indices(changed, {}))
                if gap is not None and gap <= self.max_divergence:
                    current = changed
                    break
