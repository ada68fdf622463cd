"""What further runs of a policy may be expected to gain: what is asked next, and when it is enough.

A policy can be adopted once the 95 % bound of its mean divergence is within the budget. How likely that is after n more
paired seeds follows from the model: its mean will then have moved by a known spread, and its uncertainty have shrunk by
a known factor. That probability, times how much better the policy is than the best one that is surely acceptable,
divided by the runs it takes, is what the policy is *worth*, for the best n. It is the one number that everything is
asked by: a new policy (a trial), one more paired seed for a policy that was tried, or nothing, where no policy is worth
another run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoprec.policy.solver import Limit
from autoprec.tuning.decide.problem import FloatTable, Problem
from autoprec.tuning.decide.sampler.posterior import LinearModel, Observation
from autoprec.tuning.decide.sampler.prior import Prior, divergence_model, feature_vector, features_of

__all__ = ["MODELLED", "TIMED", "Bar", "Expectation", "Goals", "Measured", "Outlook", "Points"]

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a policy has to gain to be worth runs, all fractions of the step time.

    Attributes:
        price: of one run. It is some 40 steps of the training that is to be sped up, so 0.0001 has paid for it after
            400,000 of them.
        tie: a policy that is faster by less is tied, and nobody pays for a run.
        least: what is expected to be gained beyond the tie, chances included, has to be more than this.
        preset_tie: both of these for presets. They are what people would run anyway: one that is as good has to be
            known, or the answer may be slower than it.
    """

    price: float
    tie: float
    least: float
    preset_tie: float


#: Where times are modelled, and so are exact.
MODELLED = Bar(0.00005, 0.005, 0.002, 0.0005)
#: Where they are measured: a percent is lost in their noise, and a smaller bar has a search run all its trials for it.
TIMED = Bar(0.0001, 0.01, 0.005, 0.01)
#: Standard deviations from the mean to its 95 % bound. For one look 1.645 would do; a search looks after every run and
#: takes the first policy that passes, so that 7 % of them were beyond the budget then, 3 % with two, and 1 % so.
_Z95 = 2.3
#: A policy that was measured under one seed only is accepted under none; and under so many it is measured at most.
FEWEST_SEEDS, MOST_SEEDS = 2, 24
#: Predicted gradient errors are right within a few percent: a policy at the very limit would be refused half the time.
_GRADIENT_MARGIN = 1.03
#: Numbers of further seeds that are considered for a policy.
_MORE_SEEDS = (1, 2, 3, 4, 6, 8, 12, 16)
#: What a run under a seed that others ran under tells, against one under a new seed: their luck is partly the same.
_REUSED = 0.5
#: What is left of the chance of a policy for each failed run of a choice in it that never ran to its end.
_AFTER_FAILURE = 0.2
#: What time counts against memory where memory is the objective: enough to break ties.
_TIE_BREAK = 1e-3
#: The models are fitted to this many runs at most: the first ones (the whole range) and the newest (near the answer).
_MOST_FITTED, _FIRST_FITTED = 160, 40


