"""What the trials have taught: Bayesian models of divergence and of time (or memory) per group and choice.

Both start from the tables (sensitivity scan, cost model) as prior means and are refitted to every finished trial.
They are linear-Gaussian in their parameters (divergence after linearisation, by Gauss-Newton), and solved in the dual,
so the cost is set by the number of trials (tens) and not of table entries (thousands).

Divergence follows the gradient error: ``D**2 = floor**2 + exp(c + q.z) * S**a`` with
``S = base + sum_g error2[g, i_g] * exp(h_family + u_g + w_choice + v_gc)``. Over 27 mixed assignments of a small GPT
the logarithms of D and of the predicted gradient error correlate at 0.95, hence prior ``a ~ 1``; what the one-pass
error misses is learned per family, choice, group and entry, in that order of prior width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoprec.tuning.decide.problem import FloatTable, IntVector

__all__ = ["DivergenceLaw", "DivergenceModel", "LinearModel", "Observation"]

Vector = npt.NDArray[np.float64]

#: Prior standard deviations, in units of ln(D**2) or of ln(error2). The last four say how far a complete scan is off
#: (a small GPT and a small ViT, benchmarks/search_quality.py); they are stretched where the trials say it is worse.
_SD = {"scale": 3.0, "power": 0.15, "parameter": 0.5, "choice": 0.3, "family": 0.5, "group": 0.25, "entry": 0.15}
#: Stretches and standard deviations of one measured ln(D) that the evidence chooses from, and what a doubling of the
#: stretch must gain in log evidence to be accepted.
_STRETCHES, _RESIDUALS, _DOUBLING = (1.0, 2.0, 4.0), (0.05, 0.1, 0.17, 0.25, 0.35, 0.5), 1.0
#: Gauss-Newton steps of a fit at most, and how many of them come before noise and stretch are chosen.
_STEPS, _ROUGH_STEPS = 6, 2
#: Divergence below which nothing is distinguished (1e-7 relative is float32 rounding of the loss).
_TINY = 1e-8


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished trial: columns ``[G]``, parameter features ``[K]``, squared error of parameters, and the outcome."""

    index: IntVector
    features: Vector
    base2: float
    value: float


