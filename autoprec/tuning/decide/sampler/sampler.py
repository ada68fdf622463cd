"""The sampler itself: solve the knapsack on what is known, and ask for the policy with the largest expected gain.

What may be asked are points of the front that the solver finds under the fitted models, and the presets. A preset that
is expected to be as good as anything else is asked before it: it is easier to explain. Nothing is random; a trial
depends on the runs before it alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autoprec.policy.solver import solve
from autoprec.support.arrays import np
from autoprec.tuning.decide.problem import Params, Problem
from autoprec.tuning.decide.sampler.expectation import LAST_VALUE, Expectation, Goals
from autoprec.tuning.decide.sampler.prior import Prior, features_of
from autoprec.tuning.study.run import Run

#: (name, params) of policies that people run today.
Presets = Sequence[tuple[str, Params]]
#: Why a search ends that has asked for everything.
NOTHING_NEW = "no other policy is on the front of time and error"
#: Multiples of the budget that are solved for: close together around it, far apart where nothing is decided.
_FACTORS = tuple(math.exp(0.1 * k * (1 + abs(k) / 10)) for k in range(-14, 15))
#: Up to which of them values of parameters that cost no time are tried as well.
_BINDING = 1.15
#: A parameter's value that saves less than this share of a step gains nothing.
_LEAST_EFFECT = 0.002
#: Laws that the bound of what is left is taken over.
_DRAWS = 100
#: A preset with this share of the largest expected gain is asked first.
_AS_GOOD = 0.95


@dataclass(frozen=True)
class Proposal:
    """The policy of most value, and the name of the preset that it is (empty for others).

    ``gain`` is the largest expected gain of anything new, ``value`` that of this one less the price of its runs, and
    next to nothing for one in ``exploratory``, which is run last of all.
    """

    params: Params
    preset: str
    gain: float
    value: float
    exploratory: bool = False


class PrecisionSampler(optuna.samplers.RandomSampler):  # type: ignore[misc]
    """Proposes whole points; see :mod:`autoprec.tuning.decide.sampler` for the idea.

    A study knows which points were asked; what was measured is given by :meth:`learn`. Parameters that are not the
    problem's are drawn at random.

    Args:
        prior: tables to start from.
        presets: (name, params) of policies that people run today.

    Attributes:
        expectation: the fitted models.
        last: what was proposed last.
    """

    def __init__(self, problem: Problem, prior: Prior, goals: Goals, presets: Presets = ()) -> None:
        super().__init__(seed=0)
        self.problem, self.expectation = problem, Expectation(problem, prior, goals, presets)
        self._presets, self._features = list(presets), features_of(problem)
        self._known: tuple[Any, Proposal | None] = (None, None)
        self.last: Proposal | None = None

    # --- Optuna's side ----------------------------------------------------------------------------------------------
    def infer_relative_search_space(self, *_study_and_trial: Any) -> dict[str, BaseDistribution]:
        """Return the distributions of everything: layers and parameters are decided in one sample."""
        return dict(self.problem.distributions())

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, *_space: Any) -> Params:
        """Return the params of the next trial; the baseline's where nothing new is left."""
        self.last = self.best(study, trial.number)
        params = self.last.params if self.last is not None else self.problem.params_of(self.problem.baseline)
        known = self.problem.distributions()
        return {name: value for name, value in params.items() if name in known}

    # --- proposing --------------------------------------------------------------------------------------------------
    def learn(self, runs: Sequence[Run], best_cost: float | None) -> None:
        """Learn from every run of the search, and from the cost of the best policy that is surely acceptable."""
        self.expectation.fit(runs)
        self.expectation.best_cost = best_cost
        self._known = (None, None)

    def finished(self, study: optuna.Study) -> str:
        """Return why no trial pays any more; empty while something is."""
        best = self.best(study)
        if best is None:
            return NOTHING_NEW
        if best.value <= 0:
            least = self.expectation.goals.resolution
            gain = f"{best.gain:.1%}" if best.gain > least else f"less than {least:.1%}"
            return (
                f"the best untried policy is expected to gain {gain}, too little for the runs it would take; none of "
                f"them gains more than about {self.bound():.1%}"
            )
        return ""

    def best(self, study: optuna.Study, number: int = -1) -> Proposal | None:
        """Return what has most value of information among everything new; None where nothing is new."""
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != number]
        state = [(t.number, t.state) for t in trials]
        if self._known[0] != state:
            self._known = (state, self._best(trials))
        return self._known[1]

    def _best(self, trials: Sequence[FrozenTrial]) -> Proposal | None:
        asked = [(params, t.state.is_finished()) for t in trials if (params := _params_of(t)) is not None]
        old = [params for params, _ in asked]
        names, fresh = self._new(old, self._front())
        if not fresh:
            names, fresh = self._new(old, self._hoped())
        if not fresh:
            return None
        expected = self.expectation
        outlook = expected.outlook(expected.points(fresh))
        running = expected.outlook(expected.points([params for params, finished in asked if not finished]))
        # what still runs and is faster makes this one needless, should it turn out acceptable
        faster = running.cost[None, :] <= outlook.cost[:, None]
        needed = 1.0 - np.where(faster, running.chance[None, :], 0.0).max(axis=1, initial=0.0)
        value = outlook.value * needed
        top = int(np.argmax(np.where([bool(name) for name in names], value / _AS_GOOD, value)))
        gain = float((outlook.gain * needed).max())
        if value[top] <= 0 and not len(running.cost) and expected.may_explore:
            more = self._new([*old, *fresh], self._hoped())[1]
            names, fresh = [*names, *([""] * len(more))], [*fresh, *more]
            hoped = expected.optimistic(expected.points(fresh))
            if hoped.max() > 0:
                top = int(np.argmax(hoped))
                return Proposal(fresh[top], names[top], gain, 0.5 * LAST_VALUE, exploratory=True)
        return Proposal(fresh[top], names[top], gain, float(value[top]))

    def bound(self) -> float:
        """Return what anything in the space gains at most with 95 % over the best policy so far, tried or not.

        Laws of divergence, and of times where they are measured, are drawn from all that what ran leaves possible, and
        the fastest policy within the budget is solved for under each: the misfit of the tables that the runs have shown
        is in them. It is never less than the difference by which two times can be told apart.
        """
        rng = np.random.default_rng(0)
        best = self._drawn(rng)
        gains = self.expectation.drawn_gains(self.expectation.points(best), rng) if best else np.zeros(1)
        return max(self.expectation.goals.resolution, float(np.quantile(gains, 0.95)))

    def _hoped(self) -> list[Params]:
        """Return what may be fastest for all that timed runs leave possible; nothing where times are modelled.

        A recipe that is slow in most layers and fast in a few of them is not on the front of what is most likely.
        """
        return self._drawn(np.random.default_rng(0)) if self.expectation.goals.timed else []

    def _drawn(self, rng: np.random.Generator) -> list[Params]:
        """Return the fastest policies within the budget by laws drawn from all that what ran leaves possible."""
        found = []
        for _ in range(_DRAWS):
            table, effects = self.expectation.cost_table(rng)
            found.append(self._solved(self.expectation.divergence.drawn_law(rng), table, self._options(effects)[0]))
        return [params for params in found if params is not None]

    def _solved(self, law: tuple[Any, float, Any], table: Any, values: Params, factor: float = 1.0) -> Params | None:
        """Return the fastest policy within a multiple of the budget by a law; None where nothing is."""
        expected, (squares, scale, worse) = self.expectation, law
        point = expected.points([values])
        z, base2 = point.features[0], float(point.base2[0])
        most = math.inf
        if not expected.goals.uninformative:
            most = (factor * expected.goals.max_divergence * math.exp(-float(worse @ z))) ** 2
        index = solve(table, squares, max(most - scale * base2, 0.0), limits=expected.limits(z, base2))
        return None if index is None else self.problem.from_indices(index, values)

    def _new(self, asked: Sequence[Params], more: Sequence[Params]) -> tuple[list[str], list[Params]]:
        """Return names (of presets, or empty) and params of presets and more that was not asked, within the limits."""
        seen, found = {self.problem.key(params) for params in asked}, []
        for name, params in (*self._presets, *(("", params) for params in more)):
            key = self.problem.key(params)
            if key not in seen and not self.problem.is_script(params):  # the script is the reference: it is known
                seen.add(key)
                found.append((name, params))
        fits = self.expectation.within_limits(self.expectation.points([params for _, params in found]))
        kept = [one for one, fit in zip(found, fits, strict=True) if fit]
        return [name for name, _ in kept], [params for _, params in kept]

    def _front(self) -> list[Params]:
        """Return the front by the fitted models: the fastest policies within multiples of the budget.

        From the budget on a policy may also be within it under another value of a parameter that costs no time (margin,
        amax history, rounding of scales): that is not known before it ran, and pays for a run where the error binds.
        Fast accumulation is for time alone.
        """
        law, (table, effects) = self.expectation.divergence.law(), self.expectation.cost_table()
        costs = zip(self._features, effects, strict=True)
        free = [f for f, effect in costs if abs(effect) < _LEAST_EFFECT and ".accumulation" not in f[0]]
        found: list[Params] = []
        for turn, values in enumerate(self._options(effects)):
            for factor in _FACTORS if turn == 0 else (1.0,):
                params = self._solved(law, table, values, factor)
                if params is None:
                    continue
                found.append(params)
                if turn == 0 and 1.0 <= factor < _BINDING:
                    found += [{**params, name: value} for name, value in free]
        return found

    def _options(self, effects: Any) -> list[Params]:
        """Return the parameter values to solve under: the cheapest, with each of its savings left out, and defaults.

        The one that turns out harmful is found so. A value that gains nothing stays at its default.
        """
        default = {name: values[0] for name, values in self.problem.parameters.items()}
        cheapest, least = dict(default), dict.fromkeys(default, -_LEAST_EFFECT)
        for (name, value), effect in zip(self._features, effects, strict=True):
            if effect < least[name]:
                cheapest[name], least[name] = value, float(effect)
        but_one = [cheapest | {name: value} for name, value in default.items() if cheapest[name] != value]
        return [cheapest, *but_one, *([default] if len(but_one) > 1 else [])]


def _params_of(trial: FrozenTrial) -> Params | None:
    """Return the params of a trial, also of one that is queued; None when it has none yet."""
    if trial.state == TrialState.WAITING:
        fixed = trial.system_attrs.get("fixed_params")
        return dict(fixed) if isinstance(fixed, dict) else None
    return dict(trial.params) if trial.params or trial.state.is_finished() else None


def make_sampler(
    name: str, problem: Problem, prior: Prior, goals: Goals, *, presets: Presets = (), seed: int = 0
) -> optuna.samplers.BaseSampler:
    """Return a sampler of ``--sampler``: ``knapsack`` (ours), ``tpe`` or ``random``.

    Args:
        problem, prior, goals, presets: see :class:`PrecisionSampler`; Optuna's own samplers use none of them.
        seed: seed of Optuna's own samplers; ours draws nothing at random.
    """
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return PrecisionSampler(problem, prior, goals, presets)
