"""What further runs of a policy may be expected to gain: what is asked next, and when it is enough.

A policy can be adopted once the 95 % bound of its mean divergence is within the budget. How likely that is after n more
paired seeds follows from the model: its mean will then have moved by a known spread, and its uncertainty have shrunk by
a known factor. That probability, times how much better the policy is than the best one that is surely acceptable, less
the price of the runs it takes, is the *value of information* of the policy, for the best n. It is the one number that
everything is asked by: a new policy (a trial), one more paired seed for a policy that was tried, or nothing, where no
further run of any policy pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoprec.policy.solver import FloatTable, Limit
from autoprec.support.arrays import np, npt
from autoprec.tuning.decide.problem import PRODUCTS, UPDATE, WAYS, Params, Problem
from autoprec.tuning.decide.sampler.posterior import LinearModel, Points
from autoprec.tuning.decide.sampler.prior import Prior, divergence_model, features_of, points_of
from autoprec.tuning.decide.table import families
from autoprec.tuning.study.run import Run

Vector = npt.NDArray[np.float64]


class StoppingThreshold(NamedTuple):
    """What a policy has to gain for another run of it to pay, all fractions of the step time."""

    #: Of one run. It is some 40 steps of the training that is to be sped up: 0.0005 has paid for it after 80,000.
    price: float
    #: A policy that is faster by less is tied, and is not run.
    tie: float
    #: What is expected to be gained beyond the tie, chances included, has to be more than this.
    least: float
    #: Both of these for presets. They are what people would run anyway: one that is as good has to be known.
    preset_tie: float
    #: From so many runs on each costs in proportion to their number: what is expected has then often failed to come.
    patience: float


#: Where times are modelled, and so are exact.
MODELLED = StoppingThreshold(0.00005, 0.005, 0.002, 0.0005, math.inf)
#: Where they are measured a percent is lost in their noise, and what ten runs have not brought is in doubt.
TIMED = StoppingThreshold(0.0005, 0.01, 0.005, 0.01, 10.0)
#: Standard deviations from the mean to its 95 % bound. For one look 1.645 would do; a search looks after every run and
#: takes the first policy that passes, so that 7 % of them were beyond the budget then, 3 % with two, and 1 % so.
_Z95 = 2.3
#: What two steps have to be apart to be told apart, relative: timed; and modelled, where the model is right within 10 %
#: of a step, and what two policies have in common is as wrong for both.
TIMES_SD, MODEL_RESOLUTION = 0.01, 0.005
#: How far ln(divergence) may be from what is predicted, beyond what the model allows for, of a policy whose error is
#: all by choices that no run of such layers has shown (0.46 over 1,500 policies of the recorded cases).
_UNSHOWN = 0.45
#: A policy that was measured under one seed only is accepted under none; and under so many it is measured at most.
FEWEST_SEEDS, MOST_SEEDS = 2, 24
#: Predicted gradient errors are right within a few percent: a policy at the very limit would be refused half the time.
_GRADIENT_MARGIN = 1.03
#: Tag of a trial that was not expected to gain, and might: what is run last of all before a search ends.
EXPLORATORY = "exploratory"
#: The value that stands for: above nothing, below all that is expected to pay.
LAST_VALUE = 1e-9
#: What it has to gain if the tables are wrong, times the chance of that, for a first run; and, times its chance after
#: it, for each further one up to so many, as the first hardly moves what is predicted. A search runs so many of them.
_LEAST_HOPE, _LEAST_EXPLORED, _EXPLORATORY_SEEDS, _MOST_EXPLORATORY = 0.001, 0.01, 8, 3
#: Numbers of further seeds that are considered for a policy.
_MORE_SEEDS = (1, 2, 3, 4, 6, 8, 12, 16)
#: What a run under a seed that others ran under says, against one under a new seed: they share part of the seed noise.
_REUSED = 0.5
#: What is left of the chance of a policy with a choice that never ran to its end, after none, one and more failures.
_AFTER_FAILURES = np.array([1.0, 0.2, 0.0])
#: Budgets (and a fraction, at least) beyond which divergences are not told apart: such a run, and one without a finite
#: loss, says that a policy is far off, and nothing of the seed noise of the others.
_FAR_OFF, _LEAST_FAR_OFF = 8.0, 0.02
#: The share of memory, against time, in the logarithm of what an objective minimises; the rest breaks ties.
_MEMORY_SHARE = {"throughput": 0.0, "balanced": 0.5, "memory": 0.999}
#: No duel is taken to know a step time better than this, relative.
_SUREST = 1e-3
#: How far the modelled effect of a parameter may be off, in parts of a step: of those that change operators outside the
#: layers. (`dlrm` under INT8 is 11 % faster without autocast than with it.)
_OPERATOR_TIME_SD = {"activations": 0.05, "norm": 0.02, "softmax": 0.02, "attention": 0.02}
_OPERATOR_TIME_SD |= dict.fromkeys((UPDATE, PRODUCTS, *WAYS), 0.05)


@dataclass(frozen=True, slots=True)
class Goals:
    """What makes a policy acceptable, and better than another.

    Attributes:
        max_divergence: the budget that a mean over seeds must surely keep to, a fraction.
        max_gradient: largest relative gradient error, absolute; None for no limit.
        max_memory: bytes; None for no limit.
        objective: ``throughput``, ``memory`` or ``balanced``.
        uninformative: the loss cannot judge, so only the limits do.
        seeds: paired seeds that a policy is then measured under.
        reference: (milliseconds, bytes) of the script as written, which the first gain is given over.
        reference_runs: runs that its time is the mean of.
        timed: step times are measured.
    """

    max_divergence: float = 0.0025
    max_gradient: float | None = None
    max_memory: float | None = None
    objective: str = "throughput"
    uninformative: bool = False
    seeds: int = 4
    reference: tuple[float, float] | None = None
    reference_runs: int = 1
    timed: bool = False

    @property
    def stop(self) -> StoppingThreshold:
        """What a policy has to gain for another run of it to pay."""
        return TIMED if self.timed else MODELLED

    @property
    def resolution(self) -> float:
        """What two times have to be apart to be told apart, relative."""
        return TIMES_SD if self.timed else MODEL_RESOLUTION

    def cost(self, step_ms: npt.ArrayLike, memory: npt.ArrayLike) -> Vector:
        """Return the logarithm of what the objective minimises, of step times and bytes."""
        share = _MEMORY_SHARE[self.objective]
        return np.asarray((1 - share) * np.log(step_ms) + share * np.log(np.maximum(memory, 1.0)))


@dataclass(frozen=True)
class Outlook:
    """What is expected of points ``[N]``.

    Attributes:
        cost: logarithm of what the objective minimises.
        upper: 95 % bound of the mean divergence over seeds.
        chance: probability that the mean divergence is within the budget, and the limits are kept.
        gain: what its further runs are expected to gain over the best policy that is surely acceptable, a fraction.
        value: value of information, the gain less the price of these runs; no run pays where that is not positive.
    """

    cost: Vector
    upper: Vector
    chance: Vector
    gain: Vector
    value: Vector


class Expectation:
    """The models of a search, fitted to every run so far, and what they expect.

    Args:
        presets: (name, params) of policies that people run today.

    Attributes:
        best_cost: cost of the best policy that is surely acceptable; None where that is the script.
    """

    def __init__(
        self, problem: Problem, prior: Prior, goals: Goals, presets: Sequence[tuple[str, Params]] = ()
    ) -> None:
        self.problem, self.goals = problem, goals
        self._start_from(prior)
        self._most_memory = goals.max_memory
        self.best_cost: float | None = None
        self._baseline = problem.params_of(problem.baseline)
        self._has_script = problem.is_script(self._baseline)  # else no point of the space is the script as written
        self._presets = set(_keys(self.points([params for _, params in presets])))
        self._kinds = families(problem)
        self.fit([])

    def _start_from(self, prior: Prior) -> None:
        self.prior, features = prior, features_of(self.problem)
        self._effects, self._sizes = (
            np.array([known.get(feature, 0.0) for feature in features], dtype=np.float64)
            for known in (prior.parameter_time_ms, prior.parameter_memory)
        )

    def points(self, many: Sequence[Params]) -> Points:
        """Return params as points that the models are fitted to and asked about."""
        return points_of(self.problem, many, self.prior.parameter_error2)

    def limits(self, features: Vector, base2: float) -> list[Limit]:
        """Return the limits that an assignment must keep beside the divergence, under given parameters."""
        prior, goals, out = self.prior, self.goals, []
        if goals.max_gradient is not None:
            rest = (goals.max_gradient / _GRADIENT_MARGIN) ** 2 - base2
            out.append(Limit(prior.error2, max(rest, -1.0)))  # minus infinity where a parameter's probe failed
        if self._most_memory is not None and prior.memory is not None:
            room = self._most_memory - prior.base_memory - float(features @ self._sizes)
            out.append(Limit(prior.memory, room))
        return out

    def within_limits(self, points: Points) -> npt.NDArray[np.bool_]:
        """Return ``[N]``: whether the limits of gradient error and memory are kept, by the tables."""
        rows = np.arange(points.index.shape[1])
        kept = [
            all(limit.cost[rows, index].sum() <= limit.bound + 1e-9 * abs(limit.bound) for limit in self.limits(z, b))
            for index, z, b in zip(points.index, points.features, points.base2, strict=True)
        ]
        return np.array(kept, dtype=bool)

    # --- learning ---------------------------------------------------------------------------------------------------
    def _learn_memory(self, runs: Sequence[Run]) -> None:
        """Take in what ran out of memory: policies that are modelled to need no less are not tried.

        A run that ended well although more is modelled of it says that the model is wrong of the one that did not, and
        that one sets no limit.
        """
        failed = [run.params for run in runs if run.status == "oom"]
        if failed and self.prior.memory is None and self.prior.with_memory is not None:
            self._start_from(self.prior.with_memory())
        if not failed or (table := self.prior.memory) is None:
            return

        def modelled(many: Sequence[Params]) -> list[float]:
            at = self.points(many)
            held = table[np.arange(at.index.shape[1]), at.index].sum(axis=1) + at.features @ self._sizes
            return [float(size) + self.prior.base_memory for size in held]

        ran = max(modelled([self.problem.params_of(self.problem.baseline), *(run.params for run in runs if run.ok)]))
        above = [size * (1.0 - 1e-6) for size in modelled(failed) if size > ran]
        limits = [self.goals.max_memory] if self.goals.max_memory is not None else []
        self._most_memory = min(limits + above, default=None)

    def fit(self, runs: Sequence[Run]) -> None:
        """Refit the models to all runs of the search, failed ones included."""
        self._learn_memory(runs)
        prior = self.prior
        self.divergence = divergence_model(self.problem, prior.error2)
        self.time = LinearModel(
            prior.time_ms,
            prior.base_time_ms,
            self._effects,
            noise=prior.time_noise,
            trust=prior.time_trust,
            kinds=self._kinds if self.goals.timed else (),
            effect_sd=np.array(
                [_OPERATOR_TIME_SD.get(name, 0.0) * self.goals.timed for name, _ in features_of(self.problem)]
            ),
        )
        held = prior.memory if prior.memory is not None else np.where(self.problem.allowed, 0.0, np.inf)
        base = prior.base_memory or max((run.get("memory_bytes") or 0.0 for run in runs), default=0.0)
        self.memory = LinearModel(held, base, self._sizes, noise={1e-3: 1.0}, trust=0.1)
        points = self.points([run.params for run in runs])
        keys = _keys(points)
        most = self.goals.max_divergence
        known = [
            (run.seed, bounded_divergence(run, most), run.get("step_time_ms"), run.get("memory_bytes") or None)
            for run in runs
        ]
        paired, gaps, times, sizes = np.array(known, dtype=np.float64).reshape(-1, 4).T  # NaN where nothing is known
        self._price = self.goals.stop.price * max(1.0, len(runs) / self.goals.stop.patience)
        seeds = paired.astype(np.int64)
        self.divergence.fit(points, gaps, seeds)
        self._fit_times(points, times, runs, keys)
        self.memory.fit(points, sizes)
        self._references = 1 + int(seeds.max(initial=0))
        self._seeds = dict(sorted(zip(keys, (seeds + 1).tolist(), strict=True), key=lambda had: had[1]))
        self._exploratory = {key for run, key in zip(runs, keys, strict=True) if EXPLORATORY in run.tags}
        # per choice and parameter value that never ran to its end: the runs that failed with it
        used, failed = self._used(points), np.isnan(times)
        self._failed = np.where(used[~failed].any(axis=0), 0, used[failed].sum(axis=0))
        self._shown = np.zeros(self.problem.allowed.shape, dtype=bool)  # choices that a run of such layers has shown
        self._shown[np.arange(points.index.shape[1]), points.index[np.isfinite(gaps) & ~failed]] = True
        for kind in self._kinds:
            self._shown[kind] = self._shown[kind].any(axis=0)

    def _fit_times(self, points: Points, times: Vector, runs: Sequence[Run], keys: Sequence[bytes]) -> None:
        """Refit step times; where they are timed the script's own is one of them, as noisy as the others."""
        goals = self.goals
        known = _known_noise(runs, keys) if goals.timed else None
        if known is None or goals.reference is None or not self._has_script:
            self.time.fit(points, times, known)
            return
        with_script = self.points([self._baseline, *(run.params for run in runs)])
        step_ms = np.array([goals.reference[0], *times])
        self.time.fit(with_script, step_ms, np.array([math.nan, *known]), goals.reference_runs)

    def _used(self, points: Points) -> npt.NDArray[np.bool_]:
        """Return ``[N, C + K]``: which choices and parameter values points use."""
        columns = np.arange(len(self.problem.choice_names))
        choices = (points.index[:, :, None] == columns).any(axis=1)
        return np.concatenate([choices, points.features > 0], axis=1)

    # --- expecting --------------------------------------------------------------------------------------------------
    def cost_table(self, rng: np.random.Generator | None = None) -> tuple[FloatTable, Vector]:
        """Return what the objective minimises per group and choice ``[G, C]`` and feature ``[K]``, to first order.

        Args:
            rng: step times are drawn from what they may turn out to be, where they are measured.
        """
        share = _MEMORY_SHARE[self.goals.objective]
        times = self.time.drawn(rng) if rng is not None and self.goals.timed else self.time.mean()
        (time, _, effects), (held, _, held_effects) = times, self.memory.mean()
        duration, size = (1 - share) / self.time.scale, share / self.memory.scale
        table = time * duration + (held * size if share else 0.0)
        return table, effects * duration + held_effects * size

    def outlook(self, points: Points) -> Outlook:
        """Return what is expected of each point: cost, bound of the divergence, and what a run of it is worth."""
        goals, stop = self.goals, self.goals.stop
        cost, cost_sd = self._cost(points)
        log_gap, sd = self.divergence.predict(points)
        possible = self._possible(points)
        upper = np.exp(np.minimum(log_gap + _Z95 * sd, 60.0))
        within = (
            np.ones(len(points)) if goals.uninformative else _normal((math.log(goals.max_divergence) - log_gap) / sd)
        )
        preset = np.array([key in self._presets for key in _keys(points)], dtype=bool)
        ahead = (self.to_beat() - cost - np.where(preset, stop.preset_tie, stop.tie)) / cost_sd
        least = np.where(preset, stop.preset_tie, stop.least)
        # the expectation of what a normally distributed gain is above zero
        gain = (
            possible * cost_sd * np.maximum(ahead * _normal(ahead) + np.exp(-0.5 * ahead**2) / math.sqrt(math.tau), 0)
        )
        accepted, runs = self._plan(points, log_gap, sd, gain)
        gain = gain * accepted
        value = np.where(gain > least, gain - self._price * runs, np.minimum(gain - least, 0.0))
        explored = np.array(
            [key in self._exploratory and self._seeds[key] < _EXPLORATORY_SEEDS for key in _keys(points)], dtype=bool
        )
        hoped = explored & (np.expm1(self.to_beat() - cost) * within > _LEAST_EXPLORED)
        value = np.where(hoped, np.maximum(value, LAST_VALUE), value)
        return Outlook(cost, upper, possible * within, gain, value)

    @property
    def may_explore(self) -> bool:
        """Whether another policy is run that is not expected to gain."""
        return len(self._exploratory) < _MOST_EXPLORATORY

    def optimistic(self, points: Points) -> Vector:
        """Return what points ``[N]`` may gain where the tables are as wrong as they can be of what no run has shown.

        That is the gain by the bound of their time, times the chance to be within the budget; 0 where that is too
        little, or even the bound of their divergence is beyond it.
        """
        cost, cost_sd = self._cost(points)
        log_gap, sd = self.divergence.predict(points)
        rows = np.arange(points.index.shape[1])
        unshown = (self.divergence.shares(points)[0] * ~self._shown[rows, points.index]).sum(axis=1)
        room = (math.log(self.goals.max_divergence) - log_gap) / np.hypot(sd, _UNSHOWN * unshown)
        if self.goals.uninformative:
            room = np.full(len(points), np.inf)
        gain = np.expm1(self.to_beat() - cost + (_Z95 * cost_sd if self.goals.timed else 0.0))
        hoped = gain * _normal(room) * self._possible(points)
        return np.asarray(np.where((hoped > _LEAST_HOPE) & (room > -_Z95), hoped, 0.0))

    def drawn_gains(self, points: Points, rng: np.random.Generator) -> Vector:
        """Return what points ``[N]`` gain over the best one if accepted, drawn from what times may turn out to be."""
        cost, sd = self._cost(points)
        noise = np.hypot(sd, self.goals.resolution)
        return np.asarray(np.expm1(self.to_beat() - cost + noise * rng.standard_normal(len(points))))

    def _possible(self, points: Points) -> Vector:
        """Return the chance ``[N]`` that points keep the other limits, and run to their end at all."""
        failed = (self._used(points) * self._failed).max(axis=1)
        return np.asarray(self.within_limits(points) * _AFTER_FAILURES[np.minimum(failed, 2)])

    def _plan(self, points: Points, log_gap: Vector, sd: Vector, gain: Vector) -> tuple[Vector, Vector]:
        """Return, for the number of further seeds of most value, the chance to be accepted then, and its runs.

        After n more seeds the mean's standard deviation is ``left``, and the mean itself lies ``moved`` off at random.
        """
        had = np.array([self._seeds.get(key, 0) for key in _keys(points)], dtype=np.int64)
        if self.goals.uninformative:
            return np.ones(len(points)), np.maximum(2.0 * (self.goals.seeds - had), 1.0)
        more = np.array(_MORE_SEEDS)[:, None]
        fresh = np.clip(had + more - self._references, 0, more)  # the references of seeds that are new are runs as well
        runs, informative = more + fresh, fresh + _REUSED * (more - fresh)
        left = 1.0 / np.sqrt(1.0 / sd**2 + informative / self.divergence.spread**2)
        moved = np.sqrt(sd**2 - left**2)
        chance = _normal((math.log(self.goals.max_divergence) - _Z95 * left - log_gap) / moved)
        possible = (had + more >= FEWEST_SEEDS) & (more <= np.maximum(MOST_SEEDS - had, 1))
        best = np.where(possible, gain * chance - self._price * runs, -np.inf).argmax(axis=0)
        each = np.arange(len(points))
        return chance[best, each], runs[best, each].astype(np.float64)

    def to_beat(self) -> float:
        """Return the cost of the best policy that is surely acceptable; the script's where none is."""
        if self.best_cost is not None:
            return self.best_cost
        if self.goals.reference is not None and not (self.goals.timed and self._has_script):
            return float(self.goals.cost(*self.goals.reference))
        return float(self._cost(self.points([self._baseline]))[0][0])

    def _cost(self, points: Points) -> tuple[Vector, Vector]:
        """Return mean and standard deviation ``[N]`` of the cost of points."""
        share = _MEMORY_SHARE[self.goals.objective]
        (time, time_sd), (held, held_sd) = self.time.predict(points), self.memory.predict(points)
        time, held = np.maximum(time, 1e-3 * self.time.scale), np.maximum(held, 1.0)
        sd = np.hypot((1 - share) * time_sd / time, share * held_sd / held)
        return self.goals.cost(time, held), np.maximum(sd, 1e-9)


