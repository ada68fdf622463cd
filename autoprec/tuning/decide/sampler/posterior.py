"""What the measurements have taught: how divergence and step time (or memory) follow from an assignment.

Both models start from tables (sensitivity scan, cost model) as prior means, are linear-Gaussian in what they correct,
and are refitted to everything measured so far. Layers, choices and families are shared between policies, so every run
says something about every policy.

Divergence follows the gradient error: ``ln D**2 = c + q.z + a ln S``, where ``S`` sums the groups' squared errors. To
first order a group whose error is off by a factor ``exp(v)`` moves ``ln S`` by ``v`` times its share of ``S``; so the
corrections of families, choices and single entries enter linearly, with the shares as features.

All policies that run under one paired seed share its luck: that seed's level, and part of what it says about single
layers, are true of that seed only. Both are part of the covariance, so that ten policies under one seed do not count as
ten seeds, and what is predicted is the mean over seeds that nobody has seen.
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

#: Prior standard deviations, in units of ln(D**2) or of ln(error2).
_SCALE, _POWER, _PARAMETER, _CHOICE, _FAMILY, _ENTRY = 3.0, 0.15, 0.5, 0.15, 0.25, 0.15
#: Of ln(D) from seed to seed: what all policies of one seed share, each run's own, and everything together.
_SEED, _RUN, _SPREAD = 0.10, 0.30, 0.36
#: What one seed says of single layers that is true of it alone, as a multiple of the variance that all seeds share.
_OWN = 2.0
#: A signal this much smaller than the noise floor cannot be told from it.
_LEAST_SIGNAL = 0.05
#: Divergences below and above which nothing is distinguished (1e-7 relative is float32 rounding of the loss).
_TINY, _MOST = 1e-8, 10.0


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
    """How divergence follows from an assignment: a table of squared errors, and what their sum comes to."""

    error2: FloatTable
    scale: float
    power: float
    parameter: Vector
    unit: float
    floor: float

    def divergences(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> Vector:
        """Return the divergence ``[N]`` of assignments ``[N, G]`` with features ``[N, K]`` by this law."""
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
    """Posterior of the divergence; see the module's docstring.

    Args:
        error2: ``[G, C]`` prior squared errors; infinite where not offered.
        families: family number of each group ``[G]``.
        features: number of parameter features K.
        floor: noise floor of the divergence (a fraction).
    """

    #: Standard deviation of ln(D) of one run around the mean over seeds.
    spread = _SPREAD

    def __init__(self, error2: FloatTable, families: Sequence[int], features: int, floor: float = 0.0) -> None:
        self._allowed = np.isfinite(error2)
        self._error2 = np.where(self._allowed & (error2 > 0), error2, 0.0)
        positive = self._error2[self._error2 > 0]
        low = float(positive.min()) * 1e-3 if len(positive) else 1e-12
        self._unit = max(float(self._error2.max(axis=1).sum()), low)
        self._families = np.asarray(families, dtype=np.int64)
        self._floor = max(floor, 0.0)
        g, c = error2.shape
        self._features = features
        self._common_sd = np.concatenate([[_SCALE, _POWER], np.full(features, _PARAMETER)])
        self._layer_sd = np.concatenate(
            [np.full(c, _CHOICE), np.full(int(self._families.max()) + 1, _FAMILY), np.full(g * c, _ENTRY)]
        )
        self._theta = np.zeros(len(self._common_sd) + len(self._layer_sd))
        self._rows = np.zeros((0, len(self._theta)))
        self._inverse: FloatTable = np.zeros((0, 0))

    def _scaled(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> tuple[FloatTable, Vector]:
        """Return features ``[N, P]`` times their prior standard deviations, and the prior mean of ln(D**2) ``[N]``."""
        n, g = index.shape
        c, families = self._error2.shape[1], int(self._families.max()) + 1
        share = self._error2[np.arange(g), index]
        total = np.maximum(share.sum(axis=1) + base2, 1e-30)
        level = np.log(total / self._unit)
        part = share / total[:, None]
        x = np.zeros((n, len(self._theta)))
        x[:, 0], x[:, 1], x[:, 2 : 2 + self._features] = 1.0, level, features
        start = 2 + self._features
        for choice in range(c):
            x[:, start + choice] = np.where(index == choice, part, 0.0).sum(axis=1)
        x[:, start + c : start + c + families] = part @ (self._families[:, None] == np.arange(families))
        x[np.arange(n)[:, None], start + c + families + np.arange(g) * c + index] = part
        # centred on D = 2 % at the largest squared error of the table
        return x * np.concatenate([self._common_sd, self._layer_sd]), 2 * math.log(0.02) + level

    def fit(self, observations: Sequence[Observation]) -> None:
        """Refit to all finished runs."""
        usable = [o for o in observations if o.base2 + float(self._error2[np.arange(len(o.index)), o.index].sum()) > 0]
        if not usable:
            return
        index = np.stack([o.index for o in usable])
        features = np.stack([o.features for o in usable]).reshape(len(usable), -1)
        rows, prior = self._scaled(index, features, np.array([o.base2 for o in usable]))
        gap2 = np.clip([o.value for o in usable], _TINY, _MOST) ** 2
        signal = np.maximum(gap2 - self._floor**2, _LEAST_SIGNAL * gap2)
        seeds = np.array([o.seed for o in usable])
        layers = rows[:, 2 + self._features :]
        same = (seeds[:, None] == seeds[None, :]).astype(np.float64)
        covariance = rows @ rows.T + same * (4 * _SEED**2 + _OWN * layers @ layers.T)
        covariance[np.diag_indices(len(usable))] += 4 * (_RUN * gap2 / signal) ** 2
        self._rows, self._inverse = rows, np.linalg.inv(covariance)
        self._theta = rows.T @ (self._inverse @ (np.log(signal) - prior))

    def predict(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> tuple[Vector, Vector]:
        """Return mean and standard deviation ``[N]`` of ln(D) of a typical seed, of assignments ``[N, G]``."""
        rows, prior = self._scaled(index, features, base2)
        log = prior + rows @ self._theta
        variance = (rows**2).sum(axis=1)
        if len(self._rows):
            known = rows @ self._rows.T
            variance = variance - np.einsum("nm,mk,nk->n", known, self._inverse, known)
        gap2 = self._floor**2 + np.exp(np.minimum(log, 60.0))
        return 0.5 * np.log(gap2 + _TINY**2), 0.5 * np.sqrt(np.maximum(variance, 0.0))

    def law(self) -> DivergenceLaw:
        """Return the most likely law: what the solver works with."""
        theta = self._theta * np.concatenate([self._common_sd, self._layer_sd])
        g, c = self._error2.shape
        start, families = 2 + self._features, int(self._families.max()) + 1
        choice, rest = theta[start : start + c], theta[start + c :]
        shift = choice[None, :] + rest[:families][self._families][:, None] + rest[families:].reshape(g, c)
        power = max(0.3, 1.0 + float(theta[1]))
        # a factor of an error moves ln(D**2) by as much, whatever the power is
        table = self._error2 * np.exp(np.clip(shift / power, -12.0, 12.0))
        return DivergenceLaw(
            np.where(self._allowed, table, np.inf),
            2 * math.log(0.02) + float(theta[0]),
            power,
            theta[2:start],
            self._unit,
            self._floor,
        )

    def parameter_sd(self) -> Vector:
        """Return ``[K]``: how uncertain each parameter feature's effect on ln(D**2) is."""
        kept = slice(2, 2 + self._features)
        if not len(self._rows):
            return self._common_sd[kept]
        seen = self._rows[:, kept]
        left = 1.0 - np.einsum("np,nm,mp->p", seen, self._inverse, seen)
        return np.asarray(self._common_sd[kept] * np.sqrt(np.maximum(left, 0.0)))


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
        c = table.shape[1]
        entry = 0.15 * trust * np.abs(self._table)
        effect = trust * np.abs(parameter) + 0.01 * trust * self.scale  # most parameters cost nothing
        self._sd = np.concatenate([[0.3 * self.scale], np.full(c, trust), effect, entry.ravel()])
        self._noise = max(noise, 1e-4) * self.scale
        self._theta = np.zeros(len(self._sd))
        self._rows = np.zeros((0, len(self._sd)))
        self._inverse: FloatTable = np.zeros((0, 0))

    def _scaled(self, index: npt.NDArray[np.int64], features: FloatTable) -> tuple[FloatTable, Vector]:
        """Return features ``[N, P]`` times their prior standard deviations, and the prior mean ``[N]``."""
        (n, g), c, k = index.shape, self._table.shape[1], len(self._prior)
        picked = self._table[np.arange(g), index]
        x = np.zeros((n, len(self._sd)))
        x[:, 0], x[:, 1 + c : 1 + c + k] = 1.0, features
        for choice in range(c):
            x[:, 1 + choice] = np.where(index == choice, picked, 0.0).sum(axis=1)
        x[np.arange(n)[:, None], 1 + c + k + np.arange(g) * c + index] = 1.0
        return x * self._sd, self._base + picked.sum(axis=1) + features @ self._prior

    def fit(self, observations: Sequence[Observation]) -> None:
        """Refit to all finished runs."""
        usable = [o for o in observations if math.isfinite(o.value)]
        if not usable:
            return
        features = np.stack([o.features for o in usable]).reshape(len(usable), -1)
        self._rows, prior = self._scaled(np.stack([o.index for o in usable]), features)
        covariance = self._rows @ self._rows.T + np.eye(len(usable)) * self._noise**2
        self._inverse = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        self._theta = self._rows.T @ (self._inverse @ (np.array([o.value for o in usable]) - prior))

    def predict(self, index: npt.NDArray[np.int64], features: FloatTable) -> tuple[Vector, Vector]:
        """Return mean and standard deviation ``[N]`` of assignments ``[N, G]`` with features ``[N, K]``."""
        rows, prior = self._scaled(index, features)
        variance = (rows**2).sum(axis=1)
        if len(self._rows):
            known = rows @ self._rows.T
            variance = variance - np.einsum("nm,mk,nk->n", known, self._inverse, known)
        return prior + rows @ self._theta, np.sqrt(np.maximum(variance, 0.0))

    def mean(self) -> tuple[FloatTable, float, Vector]:
        """Return the most likely (table ``[G, C]``, base, parameter effects ``[K]``)."""
        theta = self._theta * self._sd
        (g, c), k = self._table.shape, len(self._prior)
        table = self._table * (1.0 + theta[1 : 1 + c]) + theta[1 + c + k :].reshape(g, c)
        effects = self._prior + theta[1 + c : 1 + c + k]
        return np.where(self._allowed, table, np.inf), self._base + float(theta[0]), effects

    def parameter_sd(self) -> Vector:
        """Return ``[K]``: how uncertain each parameter feature's effect is, in the table's unit."""
        first = 1 + self._table.shape[1]
        kept = slice(first, first + len(self._prior))
        if not len(self._rows):
            return self._sd[kept]
        seen = self._rows[:, kept]
        left = 1.0 - np.einsum("np,nm,mp->p", seen, self._inverse, seen)
        return np.asarray(self._sd[kept] * np.sqrt(np.maximum(left, 0.0)))
