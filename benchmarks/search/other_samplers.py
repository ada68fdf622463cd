"""Samplers that the benchmarks compare with: Optuna's NSGA-II and GP, and the two ways existing tools search.

Both of these use the table as it was measured and never correct it. ``ilp`` is what ModelOpt-style tools do: solve the
knapsack on one-pass scores and never look at reality again (with a bisection of the budget on measured divergence,
which is generous to it). ``greedy`` is AIMET's and INC's way: start from the fastest point, put the most sensitive
groups back until the budget holds, then try single changes. Both leave every parameter at its default, and draw at
random when they have nothing left to propose.
"""

from __future__ import annotations

import abc
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autoprec.policy.solver import IntVector, solve
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.prior import Prior
from autoprec.tuning.decide.sampler.sampler import Presets
from autoprec.tuning.decide.sampler.sampler import make_sampler as make_offered
from autoprec.tuning.options import OPTIONS

#: What can be compared: what ``--sampler`` offers, and the samplers here.
OFFERED = OPTIONS["sampler"].choices
SAMPLERS = (*OFFERED, "nsga2", "gp", "ilp", "greedy")
#: Random trials that the GP starts with.
_STARTUP = 10
#: Proposals that were asked for already and are passed over at a time, and points of the sweep and the bisection.
_MOST_KNOWN, _STEPS = 4000, 600
#: Factor between the largest and the smallest squared error that the sweep solves for; its points are spread evenly
#: however many there are (multiples of the golden ratio, less their whole part).
_SWEPT, _GOLDEN = 1e6, 0.6180339887


class _TableSampler(optuna.samplers.RandomSampler):  # type: ignore[misc]
    """A sampler that proposes whole assignments ``[G]`` and leaves every parameter at its default."""

    def __init__(self, problem: Problem, prior: Prior, *, max_divergence: float, seed: int) -> None:
        super().__init__(seed=seed)
        self.problem, self.prior, self.max_divergence = problem, prior, max_divergence
        self._results: dict[tuple[Any, ...], float] = {}
        self._proposals = self.proposals()

    def infer_relative_search_space(self, *_study_and_trial: Any) -> dict[str, BaseDistribution]:
        return dict(self.problem.distributions())

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, *_space: Any) -> dict[str, Any]:
        """Return the next proposal that no other trial has; nothing where there is none."""
        others = (t for t in study.get_trials(deepcopy=False) if t.number != trial.number)
        tried = [t for t in others if t.params or t.state.is_finished()]
        self._results = {self.problem.key(t.params): _divergence(t) for t in tried}
        for index in itertools.islice(self._proposals, _MOST_KNOWN):
            params = self.problem.from_indices(index, {})
            if self.problem.key(params) not in self._results:
                return params
        return {}

    def keeps(self, index: IntVector) -> bool | None:
        """Say whether an assignment was measured within the budget; None where that is not known."""
        gap = self._results.get(self.problem.key(self.problem.from_indices(index, {})), math.nan)
        return None if math.isnan(gap) else gap <= self.max_divergence

    @abc.abstractmethod
    def proposals(self) -> Iterator[IntVector]:
        """Yield assignments in order; what :meth:`keeps` is known of one when the next is asked for."""


def _divergence(trial: FrozenTrial) -> float:
    """Return what a trial measured: NaN where it still runs, infinity where it failed."""
    if trial.state == TrialState.COMPLETE:
        return float((trial.user_attrs.get("metrics") or {}).get("divergence", trial.values[-1]))
    return math.inf if trial.state.is_finished() else math.nan


class IlpSampler(_TableSampler):
    """The knapsack on the prior tables: a sweep over the whole front, and a bisection to the budget."""

    def proposals(self) -> Iterator[IntVector]:
        """Yield sweep and bisection points by turns."""
        time, error2 = self.prior.time_ms, self.prior.error2
        high = math.log(max(float(np.where(np.isfinite(error2), error2, 0.0).max(axis=1).sum()), 1e-30))
        low = left = high - math.log(_SWEPT)
        right = high
        for k in range(1, _STEPS):
            middle = (left + right) / 2
            if right - left > 1e-3 and (index := solve(time, error2, math.exp(middle))) is not None:
                yield index
                kept = self.keeps(index)
                left, right = middle if kept else left, middle if kept is False else right
            swept = solve(time, error2, math.exp(low + (high - low) * (k * _GOLDEN % 1)))
            if swept is not None:
                yield swept


class GreedySampler(_TableSampler):
    """Walk back from the fastest point by sensitivity until the budget holds, then try to speed up single groups."""

    def proposals(self) -> Iterator[IntVector]:
        time, error2 = self.prior.time_ms, self.prior.error2
        current, safest = np.argmin(time, axis=1), np.argmin(error2, axis=1)
        added = error2[np.arange(len(time)), current]
        order = np.argsort(-np.where(np.isfinite(added), added, np.inf))
        for g in order:
            yield current.copy()
            if self.keeps(current):
                break
            current[g] = safest[g]
        for g in order[::-1]:
            for c in np.argsort(time[g]):
                if not time[g, c] < time[g, current[g]]:
                    break
                changed = current.copy()
                changed[g] = c
                yield changed
                if self.keeps(changed):
                    current = changed
                    break


def make_sampler(
    name: str, problem: Problem, prior: Prior, goals: Goals, *, presets: Presets = (), seed: int = 0, trials: int = 60
) -> optuna.samplers.BaseSampler:
    """Return a sampler of :data:`SAMPLERS`.

    Args:
        problem, prior, goals, presets: see :class:`~autoprec.tuning.decide.sampler.sampler.PrecisionSampler`.
        seed: of what is drawn at random.
        trials: how many trials are planned (sets NSGA-II's population).

    Raises:
        KeyError: no such sampler.
    """
    if name in OFFERED:
        return make_offered(name, problem, prior, goals, presets=presets, seed=seed)
    if name == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(8, min(50, trials // 4)))
    if name == "gp":  # needs SciPy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP)
    solvers = {"ilp": IlpSampler, "greedy": GreedySampler}
    return solvers[name](problem, prior, max_divergence=goals.max_divergence, seed=seed)