def bounded_divergence(run: Run, max_divergence: float) -> float | None:
    """Return the divergence that a model may learn from; a diverged run counts as far beyond the budget."""
    gap = run.get("divergence")
    if gap is None and run.status == "diverged":
        gap = math.inf
    far = max(_FAR_OFF * max_divergence, _LEAST_FAR_OFF)
    return min(gap, far) if gap is not None and not math.isnan(gap) else None


def _known_noise(runs: Sequence[Run], keys: Sequence[bytes]) -> Vector:
    """Return the standard deviation (ms) of each step time that has an interval, as those of duels; NaN elsewhere.

    All runs of a policy have the time of its duel: together they tell as much as that once.
    """

    def known(run: Run, key: bytes) -> float:
        time = run.metrics.get("step_time_ms")
        if time is None or time.low is None or time.high is None:
            return math.nan
        return max((time.high - time.low) / 4.0, _SUREST * time.value) * math.sqrt(keys.count(key))

    return np.array([known(run, key) for run, key in zip(runs, keys, strict=True)], dtype=np.float64)


def _keys(points: Points) -> list[bytes]:
    return [i.tobytes() + z.tobytes() for i, z in zip(points.index, points.features, strict=True)]


def _normal(x: Vector) -> Vector:
    return np.asarray(0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))))
