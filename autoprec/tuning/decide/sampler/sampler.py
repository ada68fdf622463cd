"""The sampler itself: draw a posterior sample, ask for the point that would help most in it, refit.

Some of the trials aim at the fastest point within the divergence budget, the others at the whole front. Trials that
still run are points like all others, so parallel asks differ. Nothing is proposed twice, nothing that the problem or a
limit refuses is proposed at all, and a trial depends only on the seed, its number, and the trials before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autoprec.tuning.decide.noise import screening_limit
from autoprec.tuning.decide.problem import FloatTable, IntVector, Problem
from autoprec.tuning.decide.sampler.base import PointSampler
from autoprec.tuning.decide.sampler.posterior import DivergenceLaw, DivergenceModel, LinearModel, Observation
from autoprec.tuning.decide.sampler.posterior_sample import Candidate, PosteriorSample
from autoprec.tuning.decide.sampler.prior import Prior, divergence_model, features_of
from autoprec.tuning.decide.solver import Limit, corners, solve

__all__ = ["PrecisionSampler"]

Vector = npt.NDArray[np.float64]

#: Share of the trials that aim at the budget, the others serve the whole front; for the memory objectives it is larger,
#: because the front that the others serve is that of time and divergence.
_AIMING, _AIMING_MEMORY = 0.4, 0.75
#: Points along the front that are solved for in a trial that spreads, beside the corners of the relaxed front.
_GRID, _CORNERS = 6, 64
#: Width of posterior draws, in posterior standard deviations; by how much it widens with every attempt that came to
#: known points only; how many attempts there are, and how many of them keep aiming at the budget.
_SPREAD, _WIDENING, _ATTEMPTS, _AIMED_ATTEMPTS = 0.25, 0.35, 6, 3
#: Trials see one paired seed, whose ln(divergence) is off by so much for all of them alike (standard deviation over
#: seeds; benchmarks/search_quality.py): points that aim at the budget are spread accordingly.
_SEED_SD = 0.25
#: The models are fitted to this many trials at most, and beyond it only every few trials: fitting costs their square.
#: The first ones (presets and the scan of every group) and the newest ones (near the answer) are kept.
_MOST_FITTED, _FIRST_FITTED, _REFIT_EVERY = 160, 40, 16
#: In one of this many trials Optuna's TPE picks the parameters: it learns interactions that additive models cannot.
_TPE_EVERY = 3
#: Combinations of parameter values up to which all are solved for; else the cheapest, the defaults and some at random.
_FEW_OPTIONS, _RANDOM_OPTIONS = 8, 3
#: A neighbour's merit: what a factor e of divergence is worth in step times, and the jitter that breaks ties.
_GAP_WEIGHT, _JITTER = 0.1, 0.02
#: What time counts against memory where memory is the objective: enough to break ties.
_TIE_BREAK = 1e-3
#: Random points that are tried before the space counts as exhausted.
_RANDOM_POINTS = 200
#: Divergence that a trial without a finite loss counts as, in budgets (1 at least), and what any trial is capped at.
_DIVERGED_BUDGETS, _MOST_DIVERGENCE = 30, 10.0


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


class PrecisionSampler(PointSampler):
    """Proposes whole points; see :mod:`autoprec.tuning.decide.sampler` for the idea.

    Args:
        problem: the search problem.
        prior: tables to start from.
        max_divergence: the budget that trials aim at, a fraction.
        max_gradient: largest relative gradient error, absolute (``decision.gradient_limit``); None for no limit.
        max_memory: bytes; needs ``prior.memory``.
        noise_floor: divergence of the benign perturbation.
        seed: with the trial's number it determines every draw.
        objective: what the trials that aim at the budget minimise: ``throughput``, ``memory`` or
            ``balanced`` (the product of both).
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
        objective: str = "throughput",
    ) -> None:
        super().__init__(problem)
        self.prior = prior
        self.max_divergence, self.noise_floor, self.seed = max_divergence, noise_floor, seed
        self._aiming = _AIMING if objective == "throughput" else _AIMING_MEMORY
        self.objective = objective
        self._limits: list[Limit] = []
        self._max_gradient2 = None if max_gradient is None else max_gradient**2
        if max_memory is not None and prior.memory is not None:
            self._limits.append(Limit(prior.memory, max_memory - prior.base_memory))
        self._features = features_of(problem)
        self._state: _State | None = None
        self._points: dict[int, _Point] = {}

    # --- Optuna's side ----------------------------------------------------------------------------------------------
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
        points = [point for t in trials if (point := self._point(t)) is not None]
        seen = {point.key for point in points}
        state = self._refit(trials)
        aims = rng.random() < self._aiming
        found: dict[str, Any] | None = None
        for attempt in range(_ATTEMPTS):
            spread = _SPREAD + _WIDENING * attempt
            sample = self._draw(state, points, rng, spread, aims)
            if aims and attempt < _AIMED_ATTEMPTS:
                wanted = self._within_budget(sample, self._cost(state, sample), study, number, rng)
            else:
                wanted = self._along_front(sample, self._parameter_options(study, number, sample.effects, rng), rng)
            for candidate in wanted:
                found = self.problem.from_indices(candidate.index, candidate.parameters)
                if self.problem.key(found) not in seen:
                    return found
        near = self._neighbour(found, seen, state, rng) if found is not None else None
        return near if near is not None else self._anything_new(seen, rng)

    def _draw(
        self, state: _State, points: Sequence[_Point], rng: np.random.Generator, spread: float, aims: bool
    ) -> PosteriorSample:
        """Draw a sample; where the budget counts, other seeds may lie higher or lower than the one that is measured."""
        law = state.divergence.draw(rng, spread)
        if aims:
            law = replace(law, scale=law.scale + 2 * _SEED_SD * float(rng.normal()))
        table, base, effects = state.time.draw(rng, spread)
        sample = PosteriorSample(law, table, base, effects, max(state.time.scale, 1e-12), np.zeros((0, 2)))
        if not points:
            return sample
        index = np.stack([point.index for point in points])
        features = np.stack([point.features for point in points]).reshape(len(points), -1)
        return replace(sample, asked=sample.places(index, features, np.array([point.base2 for point in points])))

    def _within_budget(
        self,
        sample: PosteriorSample,
        cost: tuple[FloatTable, Vector],
        study: optuna.Study,
        number: int,
        rng: np.random.Generator,
    ) -> list[Candidate]:
        """Return the points that are cheapest within the divergence budget, one per parameter option, best first."""
        table, effects = cost
        target = screening_limit(self.max_divergence, self.noise_floor)
        found = []
        for parameters in self._parameter_options(study, number, effects, rng):
            z, base2 = self._vector(parameters), self.prior.parameter_error2(parameters)
            index = self._solve(table, sample.law, target, z, base2)
            if index is not None:
                merit = float(table[np.arange(len(index)), index].sum() + effects @ z)
                found.append((merit, Candidate(index, parameters, z, base2)))
        return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])]

    def _along_front(
        self, sample: PosteriorSample, options: Sequence[dict[str, Any]], rng: np.random.Generator
    ) -> list[Candidate]:
        """Return the points of the sample's front that add anything to what was asked, those that add most first."""
        found: list[Candidate] = []
        supported = corners(sample.time_ms, sample.law.error2, _CORNERS)
        for turn, parameters in enumerate(options):
            z, base2 = self._vector(parameters), self.prior.parameter_error2(parameters)
            kept = [index for index in supported if self._within_limits(index, base2)]
            if turn == 0 or len(kept) < len(supported):
                targets = self._targets(sample.law, rng)
                solved = (self._solve(sample.time_ms, sample.law, target, z, base2) for target in targets)
                kept += [index for index in solved if index is not None]
            found += [Candidate(index, parameters, z, base2) for index in kept]
        if not found:
            return []
        places = sample.places(
            np.stack([c.index for c in found]),
            np.stack([c.features for c in found]).reshape(len(found), -1),
            np.array([c.base2 for c in found]),
        )
        gains = sample.gains(places)
        return [found[i] for i in np.argsort(-gains, kind="stable") if gains[i] > 0]

    def _solve(
        self, cost: FloatTable, law: DivergenceLaw, target: float, features: Vector, base2: float
    ) -> IntVector | None:
        """Return the cheapest assignment within a divergence by a law and within all limits."""
        limits = list(self._limits)
        if self._max_gradient2 is not None and math.isfinite(base2):
            limits.append(Limit(self.prior.error2, self._max_gradient2 - base2))
        budget = law.budget(target, features, base2)
        return solve(cost, law.error2, budget, limits=limits)

    def _refit(self, trials: Sequence[FrozenTrial]) -> _State:
        """Return models fitted to the finished trials (the last ones when nothing changed)."""
        finished = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)]
        finished.sort(key=lambda t: t.number)
        if len(finished) > _MOST_FITTED:
            # counted from the beginning, so that a resumed study refits where an uninterrupted one did
            del finished[len(finished) - (len(finished) - _MOST_FITTED) % _REFIT_EVERY :]
        numbers = tuple(t.number for t in finished)
        if self._state is not None and self._state.fitted == numbers:
            return self._state
        effects = np.array([self.prior.parameter_time_ms.get(f, 0.0) for f in self._features], dtype=np.float64)
        divergence = divergence_model(self.problem, self.prior.error2, self.noise_floor)
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
        gaps, times, sizes = [], [], []
        newest = len(finished) - (_MOST_FITTED - _FIRST_FITTED)
        for turn, trial in enumerate(finished):
            point = self._point(trial)
            gap, step = _outcome(trial, self.max_divergence)
            if point is None:
                continue
            if _FIRST_FITTED <= turn < newest:
                continue
            if gap is not None:
                gaps.append(Observation(point.index, point.features, point.base2, gap))
            if step is not None:
                times.append(Observation(point.index, point.features, point.base2, step))
            if self.objective != "throughput" and _memory(trial) > 0:
                sizes.append(Observation(point.index, point.features, point.base2, _memory(trial)))
        divergence.fit(gaps)
        time.fit(times)
        memory.fit(sizes)
        self._state = _State(numbers, divergence, time, memory)
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

    def _cost(self, state: _State, sample: PosteriorSample) -> tuple[FloatTable, Vector]:
        """Return what the objective minimises: time, memory, or their product (added in logarithms, to first order)."""
        time, effects = sample.time_ms, sample.effects
        if self.objective == "throughput":
            return time, effects
        held, _, held_effects = state.memory.mean()
        size, duration = max(state.memory.scale, 1e-12), max(state.time.scale, 1e-12)
        if self.objective == "memory":
            # time breaks ties: most choices hold the same bytes
            return held / size + _TIE_BREAK * time / duration, held_effects / size + _TIE_BREAK * effects / duration
        return held / size + time / duration, held_effects / size + effects / duration

    def _targets(self, law: DivergenceLaw, rng: np.random.Generator) -> list[float]:
        """Return divergences along the front to solve for: log-spaced, jittered."""
        none = np.zeros(len(self._features))
        masked = np.where(np.isfinite(law.error2), law.error2, -1.0)
        worst = law.divergence(np.argmax(masked, axis=1), none, 0.0)
        least = law.divergence(np.argmin(law.error2, axis=1), none, 0.0)
        low = max(least, worst * 1e-4, 1e-9)
        grid = (np.arange(_GRID) + rng.random(_GRID)) / _GRID
        return [float(v) for v in low * (max(worst, low) / low) ** grid]

    def _parameter_options(
        self, study: optuna.Study, number: int, effects: Vector, rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        """Return the parameter values to solve under: Optuna's TPE in every third trial, else several of our own.

        Those are the cheapest by the drawn effects ``[K]``, the defaults, and random ones; all there are if few.
        """
        names = list(self.problem.parameters)
        if not names:
            return [{}]
        if number % _TPE_EVERY == 0:
            tpe, frozen = self._tpe(number), _blank(number)
            space = self.problem.distributions()
            return [{name: tpe.sample_independent(study, frozen, name, space[name]) for name in names}]
        grid = math.prod(len(values) for values in self.problem.parameters.values())
        if grid <= _FEW_OPTIONS:
            return [dict(zip(names, v, strict=True)) for v in itertools.product(*self.problem.parameters.values())]
        defaults = {name: values[0] for name, values in self.problem.parameters.items()}
        cheapest, least = dict(defaults), dict.fromkeys(names, 0.0)
        for (name, value), effect in zip(self._features, effects, strict=True):
            if effect < least[name]:
                cheapest[name], least[name] = value, float(effect)
        options = [cheapest, defaults]
        for _ in range(_RANDOM_OPTIONS):
            options.append({n: v[int(rng.integers(len(v)))] for n, v in self.problem.parameters.items()})
        return options

    def _neighbour(
        self, params: dict[str, Any], seen: set[tuple[Any, ...]], state: _State, rng: np.random.Generator
    ) -> dict[str, Any] | None:
        """Return an unseen point one change away that the mean model likes best."""
        table, _, effects = state.time.mean()
        law = state.divergence.mean()
        index = self.problem.indices(params)
        neighbours: list[dict[str, Any]] = []
        for g, c in zip(*np.nonzero(self.problem.allowed), strict=True):
            if c == index[g]:
                continue
            changed: IntVector = index.copy()
            changed[g] = c
            neighbours.append(self.problem.from_indices(changed, params))
        for name, values in self.problem.parameters.items():
            neighbours += [{**params, name: value} for value in values if value != params.get(name)]
        best: tuple[float, dict[str, Any]] | None = None
        for point in neighbours:
            if self.problem.key(point) in seen:
                continue
            at, z = self.problem.indices(point), self._vector(point)
            base2 = self.prior.parameter_error2(point)
            if not self._within_limits(at, base2):
                continue
            late = float(table[np.arange(len(at)), at].sum() + effects @ z) / max(state.time.scale, 1e-12)
            gap = law.divergence(at, z, base2)
            cost = late * (1 + _JITTER * rng.normal()) + _GAP_WEIGHT * math.log(max(gap, 1e-9) / self.max_divergence)
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
        for _ in range(_RANDOM_POINTS):
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
        gap = max(1.0, _DIVERGED_BUDGETS * max_divergence)
    gap = min(float(gap), _MOST_DIVERGENCE) if gap is not None and not math.isnan(gap) else None
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