@dataclass(frozen=True, slots=True)
class Goals:
    """What makes a policy acceptable, and better than another.

    Attributes:
        max_divergence: the budget, a fraction.
        max_gradient: largest relative gradient error, absolute; None for no limit.
        max_memory: bytes; None for no limit.
        noise_floor: divergence of the benign perturbation.
        objective: ``throughput``, ``memory`` or ``balanced``.
        blind: the loss cannot judge, so only the limits do.
        seeds: paired seeds that a policy is then measured under.
        reference: (milliseconds, bytes) of the script as written, which the first gain is told against.
        timed: step times are measured.
    """

    max_divergence: float = 0.0025
    max_gradient: float | None = None
    max_memory: float | None = None
    noise_floor: float = 0.0
    objective: str = "throughput"
    blind: bool = False
    seeds: int = 4
    reference: tuple[float, float] | None = None
    timed: bool = False

    @property
    def bar(self) -> Bar:
        """What a policy has to gain to be worth runs."""
        return TIMED if self.timed else MODELLED


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one policy: its params, paired seed, divergence, step time and memory (None where unknown)."""

    params: Mapping[str, Any]
    seed: int
    divergence: float | None
    step_ms: float | None
    memory: float = 0.0


@dataclass(frozen=True)
class Points:
    """Assignments ``[N, G]`` with parameter features ``[N, K]`` and the squared errors of parameters ``[N]``."""

    index: npt.NDArray[np.int64]
    features: FloatTable
    base2: Vector

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Outlook:
    """What is expected of points ``[N]``.

    Attributes:
        cost: logarithm of what the objective minimises.
        upper: 95 % bound of the mean divergence over seeds.
        chance: probability that the mean divergence is within the budget, and the limits are kept.
        gain: what its further runs are expected to gain over the best policy that is surely acceptable, a fraction.
        runs: how many further runs these are, references of new paired seeds among them.
        worth: the gain less their price; it is not worth a run where that is not positive.
    """

    cost: Vector
    upper: Vector
    chance: Vector
    gain: Vector
    runs: Vector
    worth: Vector


class Expectation:
    """The models of a search, fitted to every run so far, and what they expect.

    Args:
        problem, prior: of the search.
        goals: what is wanted.
        presets: (name, params) of policies that people run today.
    """

    def __init__(
        self, problem: Problem, prior: Prior, goals: Goals, presets: Sequence[tuple[str, Mapping[str, Any]]] = ()
    ) -> None:
        self.problem, self.prior, self.goals = problem, prior, goals
        self._features = features_of(problem)
        self._sizes = np.array([prior.parameter_memory.get(f, 0.0) for f in self._features], dtype=np.float64)
        self.max_gradient2 = math.inf
        if goals.max_gradient is not None:
            self.max_gradient2 = (goals.max_gradient / _GRADIENT_MARGIN) ** 2
        self.best_cost: float | None = None
        self._presets = set(_keys(self.points([params for _, params in presets])))
        self.fit([])

    # --- points -----------------------------------------------------------------------------------------------------
    def points(self, many: Sequence[Mapping[str, Any]]) -> Points:
        """Return the points of params."""
        index = [self.problem.indices(params) for params in many]
        vectors = [self.vector(params) for params in many]
        base2 = np.array([self.prior.parameter_error2(params) for params in many], dtype=np.float64)
        shape = (len(many), len(self._features))
        found = np.array(index, dtype=np.int64).reshape(len(many), len(self.problem.groups))
        return Points(found, np.array(vectors, dtype=np.float64).reshape(shape), base2)

    def vector(self, params: Mapping[str, Any]) -> Vector:
        """Return the parameter features ``[K]`` of params."""
        return feature_vector(self.problem, self._features, params)

    def within_limits(self, points: Points) -> npt.NDArray[np.bool_]:
        """Return ``[N]``: whether the limits of gradient error and memory are kept, by the tables."""
        rows = np.arange(points.index.shape[1])
        kept = self.prior.error2[rows, points.index].sum(axis=1) + points.base2 <= self.max_gradient2 * (1 + 1e-9)
        if self.goals.max_memory is not None and self.prior.memory is not None:
            held = self.prior.memory[rows, points.index].sum(axis=1) + points.features @ self._sizes
            kept &= held <= self.goals.max_memory - self.prior.base_memory
        return np.asarray(kept)

    def limits(self, features: Vector, base2: float) -> list[Limit]:
        """Return the limits that an assignment must keep beside the divergence, under given parameters."""
        out = []
        if math.isfinite(self.max_gradient2 - base2):
            out.append(Limit(self.prior.error2, self.max_gradient2 - base2))
        if self.goals.max_memory is not None and self.prior.memory is not None:
            room = self.goals.max_memory - self.prior.base_memory - float(features @ self._sizes)
            out.append(Limit(self.prior.memory, room))
        return out

    # --- learning ---------------------------------------------------------------------------------------------------
    def fit(self, runs: Sequence[Measured]) -> None:
        """Refit the models to every run so far."""
        prior, runs = self.prior, list(runs)
        if len(runs) > _MOST_FITTED:
            runs = runs[:_FIRST_FITTED] + runs[_FIRST_FITTED - _MOST_FITTED :]
        effects = np.array([prior.parameter_time_ms.get(f, 0.0) for f in self._features], dtype=np.float64)
        self.divergence = divergence_model(self.problem, prior.error2)
        self.time = LinearModel(
            prior.time_ms, prior.base_time_ms, effects, noise=prior.time_noise, trust=prior.time_trust
        )
        held = prior.memory if prior.memory is not None else np.where(self.problem.allowed, 0.0, np.inf)
        base = prior.base_memory or max((run.memory for run in runs), default=0.0)
        self.memory = LinearModel(held, base, self._sizes, noise=1e-3, trust=0.1)
        self._failed = np.zeros(len(self.problem.choice_names) + len(self._features))
        self._seeds: dict[bytes, int] = {}
        self._references = 1
        if not runs:
            return
        points = self.points([run.params for run in runs])
        self._note_failures(points, np.array([run.step_ms is None for run in runs]))

        def seen(values: Sequence[float | None]) -> list[Observation]:
            rows = zip(points.index, points.features, points.base2, values, runs, strict=True)
            return [Observation(i, z, float(b), v, run.seed) for i, z, b, v, run in rows if v is not None]

        self._references = 1 + max(run.seed for run in runs)
        for key, run in zip(_keys(points), runs, strict=True):
            self._seeds[key] = max(self._seeds.get(key, 0), run.seed + 1)
        self.divergence.fit(seen([run.divergence for run in runs]))
        self.time.fit(seen([run.step_ms for run in runs]))
        self.memory.fit(seen([run.memory or None for run in runs]))

    def _used(self, points: Points) -> npt.NDArray[np.bool_]:
        """Return ``[N, C + K]``: which choices and parameter values points use."""
        columns = np.arange(len(self.problem.choice_names))
        choices = (points.index[:, :, None] == columns).any(axis=1)
        return np.concatenate([choices, points.features > 0], axis=1)

    def _note_failures(self, points: Points, failed: npt.NDArray[np.bool_]) -> None:
        """Count, per choice and parameter value that never ran to its end, the runs that failed with it."""
        used = self._used(points)
        worked = used[~failed].any(axis=0)
        self._failed = np.where(worked, 0.0, used[failed].sum(axis=0))

    # --- expecting --------------------------------------------------------------------------------------------------
    def cost_table(self) -> tuple[FloatTable, Vector]:
        """Return what the objective minimises per group and choice ``[G, C]`` and feature ``[K]``, to first order."""
        (time, _, effects), (held, _, held_effects) = self.time.mean(), self.memory.mean()
        duration, size = self.time.scale, max(self.memory.scale, 1e-12)
        if self.goals.objective == "throughput":
            return time / duration, effects / duration
        weight = _TIE_BREAK if self.goals.objective == "memory" else 1.0
        return held / size + weight * time / duration, held_effects / size + weight * effects / duration

    @property
    def limit(self) -> float:
        """The divergence that a mean over seeds must surely keep to: what the decision will hold it to."""
        return self.goals.max_divergence

    def outlook(self, points: Points) -> Outlook:
        """Return what is expected of points."""
        cost, cost_sd = self._cost(points)
        log_gap, sd = self.divergence.predict(points.index, points.features, points.base2)
        sd = np.maximum(sd, 1e-6)
        possible = self.within_limits(points) * _AFTER_FAILURE ** (self._used(points) * self._failed).max(axis=1)
        upper = np.exp(np.minimum(log_gap + _Z95 * sd, 60.0))
        within = np.ones(len(points)) if self.goals.blind else _normal((math.log(self.limit) - log_gap) / sd)
        preset = np.array([key in self._presets for key in _keys(points)], dtype=bool)
        bar = self.goals.bar
        ahead = self._to_beat() - cost - np.where(preset, bar.preset_tie, bar.tie)
        sure = np.maximum(cost_sd, 1e-9)
        z = ahead / sure
        gain = possible * np.maximum(sure * (z * _normal(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)), 0.0)
        accepted, runs = self._plan(points, log_gap, sd, gain)
        expected, least = gain * accepted, np.where(preset, bar.preset_tie, bar.least)
        worth = np.where(expected > least, expected - bar.price * runs, np.minimum(expected - least, 0.0))
        return Outlook(cost, upper, possible * within, expected, runs, worth)

    def _plan(self, points: Points, log_gap: Vector, sd: Vector, gain: Vector) -> tuple[Vector, Vector]:
        """Return, for the number of further seeds that is worth most, the chance to be accepted then, and its runs.

        After n more seeds the mean's standard deviation is ``left``, and the mean itself lies ``moved`` off at random.
        """
        had = np.array([self._seeds.get(key, 0) for key in _keys(points)])
        if self.goals.blind:
            return np.ones(len(points)), np.maximum(2.0 * (self.goals.seeds - had), 1.0)
        most = np.maximum(MOST_SEEDS - had, 1)
        chances, runs, best = np.zeros(len(points)), np.ones(len(points)), np.full(len(points), -math.inf)
        for more in _MORE_SEEDS:
            fresh = np.clip(had + more - self._references, 0.0, more)
            told = fresh + _REUSED * (more - fresh)
            left = 1.0 / np.sqrt(1.0 / sd**2 + told / self.divergence.spread**2)
            moved = np.sqrt(np.maximum(sd**2 - left**2, 1e-12))
            chance = _normal((math.log(self.limit) - _Z95 * left - log_gap) / moved)
            net = gain * chance - self.goals.bar.price * (more + fresh)
            better = (net > best) & (had + more >= FEWEST_SEEDS) & (more <= most)
            chances, runs, best = (
                np.where(better, *pair) for pair in ((chance, chances), (more + fresh, runs), (net, best))
            )
        return chances, runs

    def _to_beat(self) -> float:
        """Return the cost of the best policy that is surely acceptable; the script's where none is."""
        if self.best_cost is not None:
            return self.best_cost
        if self.goals.reference is not None:
            return self.cost_of(*self.goals.reference)
        return float(self._cost(self.points([self.problem.params_of(self.problem.baseline)]))[0][0])

    def cost_of(self, step_ms: float, memory: float) -> float:
        """Return the logarithm of what the objective minimises, of a measured step time and memory."""
        if self.goals.objective == "throughput":
            return math.log(step_ms)
        share = _TIE_BREAK if self.goals.objective == "memory" else 0.5
        return (1 - share) * math.log(max(memory, 1.0)) + share * math.log(step_ms)

    def _cost(self, points: Points) -> tuple[Vector, Vector]:
        time, sd = self.time.predict(points.index, points.features)
        time = np.maximum(time, 1e-3 * self.time.scale)
        if self.goals.objective == "throughput":
            return np.log(time), sd / time
        held, held_sd = self.memory.predict(points.index, points.features)
        held = np.maximum(held, 1.0)
        share = _TIE_BREAK if self.goals.objective == "memory" else 0.5
        spread = np.hypot((1 - share) * held_sd / held, share * sd / time)
        return (1 - share) * np.log(held) + share * np.log(time), spread

    def places(self, points: Points) -> FloatTable:
        """Return (step time as a share of the largest, ln divergence) ``[N, 2]``, to measure hypervolume by."""
        time, _ = self.time.predict(points.index, points.features)
        log_gap, _ = self.divergence.predict(points.index, points.features, points.base2)
        return np.stack([time / self.time.scale, log_gap], axis=1)


def _keys(points: Points) -> list[bytes]:
    """Return what tells points apart."""
    return [i.tobytes() + z.tobytes() for i, z in zip(points.index, points.features, strict=True)]


def _normal(x: Vector) -> Vector:
    """Return the standard normal distribution function."""
    return np.asarray(0.5 * (1.0 + np.vectorize(math.erf)(np.clip(x, -30, 30) / math.sqrt(2))), dtype=np.float64)
