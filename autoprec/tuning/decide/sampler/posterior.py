"""What the measurements have taught: how divergence and step time (or memory) follow from an assignment.

Both models are Bayesian linear regressions. They start from tables (sensitivity scan, cost model) as prior means, and
are refitted to everything measured so far. Policies share layers, so every run says something about every policy.

Divergence follows the gradient error: ``ln D = c + 0.5 ln S``, where ``S`` sums the groups' squared errors. To first
order a group whose error is off by a factor ``exp(v)`` moves ``ln D`` by ``v`` times its share of ``S``: so what the
table has wrong of a choice everywhere, or of one entry, enters linearly, with the shares as features.

The rest is the luck of a paired seed. The loss gap of a policy is, to first order, a sum over its layers' errors, each
with its own random sign and size under each seed. So two policies have the same luck under one seed as far as they
consist of the same errors: the noise of two runs correlates with the *square* of their overlap, the share of squared
error that they have in common (measured on a small GPT and a small ViT: 0.1 + 0.4 * overlap**2; the remaining half of
the variance is each run's own). Ten neighbours under one seed therefore do not count as ten seeds.

How large that luck is depends on the model that is trained; it is estimated from the study itself, with a prior.
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

#: Prior standard deviations in units of ln(D): the level, a parameter's value, and what the table has wrong of a choice
#: and of one entry, for a policy that consists of nothing else. All but the level count once or several times: how
#: wrong a table is (it was right within 10 % of a small GPT's and a small ViT's divergence), the study shows.
_LEVEL, _PARAMETER, _CHOICE, _ENTRY = 1.5, 0.25, 0.06, 0.25
_MISFITS = ((1.0, 0.8), (4.0, 0.15), (12.0, 0.05))
#: The standard deviation of ln(D) over seeds: 0.31 to 0.5 on nine small models, 0.11 on one whose runs are long. Its
#: prior is lognormal around the first, as wide as the others below and above it; the posterior is taken over a grid.
_SPREAD, _BELOW, _ABOVE = 0.36, 0.7, 0.4
_SPREADS = np.geomspace(0.08, 1.5, 8)
#: Shares of the seeds' variance: what all runs under one seed have in common, and what those with the same errors have.
_SEED, _OVERLAP = 0.1, 0.4
#: Divergences below and above which nothing is distinguished (1e-7 relative is float32 rounding of the loss).
_TINY, _MOST = 1e-8, 10.0
#: ln(D) at the largest squared error of a table, before anything was measured.
_START = math.log(0.02)


def _prior_of(spread: float) -> float:
    return math.exp(-0.5 * (math.log(spread / _SPREAD) / (_BELOW if spread < _SPREAD else _ABOVE)) ** 2)


#: What the posterior is taken over: (spread, misfit of the table, prior probability).
_GRID = np.array([(spread, misfit, share * _prior_of(spread)) for spread in _SPREADS for misfit, share in _MISFITS])


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished run: columns ``[G]``, parameter features ``[K]``, squared error of parameters, outcome, seed."""

    index: IntVector
    features: Vector
    base2: float
    value: float
    seed: int = 0