@dataclass(frozen=True)
class DivergenceLaw:
    """How divergence follows from an assignment: a table of squared errors, and what their sum comes to."""

    error2: FloatTable
    scale: float
    power: float
    parameter: Vector
    unit: float
    floor: float

    def divergence(self, index: IntVector, features: Vector, base2: float) -> float:
        """Return the divergence of an assignment by this law."""
        total = base2 + float(self.error2[np.arange(len(index)), index].sum())
        log = self.scale + float(self.parameter @ features) + self.power * math.log(max(total, 1e-30) / self.unit)
        return math.sqrt(self.floor**2 + math.exp(min(log, 60.0)))

    def divergences(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> Vector:
        """Return the divergence ``[N]`` of many assignments ``[N, G]`` with features ``[N, K]`` by this law."""
        total = base2 + self.error2[np.arange(index.shape[1]), index].sum(axis=1)
        log = self.scale + features @ self.parameter + self.power * np.log(np.maximum(total, 1e-30) / self.unit)
        return np.asarray(np.sqrt(self.floor**2 + np.exp(np.minimum(log, 60.0))))

    def budget(self, divergence: float, features: Vector, base2: float) -> float:
        """Return the sum of squared errors (parameters' share taken off) that comes to this divergence."""
        excess = divergence**2 - self.floor**2
        if excess <= 0:
            return 0.0
        log = (math.log(excess) - self.scale - float(self.parameter @ features)) / self.power
        return max(0.0, self.unit * math.exp(min(log, 60.0)) - base2)


class DivergenceModel:
    """Posterior of the divergence model; see the module's docstring.

    Args:
        error2: ``[G, C]`` prior squared errors; infinite where not offered.
        families: family number of each group ``[G]``.
        features: number of parameter features K.
        floor: noise floor of the divergence (a fraction).
        shared: share of what the trials say about single table entries that other seeds would say too; multiplied by
            the stretch, 1 at most.

    Attributes:
        residual: standard deviation of one measured ln(divergence) around the model, learned from the trials.
        stretch: how much further off than usual the table is, likewise.
    """

    def __init__(
        self, error2: FloatTable, families: Sequence[int], features: int, floor: float = 0.0, shared: float = 1.0
    ) -> None:
        self._allowed = np.isfinite(error2)
        positive = error2[self._allowed & (error2 > 0)]
        low = float(positive.min()) * 1e-3 if len(positive) else 1e-12
        # an entry the scan saw as exactly zero stays negligible but may still turn out to matter, except `keep`
        self._error2 = np.where(self._allowed & (error2 > 0), error2, 0.0)
        self._unit = max(float(np.where(self._allowed, error2, 0.0).max(axis=1).sum()), low)
        self._groups, self._choices = error2.shape
        self._families = np.asarray(families, dtype=np.int64)
        self._features, self._shared = features, shared
        self._floor = max(floor, 0.0)
        self._base_sd = self._sd = self._prior_sd()
        self._mean = np.zeros(len(self._sd))
        self._jacobian = np.zeros((0, len(self._sd)))
        self._noise = np.zeros(0)
        self._solve: npt.NDArray[np.float64] = np.zeros((0, 0))
        self.residual, self.stretch = 0.3, 1.0

    def _prior_sd(self) -> Vector:
        f, g, c = int(self._families.max()) + 1, self._groups, self._choices
        parts = [np.array([_SD["scale"], _SD["power"]]), np.full(self._features, _SD["parameter"])]
        parts += [np.full(c, _SD["choice"]), np.full(f, _SD["family"]), np.full(g, _SD["group"])]
        parts.append(np.full(g * c, _SD["entry"]))
        return np.concatenate(parts)

    def _unpack(self, theta: Vector) -> DivergenceLaw:
        k, c, f, g = self._features, self._choices, int(self._families.max()) + 1, self._groups
        parameter, rest = theta[2 : 2 + k], theta[2 + k :]
        choice, family, group, entry = rest[:c], rest[c : c + f], rest[c + f : c + f + g], rest[c + f + g :]
        shift = choice[None, :] + family[self._families][:, None] + group[:, None] + entry.reshape(g, c)
        table = self._error2 * np.exp(np.clip(shift, -12.0, 12.0))
        # scale is centred on D = 2 % at the largest squared error of the table
        return DivergenceLaw(
            np.where(self._allowed, table, np.inf),
            2 * math.log(0.02) + float(theta[0]),
            max(0.3, 1.0 + float(theta[1])),
            parameter,
            self._unit,
            self._floor,
        )

    def fit(self, observations: Sequence[Observation]) -> None:
        """Refit to all finished trials, from the last fit."""
        if not observations:
            return
        target = np.array([2 * math.log(max(o.value, _TINY)) for o in observations])
        theta: Vector = self._mean.copy()
        for turn in range(_STEPS):
            predicted, jacobian = self._linearise(theta, observations)
            if turn == _ROUGH_STEPS:
                self._calibrate(target - predicted, jacobian, theta)
            scaled = jacobian * self._sd**2
            gram = scaled @ jacobian.T
            gram[np.diag_indices(len(target))] += (2 * self.residual) ** 2
            inner = np.linalg.solve(gram, target - predicted + jacobian @ theta)
            step = scaled.T @ inner - theta
            largest = float(np.max(np.abs(step) / self._sd)) if len(step) else 0.0
            theta += step * min(1.0, 3.0 / max(largest, 1e-9))
            if largest < 1e-2 and turn >= _ROUGH_STEPS:
                break
        predicted, jacobian = self._linearise(theta, observations)
        self._mean, self._jacobian = theta, jacobian
        self._noise = np.full(len(target), (2 * self.residual) ** 2)
        gram = (jacobian * self._sd**2) @ jacobian.T + np.diag(self._noise)
        self._solve = np.asarray(np.linalg.inv(gram), dtype=np.float64)

    def _calibrate(self, missed: Vector, jacobian: npt.NDArray[np.float64], theta: Vector) -> None:
        """Choose how noisy one trial is and how far the table may be off: the pair of largest evidence.

        The evidence is that of the linearised model, ``target ~ N(0, J S J' + noise)``; a stretch multiplies the
        standard deviations of everything that corrects the table.
        """
        # points at the floor say nothing, and one diverged trial nothing about the others
        telling = jacobian[:, 0] > 0.5
        if telling.sum() < 6:
            return
        jacobian = jacobian[telling]
        target = np.clip(missed, -2.0, 2.0)[telling] + jacobian @ theta
        k = 2 + self._features
        common = (jacobian[:, :k] * self._base_sd[:k] ** 2) @ jacobian[:, :k].T
        table = (jacobian[:, k:] * self._base_sd[k:] ** 2) @ jacobian[:, k:].T
        best = (-np.inf, 1.0, self.residual)
        for stretch in _STRETCHES:
            values, vectors = np.linalg.eigh(common + stretch**2 * table)
            along = (vectors.T @ target) ** 2
            for residual in _RESIDUALS:
                spread = np.maximum(values, 0.0) + (2 * residual) ** 2
                evidence = -0.5 * float((along / spread).sum() + np.log(spread).sum()) - _DOUBLING * math.log2(stretch)
                best = max(best, (evidence, stretch, residual))
        _, self.stretch, self.residual = best
        self._sd = self._base_sd.copy()
        self._sd[k:] *= self.stretch

    def _linearise(self, theta: Vector, observations: Sequence[Observation]) -> tuple[Vector, npt.NDArray[np.float64]]:
        law = self._unpack(theta)
        k, c, f, g = self._features, self._choices, int(self._families.max()) + 1, self._groups
        index = np.stack([o.index for o in observations])
        z = np.stack([o.features for o in observations]).reshape(len(observations), k)
        base2 = np.array([o.base2 for o in observations])
        rows = np.arange(g)
        share = np.where(np.isfinite(law.error2), law.error2, 0.0)[rows, index]
        total = np.maximum(share.sum(axis=1) + base2, 1e-300)
        level = np.log(total / self._unit)
        signal = np.exp(np.minimum(law.scale + z @ law.parameter + law.power * level, 60.0))
        predicted = np.log(self._floor**2 + signal + _TINY**2)
        weight = signal / (self._floor**2 + signal + _TINY**2)
        part = share / total[:, None] * (law.power * weight)[:, None]
        jacobian = np.zeros((len(observations), len(theta)))
        jacobian[:, 0] = weight
        jacobian[:, 1] = weight * level
        jacobian[:, 2 : 2 + k] = weight[:, None] * z
        lines = np.arange(len(observations))
        for choice in range(c):
            jacobian[:, 2 + k + choice] = np.where(index == choice, part, 0.0).sum(axis=1)
        jacobian[:, 2 + k + c : 2 + k + c + f] = part @ (self._families[:, None] == np.arange(f))
        offset = 2 + k + c + f
        jacobian[:, offset : offset + g] = part
        jacobian[lines[:, None], offset + g + rows * c + index] = part
        return predicted, jacobian

    def _common(self) -> Vector:
        """Return the most likely parameters for other seeds than the one the trials ran under."""
        theta = self._mean.copy()
        theta[2 + self._features :] *= min(1.0, self._shared * self.stretch)
        return theta

    def mean(self) -> DivergenceLaw:
        """Return the most likely law."""
        return self._unpack(self._common())

    def parameter_sd(self) -> Vector:
        """Return ``[K]``: how uncertain each parameter feature's effect on ln(divergence**2) is (posterior)."""
        return _posterior_sd(self._sd, self._jacobian, self._solve)[2 : 2 + self._features]

    def draw(self, rng: np.random.Generator, spread: float = 1.0) -> DivergenceLaw:
        """Return a law drawn from the posterior (Matheron's rule), ``spread`` times as far from the mean."""
        prior = rng.normal(size=len(self._sd)) * self._sd
        if len(self._jacobian):
            noise = rng.normal(size=len(self._noise)) * np.sqrt(self._noise)
            pull = self._solve @ (self._jacobian @ prior + noise)
            prior = prior - (self._jacobian * self._sd**2).T @ pull
        else:
            prior[0] = 0.0
        return self._unpack(self._common() + spread * prior)


def _posterior_sd(prior: Vector, rows: npt.NDArray[np.float64], solve: npt.NDArray[np.float64]) -> Vector:
    """Return ``[P]`` posterior standard deviations from prior ones, observation rows ``[N, P]`` and ``gram**-1``."""
    if not len(rows):
        return prior
    scaled = rows * prior**2
    known = np.einsum("np,nm,mp->p", scaled, solve, scaled)
    return np.asarray(np.sqrt(np.maximum(prior**2 - known, 0.0)))


class LinearModel:
    """Posterior of an additive quantity (step time in ms, memory in bytes) per group, choice and parameter value.

    ``value = base + scale * sum_g (table[g, i_g] - table[g].min) + choice and entry corrections + parameters``.

    Args:
        table: ``[G, C]`` prior; infinite where not offered.
        base: prior of what does not depend on the choices, in the same unit.
        parameter: ``[K]`` prior effect of each parameter feature.
        noise: relative noise of one measurement.
        trust: relative uncertainty of the table's differences (0.15 for a calibrated model).
    """

    def __init__(
        self, table: FloatTable, base: float, parameter: Vector, *, noise: float = 0.01, trust: float = 0.2
    ) -> None:
        finite = np.isfinite(table)
        self._allowed = finite
        low = np.where(finite, table, np.inf).min(axis=1, keepdims=True)
        self._difference = np.where(finite, table - low, 0.0)
        self._base = base + float(low.sum())
        self._prior = parameter
        total = max(abs(self._base) + float(self._difference.max(axis=1).sum()), 1e-12)
        self._unit = total
        g, c = table.shape
        entry = trust * self._difference + 0.02 * total / g
        self._sd = np.concatenate(
            [[0.2 * total, 0.3], np.full(c, 0.2), np.full(len(parameter), 0.1 * total), entry.ravel()]
        )
        self._mean = np.zeros(len(self._sd))
        self._x = np.zeros((0, len(self._sd)))
        self._noise = max(noise, 1e-4) * total
        self._solve: npt.NDArray[np.float64] = np.zeros((0, 0))

    @property
    def scale(self) -> float:
        """The size of the whole quantity: its prior at the most expensive choices."""
        return self._unit

    def _rows(self, observations: Sequence[Observation]) -> tuple[npt.NDArray[np.float64], Vector]:
        g, c = self._difference.shape
        k = len(self._prior)
        index = np.stack([o.index for o in observations])
        z = np.stack([o.features for o in observations]).reshape(len(observations), k)
        picked = self._difference[np.arange(g), index]
        x = np.zeros((len(observations), len(self._sd)))
        x[:, 0] = 1.0
        x[:, 1] = picked.sum(axis=1)
        lines = np.arange(len(observations))
        for choice in range(c):
            x[:, 2 + choice] = np.where(index == choice, picked, 0.0).sum(axis=1)
        x[:, 2 + c : 2 + c + k] = z
        x[lines[:, None], 2 + c + k + np.arange(g) * c + index] = 1.0
        return x, self._base + picked.sum(axis=1) + z @ self._prior

    def fit(self, observations: Sequence[Observation]) -> None:
        """Refit to all finished trials."""
        usable = [o for o in observations if math.isfinite(o.value)]
        if not usable:
            return
        self._x, prior = self._rows(usable)
        target = np.array([o.value for o in usable]) - prior
        scaled = self._x * self._sd**2
        gram = scaled @ self._x.T + np.eye(len(target)) * self._noise**2
        self._solve = np.asarray(np.linalg.inv(gram), dtype=np.float64)
        self._mean = scaled.T @ (self._solve @ target)

    def _table(self, theta: Vector) -> tuple[FloatTable, float, Vector]:
        g, c = self._difference.shape
        k = len(self._prior)
        factor = 1.0 + theta[1] + theta[2 : 2 + c][None, :]
        table = self._difference * factor + theta[2 + c + k :].reshape(g, c)
        return (
            np.where(self._allowed, table, np.inf),
            self._base + float(theta[0]),
            self._prior + theta[2 + c : 2 + c + k],
        )

    def mean(self) -> tuple[FloatTable, float, Vector]:
        """Return the most likely (table ``[G, C]``, base, parameter effects ``[K]``)."""
        return self._table(self._mean)

    def parameter_sd(self) -> Vector:
        """Return ``[K]``: how uncertain each parameter feature's effect is (posterior), in the table's unit."""
        first = 2 + self._difference.shape[1]
        return _posterior_sd(self._sd, self._x, self._solve)[first : first + len(self._prior)]

    def draw(self, rng: np.random.Generator, spread: float = 1.0) -> tuple[FloatTable, float, Vector]:
        """Return (table, base, parameter effects) drawn from the posterior."""
        prior = rng.normal(size=len(self._sd)) * self._sd
        if len(self._x):
            pull = self._solve @ (self._x @ prior + rng.normal(size=len(self._x)) * self._noise)
            prior = prior - (self._x * self._sd**2).T @ pull
        return self._table(self._mean + spread * prior)
