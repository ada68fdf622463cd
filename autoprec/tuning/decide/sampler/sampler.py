"""The sampler itself: solve the knapsack on what is known, and ask for the policy with the largest expected gain.

What may be asked are points of the front that the solver finds under the fitted models, and the presets. A preset that
is expected to be as good as anything else is asked before it: it is easier to explain. Nothing is random; a trial
depends on the runs before it alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autoprec.policy.solver import corners, solve
from autoprec.tuning.decide.pareto import added_area
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.expectation import Expectation, Goals, Measured
from autoprec.tuning.decide.sampler.prior import Prior, features_of

__all__ = ["NOTHING_NEW", "PrecisionSampler", "Proposal", "told_divergence"]

#: Why a search ends that has asked for everything.
NOTHING_NEW = "there is no other policy left to try"
#: Corners of the relaxed front that are looked at, and the factors of the budget that are solved for.
_CORNERS = 64
_FACTORS = tuple(math.exp(0.2 * k) for k in range(-6, 2))
#: From which of these on the error binds: parameters that cost no time may lower it.
_BINDING = 5
#: A parameter's value that saves less than this share of a step gains nothing.
_LEAST_EFFECT = 0.002
#: A preset with this share of the largest expected gain is asked first.
_AS_GOOD = 0.95
#: Where nobody says what was decided (a plain Optuna study), so many of five trials look for the largest gain; the
#: others for the point that adds most hypervolume of time and divergence.
_AIMING = 2
#: Where the hypervolume is bounded beyond the worst point: a share of its time, and nats of divergence.
_BEYOND_TIME, _BEYOND_LN_GAP = 1.02, 0.1
#: Budgets (and a fraction, at least) beyond which divergences are not told apart: such a run, and one without a finite
#: loss, says that a policy is far off, and nothing of how much luck there is in the others.
_FAR_OFF, _LEAST_FAR_OFF = 8.0, 0.02


@dataclass(frozen=True)
class Proposal:
    """The policy that is worth most, and the name of the preset that it is (empty for others).

    ``gain`` is the largest expected gain of anything new, ``worth`` what this one is expected to gain per run.
    """

    params: dict[str, Any]
    preset: str
    gain: float
    worth: float


class PrecisionSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Proposes whole points; see :mod:`autoprec.tuning.decide.sampler` for the idea.

    Args:
        problem: the search problem.
        prior: tables to start from.
        goals: what is wanted.
        presets: (name, params) of policies that people run today.

    Attributes:
        problem: the search problem.
        expectation: the fitted models.
        last: what was proposed last.
    """

    def __init__(
        self, problem: Problem, prior: Prior, goals: Goals, presets: Sequence[tuple[str, dict[str, Any]]] = ()
    ) -> None:
        self.problem, self.expectation = problem, Expectation(problem, prior, goals, presets)
        self._presets, self._features = list(presets), features_of(problem)
        self._runs: list[Measured] | None = None
        self._known: tuple[Any, Proposal | None] = (None, None)
        self.last: Proposal | None = None

    # --- Optuna's side ----------------------------------------------------------------------------------------------
    def infer_relative_search_space(self, *_study_and_trial: Any) -> dict[str, BaseDistribution]:
        """Return the distributions of everything: layers and parameters are decided in one sample."""
        return dict(self.problem.distributions())

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the params of the next trial."""
        params = self.propose(study, trial.number)
        return {name: value for name, value in params.items() if name in search_space}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Leave parameters that are not ours to Optuna's TPE."""
        return optuna.samplers.TPESampler(seed=trial.number).sample_independent(
            study, trial, param_name, param_distribution
        )

    # --- proposing --------------------------------------------------------------------------------------------------
    def learn(self, runs: Sequence[Measured], best_cost: float | None) -> None:
        """Take in every run of the search, and the cost of the best policy that is surely acceptable."""
        self._runs = list(runs)
        self.expectation.fit(self._runs)
        self.expectation.best_cost = best_cost
        self._known = (None, None)

    def propose(self, study: optuna.Study, number: int) -> dict[str, Any]:
        """Return the params of trial ``number``; the baseline where nothing new is left."""
        if self._runs is None and number % 5 >= _AIMING:
            spread = self._spreading(study, number)
            if spread is not None:
                return spread
        self.last = self.best(study, number)
        return self.last.params if self.last is not None else self.problem.params_of(self.problem.baseline)

    def finished(self, study: optuna.Study) -> str:
        """Return why nothing is left that is worth a trial; empty while something is."""
        best = self.best(study)
        if best is None:
            return NOTHING_NEW
        if best.worth <= 0:
            return f"what is left is expected to gain {best.gain:.1%} at most, too little for the runs it would take"
        return ""

    def best(self, study: optuna.Study, number: int = -1) -> Proposal | None:
        """Return what is worth most among everything new; None where nothing is new."""
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != number]
        state = tuple((t.number, t.state) for t in trials if t.state != TrialState.WAITING)
        if self._known[0] != state:
            seen, waiting = self._look(trials)
            self._known = (state, self._best(self._new(seen), waiting))
        return self._known[1]

    def _look(self, trials: Sequence[FrozenTrial]) -> tuple[set[tuple[Any, ...]], list[dict[str, Any]]]:
        """Return the keys of everything asked so far, and the params of what still runs; refit where that is ours."""
        seen, running, runs = set(), [], []
        for trial in trials:
            params = _params_of(trial)
            if params is None:
                continue
            seen.add(self.problem.key(params))
            if not trial.state.is_finished():
                running.append(params)
                continue
            gap, step = _outcome(trial, self.expectation.goals.max_divergence)
            runs.append(Measured(params, 0, gap, step, _memory(trial)))
        if self._runs is None:
            self.expectation.fit(runs)
        return seen, running

    def _best(self, fresh: list[tuple[str, dict[str, Any]]], running: Sequence[dict[str, Any]]) -> Proposal | None:
        if not fresh:
            return None
        expected = self.expectation
        outlook = expected.outlook(expected.points([params for _, params in fresh]))
        worth, gain = outlook.worth, outlook.gain
        if running:  # what still runs and is faster makes this one needless, should it turn out acceptable
            others = expected.outlook(expected.points(running))
            faster = others.cost[None, :] <= outlook.cost[:, None]
            needed = 1.0 - np.where(faster, others.chance[None, :], 0.0).max(axis=1)
            worth, gain = worth * needed, gain * needed
        top = int(np.argmax(worth))
        for at, (name, _) in enumerate(fresh):
            if name and worth[at] >= _AS_GOOD * worth[top] and worth[at] > 0:
                top = at
                break
        return Proposal(fresh[top][1], fresh[top][0], float(gain.max()), float(worth[top]))

    def _new(self, seen: set[tuple[Any, ...]]) -> list[tuple[str, dict[str, Any]]]:
        """Return (preset's name or nothing, params) of everything new that could be asked, the presets first."""
        found = dict.fromkeys(seen)
        out = []
        for name, params in itertools.chain(self._presets, (("", params) for params in self._front())):
            key = self.problem.key(params)
            if key not in found and not self.problem.is_script(params):  # the script is the reference: it is known
                found[key] = None
                out.append((name, params))
        kept = self._within_limits(out)
        if any(not name for name, _ in kept):
            return kept
        return kept + self._within_limits([("", params) for params in self._neighbours(set(found))])

    def _within_limits(self, many: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
        if not many:
            return []
        fits = self.expectation.within_limits(self.expectation.points([params for _, params in many]))
        return [one for one, fit in zip(many, fits, strict=True) if fit]

    def _front(self) -> list[dict[str, Any]]:
        """Return the front by the fitted models: its corners, and the fastest within multiples of the budget.

        The last of them may also be within the budget under another value of a parameter that costs no time (margin,
        amax history, rounding of scales): nobody knows before it ran, and it is worth a run where the error binds.
        """
        expected = self.expectation
        law, (table, effects) = expected.divergence.law(), expected.cost_table()
        found: list[tuple[Any, dict[str, Any]]] = []
        supported = corners(table, law.error2, _CORNERS)
        for turn, parameters in enumerate(self._options(effects)):
            z, base2 = expected.vector(parameters), expected.prior.parameter_error2(parameters)
            limits = expected.limits(z, base2)
            factors = _FACTORS if turn == 0 else (1.0,)
            budgets = [law.budget(f * expected.limit, z, base2) for f in factors]
            if expected.goals.blind:
                budgets = [math.inf]
            solved = [solve(table, law.error2, budget, limits=limits) for budget in budgets]
            found += [(index, parameters) for index in (*supported, *solved) if index is not None]
            if turn == 0:
                free = [f for f, effect in zip(self._features, effects, strict=True) if effect < _LEAST_EFFECT]
                binding = [index for index in solved[_BINDING:] if index is not None]
                found += [(index, parameters | {name: value}) for index in binding for name, value in free]
        unique = {(index.tobytes(), *parameters.values()): (index, parameters) for index, parameters in found}
        return [self.problem.from_indices(index, parameters) for index, parameters in unique.values()]

    def _options(self, effects: Any) -> list[dict[str, Any]]:
        """Return the parameter values to solve under; one that gains nothing stays at its default.

        Values that are known to lower the divergence take the default's place.
        """
        names = list(self.problem.parameters)
        default = {name: options[0] for name, options in self.problem.parameters.items()}
        model = self.expectation.divergence
        quieter, unsure = model.law().parameter, model.parameter_sd()
        for (name, value), effect, shift, sd in zip(self._features, effects, quieter, unsure, strict=True):
            if effect < _LEAST_EFFECT and shift < -sd:
                default[name] = value
        cheapest, least = dict(default), dict.fromkeys(names, -_LEAST_EFFECT)
        singles = []
        for (name, value), effect in zip(self._features, effects, strict=True):
            if effect < -_LEAST_EFFECT:
                singles.append(default | {name: value})
            if effect < least[name]:
                cheapest[name], least[name] = value, float(effect)
        # the cheapest of all, and all but one of its savings: the one that turns out harmful is found so
        but_one = [cheapest | {name: default[name]} for name in names if cheapest[name] != default[name]]
        options = [cheapest, *but_one, default, *singles]
        return list({tuple(option.values()): option for option in options}.values())

    def _neighbours(self, seen: set[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return the unseen points one change away from the front, where all of that is known."""
        out = []
        front = self._front()
        for params in front[:: max(1, len(front) // 8)]:
            for group, name in ((g, f"layer:{g.name}") for g in self.problem.free_groups):
                out += [{**params, name: choice} for choice in group.choices if choice != params[name]]
            for name, values in self.problem.parameters.items():
                out += [{**params, name: value} for value in values if value != params[name]]
        unique = {self.problem.key(params): params for params in out}
        return [params for key, params in unique.items() if key not in seen]

    def _spreading(self, study: optuna.Study, number: int) -> dict[str, Any] | None:
        """Return the point that adds most hypervolume to what was asked so far, all as the models expect it."""
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != number]
        seen, _ = self._look(trials)
        asked = [params for t in trials if (params := _params_of(t)) is not None]
        expected, kept = self.expectation, [params for _, params in self._new(seen)]
        if not kept:
            return None
        places = expected.places(expected.points(kept))
        there = expected.places(expected.points(asked)) if asked else np.zeros((0, 2))
        corner = np.concatenate([there, places]).max(axis=0)
        bound = (float(corner[0]) * _BEYOND_TIME, float(corner[1]) + _BEYOND_LN_GAP)
        return kept[int(np.argmax(added_area(there, places, bound)))]


def _params_of(trial: FrozenTrial) -> dict[str, Any] | None:
    """Return the params of a trial, also of one that is queued; None when it has none yet."""
    if trial.state == TrialState.WAITING:
        fixed = trial.system_attrs.get("fixed_params")
        return dict(fixed) if isinstance(fixed, dict) else None
    return dict(trial.params) if trial.params or trial.state.is_finished() else None


def _outcome(trial: FrozenTrial, max_divergence: float) -> tuple[float | None, float | None]:
    """Return (divergence, step time) as far as the trial tells."""
    metrics, values = trial.user_attrs.get("metrics") or {}, trial.values or []
    step = metrics.get("step_time_ms", values[0] if values else None)
    gap = metrics.get("divergence", values[1] if len(values) > 1 else None)
    return told_divergence(gap, trial.user_attrs.get("status", ""), max_divergence), step


def told_divergence(gap: float | None, status: str, max_divergence: float) -> float | None:
    """Return the divergence that a model may learn from; a diverged run counts as far beyond the budget."""
    if gap is None and status == "diverged":
        gap = math.inf
    far = max(_FAR_OFF * max_divergence, _LEAST_FAR_OFF)
    return min(float(gap), far) if gap is not None and not math.isnan(gap) else None


def _memory(trial: FrozenTrial) -> float:
    """Return the measured bytes of a trial, 0 when it has none."""
    return float((trial.user_attrs.get("metrics") or {}).get("memory_bytes", 0.0))