@dataclass(frozen=True)
class DivergenceLaw:
    """The most likely law: a table of squared errors ``[G, C]``, and the mean divergence that their sum comes to."""

    error2: FloatTable
    level: float
    parameter: Vector
    unit: float

    def divergences(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> Vector:
        """Return the divergence ``[N]`` of assignments ``[N, G]`` with features ``[N, K]`` by this law."""
        total = base2 + self.error2[np.arange(index.shape[1]), index].sum(axis=1)
        log = 2 * (self.level + features @ self.parameter) + np.log(np.maximum(total, 1e-30) / self.unit)
        return np.asarray(np.exp(0.5 * np.minimum(log, 60.0)))

    def budget(self, divergence: float, features: Vector, base2: float) -> float:
        """Return the sum of squared errors (parameters' share taken off) that comes to this divergence."""
        log = 2 * (math.log(divergence) - self.level - float(self.parameter @ features))
        return max(0.0, self.unit * math.exp(min(log, 60.0)) - base2)


@dataclass(frozen=True)
class _Fit:
    """A regression given observed ``rows [n, P]``: weights of their residuals, and their inverse covariance."""

    rows: FloatTable
    inverse: FloatTable
    weights: Vector
    evidence: float

    @classmethod
    def of(cls, rows: FloatTable, residual: Vector, noise: FloatTable) -> _Fit:
        """Condition on residuals ``[n]`` with noise covariance ``[n, n]``; rows are in prior standard deviations."""
        covariance = rows @ rows.T + noise
        inverse = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        weights = inverse @ residual
        evidence = -0.5 * (float(residual @ weights) + float(np.linalg.slogdet(covariance)[1]))
        return cls(rows, inverse, weights, evidence)

    @property
    def theta(self) -> Vector:
        """Coefficients ``[P]``, in prior standard deviations."""
        return np.asarray(self.rows.T @ self.weights)

    def at(self, rows: FloatTable) -> tuple[Vector, Vector]:
        """Return mean and variance ``[N]`` at rows ``[N, P]``."""
        known = rows @ self.rows.T
        variance = (rows**2).sum(axis=1) - np.einsum("nm,mk,nk->n", known, self.inverse, known)
        return known @ self.weights, np.maximum(variance, 0.0)


def _weights(logs: Vector) -> Vector:
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _unfitted(count: int) -> _Fit:
    return _Fit(np.zeros((0, count)), np.zeros((0, 0)), np.zeros(0), 0.0)


class DivergenceModel:
    """Posterior of the divergence; see the module's docstring.

    Args:
        error2: ``[G, C]`` prior squared errors; infinite where not offered.
        features: number of parameter features K.
    """

    def __init__(self, error2: FloatTable, features: int) -> None:
        self._allowed = np.isfinite(error2)
        self._error2 = np.where(self._allowed & (error2 > 0), error2, 0.0)
        positive = self._error2[self._error2 > 0]
        self._unit = max(float(self._error2.max(axis=1).sum()), float(positive.min()) if len(positive) else 1e-12)
        self._features = features
        g, c = error2.shape
        sizes = ((1, _LEVEL), (features, _PARAMETER), (c, _CHOICE), (g * c, _ENTRY))
        self._sd = np.concatenate([np.full(count, sd) for count, sd in sizes])
        self._columns = 1 + features
        self._fits = [_unfitted(len(self._sd))] * len(_GRID)
        self._weights = _weights(np.log(_GRID[:, 2]))

    @property
    def spread(self) -> float:
        """Standard deviation of ln(D) of one run around the mean over seeds, by everything measured."""
        return math.sqrt(float(self._weights @ _GRID[:, 0] ** 2))

    def _trusting(self, rows: FloatTable, misfit: float) -> FloatTable:
        """Return rows ``[N, P]`` where everything but the level is a multiple further off than it usually is."""
        return np.asarray(rows * np.concatenate([[1.0], np.full(rows.shape[1] - 1, misfit)]))

    def _shares(self, index: npt.NDArray[np.int64], base2: Vector) -> tuple[FloatTable, Vector]:
        """Return every group's share ``[N, G]`` of the squared error of assignments ``[N, G]``, and their sums."""
        error2 = self._error2[np.arange(index.shape[1]), index]
        total = np.maximum(error2.sum(axis=1) + base2, 1e-30)
        return error2 / total[:, None], total

    def _scaled(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> tuple[FloatTable, Vector]:
        """Return features ``[N, P]`` times their prior standard deviations, and the prior mean of ln(D) ``[N]``."""
        (n, g), c, k = index.shape, self._error2.shape[1], self._features
        part, total = self._shares(index, base2)
        x = np.zeros((n, len(self._sd)))
        x[:, 0], x[:, 1 : 1 + k] = 1.0, features
        for choice in range(c):
            x[:, 1 + k + choice] = np.where(index == choice, part, 0.0).sum(axis=1)
        x[np.arange(n)[:, None], 1 + k + c + np.arange(g) * c + index] = part
        return x * self._sd, _START + 0.5 * np.log(total / self._unit)

    def _correlation(self, index: npt.NDArray[np.int64], base2: Vector, seeds: IntVector) -> FloatTable:
        """Return how the luck of runs correlates ``[n, n]``."""
        amplitudes = np.sqrt(self._shares(index, base2)[0])
        same = index[:, None, :] == index[None, :, :]
        overlap = np.einsum("ig,jg,ijg->ij", amplitudes, amplitudes, same)
        together = _SEED + _OVERLAP * overlap**2
        return np.where(seeds[:, None] == seeds[None, :], together, 0.0) + np.eye(len(index)) * (1 - _SEED - _OVERLAP)

    def fit(self, observations: Sequence[Observation]) -> None:
        """Refit to all finished runs."""
        usable = [o for o in observations if o.base2 + float(self._error2[np.arange(len(o.index)), o.index].sum()) > 0]
        if not usable:
            return
        index, base2 = np.stack([o.index for o in usable]), np.array([o.base2 for o in usable])
        features = np.stack([o.features for o in usable]).reshape(len(usable), -1)
        rows, prior = self._scaled(index, features, base2)
        noise = self._correlation(index, base2, np.array([o.seed for o in usable]))
        residual = np.log(np.clip([o.value for o in usable], _TINY, _MOST)) - prior
        self._fits = [_Fit.of(self._trusting(rows, m), residual, spread**2 * noise) for spread, m, _ in _GRID]
        self._weights = _weights(np.array([fit.evidence for fit in self._fits]) + np.log(_GRID[:, 2]))

    def predict(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> tuple[Vector, Vector]:
        """Return mean and standard deviation ``[N]`` of ln(mean of D over seeds), of assignments ``[N, G]``."""
        rows, prior = self._scaled(index, features, base2)
        found = [fit.at(self._trusting(rows, m)) for fit, (_, m, _) in zip(self._fits, _GRID, strict=True)]
        # D is lognormal over seeds: the logarithm of its mean is by half a variance above the mean of its logarithm
        logs = np.array([prior + mean + spread**2 / 2 for (mean, _), spread in zip(found, _GRID[:, 0], strict=True)])
        log = self._weights @ logs
        variance = self._weights @ (np.array([variance for _, variance in found]) + (logs - log) ** 2)
        return np.clip(log, math.log(_TINY), 30.0), np.sqrt(variance)

    def law(self) -> DivergenceLaw:
        """Return the most likely law: what the solver works with."""
        fitted = zip(self._weights, self._fits, _GRID[:, 1], strict=True)
        theta = self._sd * sum(w * self._trusting(fit.theta[None], m)[0] for w, fit, m in fitted)
        (g, c), start = self._error2.shape, 1 + self._features
        shift = theta[start : start + c][None, :] + theta[start + c :].reshape(g, c)
        table = np.where(self._allowed, self._error2 * np.exp(np.clip(2 * shift, -12.0, 12.0)), np.inf)
        level = _START + float(theta[0]) + self.spread**2 / 2
        return DivergenceLaw(table, level, theta[1:start], self._unit)

    def entry_sd(self, error2: FloatTable) -> Vector:
        """Return ``[G]``: how uncertain the logarithm of the variance is that each group's largest error brings."""
        columns, (g, c) = np.where(np.isfinite(error2), error2, -1.0).argmax(axis=1), error2.shape
        rows = np.zeros((g, len(self._sd)))
        for column in (self._columns + columns, self._columns + c + np.arange(g) * c + columns):
            rows[np.arange(g), column] = self._sd[column]
        found = [fit.at(self._trusting(rows, m))[1] for fit, (_, m, _) in zip(self._fits, _GRID, strict=True)]
        return 4.0 * np.sqrt(self._weights @ np.array(found))  # D**2 is a variance, and the error enters it squared

    def parameter_sd(self) -> Vector:
        """Return ``[K]``: how uncertain each parameter feature's effect on ln(D) is."""
        rows = np.diag(self._sd)[1 : self._columns]
        found = [fit.at(self._trusting(rows, m))[1] for fit, (_, m, _) in zip(self._fits, _GRID, strict=True)]
        return np.sqrt(self._weights @ np.array(found))


class LinearModel:
    """Posterior of an additive quantity (step time in ms, memory in bytes) per group, choice and parameter value.

    ``value = base + sum_g table[g, i_g] * (1 + factor of the choice) + entry corrections + parameters``: a recipe may
    be faster or slower everywhere than the table says, and a group on its own.

    Args:
        table: ``[G, C]`` prior; infinite where not offered.
        base: prior of what does not depend on the choices, in the same unit.
        parameter: ``[K]`` prior effect of each parameter feature.
        noise: relative noise of one measurement.
        trust: relative uncertainty of a choice's times.
    """

    def __init__(
        self, table: FloatTable, base: float, parameter: Vector, *, noise: float = 0.01, trust: float = 0.2
    ) -> None:
        self._allowed = np.isfinite(table)
        self._table = np.where(self._allowed, table, 0.0)
        self._base, self._prior = base, parameter
        #: The size of the whole quantity: its prior at the most expensive choices.
        self.scale = max(abs(base) + float(np.abs(self._table).max(axis=1).sum()), 1e-12)
        entry = 0.15 * trust * np.abs(self._table)
        effect = trust * np.abs(parameter) + 0.01 * trust * self.scale  # most parameters cost nothing
        self._sd = np.concatenate([[0.3 * self.scale], effect, np.full(table.shape[1], trust), entry.ravel()])
        self._noise = max(noise, 1e-4) * self.scale
        self._fit = _unfitted(len(self._sd))

    def _scaled(self, index: npt.NDArray[np.int64], features: FloatTable) -> tuple[FloatTable, Vector]:
        """Return features ``[N, P]`` times their prior standard deviations, and the prior mean ``[N]``."""
        (n, g), c, k = index.shape, self._table.shape[1], len(self._prior)
        picked = self._table[np.arange(g), index]
        x = np.zeros((n, len(self._sd)))
        x[:, 0], x[:, 1 : 1 + k] = 1.0, features
        for choice in range(c):
            x[:, 1 + k + choice] = np.where(index == choice, picked, 0.0).sum(axis=1)
        x[np.arange(n)[:, None], 1 + k + c + np.arange(g) * c + index] = 1.0
        return x * self._sd, self._base + picked.sum(axis=1) + features @ self._prior

    def fit(self, observations: Sequence[Observation]) -> None:
        """Refit to all finished runs."""
        usable = [o for o in observations if math.isfinite(o.value)]
        if not usable:
            return
        features = np.stack([o.features for o in usable]).reshape(len(usable), -1)
        rows, prior = self._scaled(np.stack([o.index for o in usable]), features)
        noise = np.eye(len(usable)) * self._noise**2
        self._fit = _Fit.of(rows, np.array([o.value for o in usable]) - prior, noise)

    def predict(self, index: npt.NDArray[np.int64], features: FloatTable) -> tuple[Vector, Vector]:
        """Return mean and standard deviation ``[N]`` of assignments ``[N, G]`` with features ``[N, K]``."""
        rows, prior = self._scaled(index, features)
        mean, variance = self._fit.at(rows)
        return prior + mean, np.sqrt(variance)

    def mean(self) -> tuple[FloatTable, float, Vector]:
        """Return the most likely (table ``[G, C]``, base, parameter effects ``[K]``)."""
        (g, c), k = self._table.shape, len(self._prior)
        theta = self._fit.theta * self._sd
        table = self._table * (1.0 + theta[1 + k : 1 + k + c]) + theta[1 + k + c :].reshape(g, c)
        return np.where(self._allowed, table, np.inf), self._base + float(theta[0]), self._prior + theta[1 : 1 + k]

    def parameter_sd(self) -> Vector:
        """Return ``[K]``: how uncertain each parameter feature's effect is, in the table's unit."""
        return np.sqrt(self._fit.at(np.diag(self._sd)[1 : 1 + len(self._prior)])[1])
