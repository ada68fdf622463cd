"""Our Optuna sampler: posterior draw of the tables, knapsack over the draw, one trial; refitted after every trial.

Half of the trials aim at the fastest point within the divergence budget, the other half spread over the whole front.
The first of each come from the prior alone, which is the scan's and the cost model's answer; every finished trial
corrects it. Nothing is proposed twice, nothing the problem refuses is proposed at all, and a trial depends only on the
seed, its number, and the trials finished before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autoprec.search.model import Belief, DivergenceModel, LinearModel, Observation
from autoprec.search.pareto import hypervolume, nondominated
from autoprec.search.problem import Problem
from autoprec.search.sensitivity import families
from autoprec.search.solver import solve
from autoprec.search.tables import FloatTable, IntVector, Limit, PairCosts

__all__ = ["PrecisionSampler", "Prior"]

Vector = npt.NDArray[np.float64]

#: Points along the front that are solved for in a trial that spreads.
_GRID = 8
#: Width of posterior draws, in posterior standard deviations.
_SPREAD = 0.5


def _zero(_params: Mapping[str, Any]) -> float:
    return 0.0


@dataclass(frozen=True)
class Prior:
    """What is believed before the first trial.

    Attributes:
        time_ms: ``[G, C]`` time of each group's layers under each choice.
        error2: ``[G, C]`` squared relative gradient error (``SensitivityTable.error2``).
        base_time_ms: time of a step outside the groups.
        memory: ``[G, C]`` bytes each group holds, or None when memory is neither limited nor an objective.
        base_memory: bytes outside the groups.
        parameter_error2: squared error of the parameters of a point (``SensitivityTable.parameter_error2``).
        parameter_time_ms: (name, value) -> milliseconds against the parameter's default.
        pairs: extra time between neighbouring groups (casts).
        time_noise: relative noise of one measured step time; tiny for modelled times.
        time_trust: relative uncertainty of the differences in ``time_ms``.
    """

    time_ms: FloatTable
    error2: FloatTable
    base_time_ms: float = 0.0
    memory: FloatTable | None = None
    base_memory: float = 0.0
    parameter_error2: Callable[[Mapping[str, Any]], float] = _zero
    parameter_time_ms: Mapping[tuple[str, Any], float] = field(default_factory=dict)
    pairs: PairCosts | None = None
    time_noise: float = 0.01
    time_trust: float = 0.2


@dataclass(frozen=True, slots=True)
class _Point:
    """What the models need of a trial's params."""

    key: tuple[Any, ...]
    index: IntVector
    features: Vector
    base2: float


@dataclass
class _State:
    """The refitted models, and the trials they were fitted to."""

    fitted: tuple[int, ...]
    divergence: DivergenceModel
    time: LinearModel
    memory: LinearModel
    front: list[tuple[float, float]]

    def gain(self, step: float, gap: float) -> float:
        """Return the area that a point adds to the measured front in (relative time, ln divergence)."""
        slowest = max([step, *(t for t, _ in self.front)]) * 1.02
        highest = max([gap, *(d for _, d in self.front), 1e-9]) * 1.1

        def at(t: float, d: float) -> tuple[float, float]:
            return t / slowest, math.log(max(d, 1e-9) / highest)

        points = [at(t, d) for t, d in self.front]
        return hypervolume([*points, at(step, gap)], (1.0, 0.0)) - hypervolume(points, (1.0, 0.0))


class PrecisionSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Proposes whole assignments; see the module's docstring.

    Args:
        problem: the search problem.
        prior: tables to start from.
        max_divergence: the budget half of the trials aim at, a fraction.
        max_gradient: largest relative gradient error, absolute (``decision.gradient_limit``); None for no limit.
        max_memory: bytes; needs ``prior.memory``.
        noise_floor: divergence of the benign perturbation.
        seed: with the trial's number it determines every draw.
        focus: share of trials that aim at the budget; None is a half, three quarters for the memory objectives.
        objective: what those trials minimise: ``throughput``, ``memory`` or ``balanced`` (the product of both).
    """

    def __init__(
        self,
        problem: Problem,
        prior: Prior,
        *,
        max_divergence: float = 0.0025,
        max_gradient: float | None = None,
        max_memory: float | None = None,
        noise_floor: float = 0.0,
        seed: int = 0,
        focus: float | None = None,
        objective: str = "throughput",
    ) -> None:
        self.problem, self.prior = problem, prior
        self.max_divergence, self.noise_floor, self.seed = max_divergence, noise_floor, seed
        self.focus = focus if focus is not None else 0.5 if objective == "throughput" else 0.75
        self.objective = objective
        self.exhausted = False
        self._limits: list[Limit] = []
        self._max_gradient2 = None if max_gradient is None else max_gradient**2
        if max_memory is not None and prior.memory is not None:
            self._limits.append(Limit(prior.memory, max_memory - prior.base_memory))
        self._features = [(name, value) for name, values in problem.parameters.items() for value in values[1:]]
        numbers = {g: number for number, family in enumerate(families(problem)) for g in family}
        self._families = [numbers[g] for g in range(len(problem.groups))]
        self._state: _State | None = None
        self._points: dict[int, _Point] = {}

    # --- Optuna's side ----------------------------------------------------------------------------------------------
    def infer_relative_search_space(  # the same for every study and trial
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        """Return everything: layers and parameters are decided together."""
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
        return self._tpe(trial.number).sample_independent(study, trial, param_name, param_distribution)

    def _tpe(self, number: int) -> optuna.samplers.TPESampler:
        return optuna.samplers.TPESampler(seed=(self.seed * 1_000_003 + number) % 2**31, n_startup_trials=10)

    # --- proposing --------------------------------------------------------------------------------------------------
    def propose(self, study: optuna.Study, number: int) -> dict[str, Any]:
        """Return the params of trial ``number``, different from every other trial of the study."""
        rng = np.random.default_rng([self.seed, number])
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != number]
        seen = {point.key for t in trials if (point := self._point(t)) is not None}
        state = self._refit(trials)
        aims = rng.random() < self.focus
        for attempt in range(8):
            spread = (0.0 if attempt == 0 and number % 4 == 0 else _SPREAD) + 0.35 * attempt
            found = self._solve(study, number, state, rng, spread, aims)
            if found is not None and self.problem.key(found) not in seen:
                return found
            if found is not None and attempt >= 2:
                near = self._neighbour(found, seen, state, rng)
                if near is not None:
                    return near
        return self._anything_new(seen, rng)

    def _refit(self, trials: Sequence[FrozenTrial]) -> _State:
        """Return models fitted to the finished trials (the last ones when nothing changed)."""
        finished = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)]
        numbers = tuple(sorted(t.number for t in finished))
        if self._state is not None and self._state.fitted == numbers:
            return self._state
        effects = np.array([self.prior.parameter_time_ms.get(f, 0.0) for f in self._features], dtype=np.float64)
        divergence = DivergenceModel(self.prior.error2, self._families, len(self._features), self.noise_floor * 0.5)
        time = LinearModel(
            self.prior.time_ms,
            self.prior.base_time_ms,
            effects,
            noise=self.prior.time_noise,
            trust=self.prior.time_trust,
        )
        held = self.prior.memory if self.prior.memory is not None else np.where(self.problem.allowed, 0.0, np.inf)
        most = max((_memory(t) for t in finished), default=0.0)
        base = self.prior.base_memory or most
        memory = LinearModel(held, base, np.zeros(len(self._features)), noise=1e-3, trust=0.1)
        gaps, times, both, sizes = [], [], [], []
        for trial in sorted(finished, key=lambda t: t.number):
            point = self._point(trial)
            gap, step = _outcome(trial, self.max_divergence)
            if point is None:
                continue
            if gap is not None:
                gaps.append(Observation(point.index, point.features, point.base2, gap))
            if step is not None:
                times.append(Observation(point.index, point.features, point.base2, step))
                both += [(step, gap)] if gap is not None else []
            if _memory(trial) > 0:
                sizes.append(Observation(point.index, point.features, point.base2, _memory(trial)))
        divergence.fit(gaps)
        divergence.fit(gaps)  # again, with the residual that the first fit found
        time.fit(times)
        memory.fit(sizes)
        self._state = _State(numbers, divergence, time, memory, [both[i] for i in nondominated(both)])
        return self._state

    def _point(self, trial: FrozenTrial) -> _Point | None:
        """Return a trial's point, computed once: params of a trial never change after they were asked for."""
        known = self._points.get(trial.number)
        if known is None and (params := _params_of(trial)) is not None:
            known = _Point(
                self.problem.key(params),
                self.problem.indices(params),
                self._vector(params),
                self.prior.parameter_error2(params),
            )
            if trial.state != TrialState.WAITING:
                self._points[trial.number] = known
        return known

    def _vector(self, params: Mapping[str, Any]) -> Vector:
        return np.array([self.problem.value(params, name) == value for name, value in self._features], dtype=np.float64)

    def _solve(
        self, study: optuna.Study, number: int, state: _State, rng: np.random.Generator, spread: float, aims: bool
    ) -> dict[str, Any] | None:
        """Draw a world, and return its best point for this trial's aim."""
        belief = state.divergence.draw(rng, spread)
        table, base, effects = state.time.draw(rng, spread)
        cost, cost_effects = self._cost(state, table, effects) if aims else (table, effects)
        targets = self._targets(belief, rng, aims)
        best: tuple[float, dict[str, Any]] | None = None
        for parameters in self._parameter_options(study, number, cost_effects, rng):
            z = self._vector(parameters)
            base2 = self.prior.parameter_error2(parameters)
            limits = list(self._limits)
            if self._max_gradient2 is not None and math.isfinite(base2):
                limits.append(Limit(self.prior.error2, self._max_gradient2 - base2))
            for target in targets:
                budget = belief.budget(target, z, base2)
                index = solve(cost, belief.error2, budget, limits=limits, pairs=self.prior.pairs)
                if index is None:
                    continue
                rows = np.arange(len(index))
                step = base + float(table[rows, index].sum() + effects @ z)
                aimed = float(cost[rows, index].sum() + cost_effects @ z)
                merit = aimed if aims else -state.gain(step, belief.divergence(index, z, base2))
                if best is None or merit < best[0]:
                    best = (merit, self.problem.from_indices(index, parameters))
        return None if best is None else best[1]

    def _cost(self, state: _State, time: FloatTable, effects: Vector) -> tuple[FloatTable, Vector]:
        """Return what the objective minimises: time, memory, or their product (added in logarithms, to first order)."""
        if self.objective == "throughput":
            return time, effects
        held, _, held_effects = state.memory.mean()
        size, duration = max(state.memory.scale, 1e-12), max(state.time.scale, 1e-12)
        if self.objective == "memory":
            # time breaks ties: most choices hold the same bytes
            return held / size + 1e-3 * time / duration, held_effects / size + 1e-3 * effects / duration
        return held / size + time / duration, held_effects / size + effects / duration

    def _targets(self, belief: Belief, rng: np.random.Generator, aims: bool) -> list[float]:
        """Return the divergences to solve for: just within the budget, or along the front (log-spaced, jittered)."""
        if aims:
            # within the noise floor nobody can tell: the decision accepts what lies there
            return [max(self.max_divergence, self.noise_floor) * float(rng.uniform(0.9, 1.0))]
        none = np.zeros(len(self._features))
        masked = np.where(np.isfinite(belief.error2), belief.error2, -1.0)
        worst = belief.divergence(np.argmax(masked, axis=1), none, 0.0)
        least = belief.divergence(np.argmin(belief.error2, axis=1), none, 0.0)
        low = max(least, worst * 1e-4, 1e-9)
        grid = (np.arange(_GRID) + rng.random(_GRID)) / _GRID
        return [float(v) for v in low * (max(worst, low) / low) ** grid]

    def _parameter_options(
        self, study: optuna.Study, number: int, effects: Vector, rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        """Return the parameter values to solve under: Optuna's TPE on every third trial, else several of our own.

        Those are the cheapest by the drawn effects ``[K]``, the defaults, and random ones; all there are if few.
        """
        names = list(self.problem.parameters)
        if not names:
            return [{}]
        if number % 3 == 0:
            tpe, frozen = self._tpe(number), _blank(number)
            space = self.problem.distributions()
            return [{name: tpe.sample_independent(study, frozen, name, space[name]) for name in names}]
        grid = math.prod(len(values) for values in self.problem.parameters.values())
        if grid <= 8:
            return [dict(zip(names, v, strict=True)) for v in itertools.product(*self.problem.parameters.values())]
        defaults = {name: values[0] for name, values in self.problem.parameters.items()}
        cheapest, least = dict(defaults), dict.fromkeys(names, 0.0)
        for (name, value), effect in zip(self._features, effects, strict=True):
            if effect < least[name]:
                cheapest[name], least[name] = value, float(effect)
        options = [cheapest, defaults]
        for _ in range(3):
            options.append({n: v[int(rng.integers(len(v)))] for n, v in self.problem.parameters.items()})
        return options

    def _neighbour(
        self, params: dict[str, Any], seen: set[tuple[Any, ...]], state: _State, rng: np.random.Generator
    ) -> dict[str, Any] | None:
        """Return an unseen point one change away that the mean model likes best."""
        table, _, effects = state.time.mean()
        belief = state.divergence.mean()
        index = self.problem.indices(params)
        scored: list[tuple[float, dict[str, Any]]] = []
        for g, c in zip(*np.nonzero(self.problem.allowed), strict=True):
            if c == index[g]:
                continue
            changed: IntVector = index.copy()
            changed[g] = c
            scored.append((0.0, self.problem.from_indices(changed, params)))
        for name, values in self.problem.parameters.items():
            scored += [(0.0, {**params, name: value}) for value in values if value != params.get(name)]
        best: tuple[float, dict[str, Any]] | None = None
        for _, point in scored:
            if self.problem.key(point) in seen:
                continue
            at, z = self.problem.indices(point), self._vector(point)
            base2 = self.prior.parameter_error2(point)
            if not self._within_limits(at, base2):
                continue
            late = float(table[np.arange(len(at)), at].sum() + effects @ z) / max(state.time.scale, 1e-12)
            gap = belief.divergence(at, z, base2)
            cost = late * (1 + 0.02 * rng.normal()) + 0.1 * math.log(max(gap, 1e-9) / self.max_divergence)
            if best is None or cost < best[0]:
                best = (cost, point)
        return None if best is None else best[1]

    def _within_limits(self, index: IntVector, base2: float) -> bool:
        rows = np.arange(len(index))
        error2 = float(self.prior.error2[rows, index].sum()) + base2
        if self._max_gradient2 is not None and error2 > self._max_gradient2:
            return False
        return all(float(limit.cost[rows, index].sum()) <= limit.bound for limit in self._limits)

    def _anything_new(self, seen: set[tuple[Any, ...]], rng: np.random.Generator) -> dict[str, Any]:
        """Return a random unseen point within the limits; when none is found, say so in :attr:`exhausted`.

        Groups are changed one by one from the safest point, as long as the limits hold. The point that is returned
        when the space is exhausted is the baseline, which is known.
        """
        safest: IntVector = np.argmin(np.where(self.problem.allowed, self.prior.error2, np.inf), axis=1)
        for _ in range(200):
            params: dict[str, Any] = {n: v[int(rng.integers(len(v)))] for n, v in self.problem.parameters.items()}
            base2, index, share = self.prior.parameter_error2(params), safest.copy(), rng.random()
            for g in rng.permutation(len(index)):
                if rng.random() < share:
                    before = index[g]
                    index[g] = rng.choice(np.flatnonzero(self.problem.allowed[g]))
                    if not self._within_limits(index, base2):
                        index[g] = before
            point = self.problem.from_indices(index, params)
            if self.problem.key(point) not in seen:
                return point
        self.exhausted = True
        return self.problem.params_of(self.problem.baseline)


def _params_of(trial: FrozenTrial) -> dict[str, Any] | None:
    """Return the params of a trial, also of one that is queued; None when it has none yet."""
    if trial.state == TrialState.WAITING:
        fixed = trial.system_attrs.get("fixed_params")
        return dict(fixed) if isinstance(fixed, dict) else None
    return dict(trial.params) if trial.params or trial.state.is_finished() else None


def _outcome(trial: FrozenTrial, max_divergence: float) -> tuple[float | None, float | None]:
    """Return (divergence, step time) as far as the trial tells; a diverged trial counts as far beyond the budget."""
    metrics = trial.user_attrs.get("metrics") or {}
    values = trial.values or []
    step = metrics.get("step_time_ms", values[0] if values else None)
    gap = metrics.get("divergence", values[1] if len(values) > 1 else None)
    if gap is None and trial.user_attrs.get("status") == "diverged":
        gap = max(1.0, 30 * max_divergence)
    gap = min(float(gap), 10.0) if gap is not None and not math.isnan(gap) else None
    return gap, float(step) if step is not None and math.isfinite(step) else None


def _memory(trial: FrozenTrial) -> float:
    """Return the measured bytes of a trial, 0 when it has none."""
    return float((trial.user_attrs.get("metrics") or {}).get("memory_bytes", 0.0))


def _blank(number: int) -> FrozenTrial:
    return optuna.trial.FrozenTrial(
        number=number,
        state=TrialState.RUNNING,
        value=None,
        datetime_start=None,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=number,
    )
