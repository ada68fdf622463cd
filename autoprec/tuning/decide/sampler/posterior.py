"""What the measurements have taught: how divergence and step time (or memory) follow from an assignment.

Both models are Bayesian linear regressions. They start from tables (sensitivity scan, cost model) as prior means, and
are refitted to everything measured so far. Policies share layers, so every run says something about every policy.

Divergence follows the gradient error: ``ln D = c + 0.5 ln S``, where ``S`` sums the groups' squared errors. To first
order a group whose error is off by a factor ``exp(v)`` moves ``ln D`` by ``v`` times its share of ``S``: so what the
table has wrong of a choice everywhere, or of one entry, enters linearly, with the shares as features.

The rest is the noise of a paired seed. The loss gap of a policy is, to first order, a sum over its layers' errors, each
with its own random sign and size under each seed. So two policies have the same noise under one seed as far as they
consist of the same errors: the noise of two runs correlates with the *square* of their overlap, the share of squared
error that they have in common (measured on a small GPT and a small ViT: 0.1 + 0.4 * overlap**2; the remaining half of
the variance is each run's own). Ten neighbours under one seed therefore do not count as ten seeds.

How large that seed noise is depends on the model that is trained; it is estimated from the study itself, with a prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.policy.solver import FloatTable, IntVector
from autoprec.support.arrays import np, npt

Vector = npt.NDArray[np.float64]

#: Prior standard deviations in units of ln(D): the level, a parameter's value, and what the table has wrong of a choice
#: and of one entry, for a policy that consists of nothing else. All but the level count once or several times: how
#: wrong a table is the study shows, and a gap at the noise floor is not a sign of seed noise (test_ranking.py).
_LEVEL, _PARAMETER, _CHOICE, _ENTRY = 1.5, 0.25, 0.06, 0.25
#: How many times as wrong as that a study's table may be, with weights: usually it is right, and rarely useless.
_MISFITS = {1.0: 0.8, 4.0: 0.15, 12.0: 0.05}
#: The standard deviation of ln(D) over seeds: 0.31 to 0.5 on nine small models, 0.11 on one whose runs are long. Its
#: prior is lognormal around the first, as wide as the others below and above it; the posterior is taken over a grid.
_SPREAD, _BELOW, _ABOVE = 0.36, 0.7, 0.4
#: The grid: every misfit with eight spreads, from a fifth of the prior's middle to four times it.
_MISFIT, _SPREADS = (axis.ravel() for axis in np.meshgrid(list(_MISFITS), np.geomspace(0.08, 1.5, 8)))
_OFF = np.log(_SPREADS / _SPREAD)
#: A normal distribution's exponent of what the spread is off in its logarithm, and the weight of the misfit.
_LOG_PRIOR = np.log([_MISFITS[m] for m in _MISFIT]) - 0.5 * (_OFF / np.where(_OFF < 0, _BELOW, _ABOVE)) ** 2
#: Shares of the seeds' variance: what all runs under one seed have in common, and what those with the same errors have.
_SEED, _OVERLAP = 0.1, 0.4
#: Divergences below and above which nothing is distinguished (1e-7 relative is float32 rounding of the loss).
_TINY, _MOST = 1e-8, 10.0
#: ln(D) at the largest squared error of a table, before anything was measured.
_START = math.log(0.02)
#: Relative noises of a step time that one run has measured, and what is believed of them before any did: processes of
#: one program differ by 2 % (GPT) to 13 % (ConvNeXt) on a CPU, by which pages they get (2026-11-28_by_hand.md).
TIMED_NOISE = {0.01: 0.15, 0.02: 0.3, 0.04: 0.3, 0.08: 0.15, 0.16: 0.1}
#: How many times as wrong as it is usually a table may be of layers of one kind, with weights (depthwise convolutions).
_WRONG = {1.0: 0.85, 3.0: 0.15}

_NO_ROWS, _NO_VALUES = np.zeros((0, 0)), np.zeros(0)


@dataclass(frozen=True)
class Points:
    """Assignments ``[N, G]`` with parameter features ``[N, K]`` and the squared errors of parameters ``[N]``."""

    index: npt.NDArray[np.int64]
    features: FloatTable
    base2: Vector

    def __len__(self) -> int:
        return len(self.index)

    def pick(self, table: FloatTable) -> FloatTable:
        """Return the entries ``[N, G]`` of a table ``[G, C]`` that the points use."""
        return table[np.arange(self.index.shape[1]), self.index]

    def rows(self, weight: FloatTable, choices: int, kinds: Sequence[Sequence[int]] = ()) -> FloatTable:
        """Return regressors ``[N, 1 + K + C + len(kinds) * C + G * C]`` from weights ``[N, G]``.

        They are 1, the features, and the weights by choice, by kind of group and choice, and by entry.

        Args:
            weight: ``[N, G]``.
            choices: C, the number of choices.
            kinds: groups of each kind.
        """
        entries = np.zeros((*self.index.shape, choices))
        np.put_along_axis(entries, self.index[:, :, None], weight[:, :, None], axis=2)
        parts = (
            np.ones((len(self), 1)),
            self.features,
            entries.sum(axis=1),
            *(entries[:, list(kind)].sum(axis=1) for kind in kinds),
            entries.reshape(len(self), weight.shape[1] * choices),
        )
        return np.concatenate(parts, axis=1)


class _Fit:
    """A linear regression whose coefficients ``[P]`` have normal priors around 0, given what was observed.

    Args:
        sd: ``[P]`` prior standard deviations.
        rows: ``[n, P]`` observed regressors, none before anything was.
        residual: ``[n]``.
        noise: ``[n, n]`` covariance.
    """

    def __init__(
        self, sd: Vector, rows: FloatTable = _NO_ROWS, residual: Vector = _NO_VALUES, noise: FloatTable = _NO_ROWS
    ) -> None:
        self.sd, self._rows = sd, rows.reshape(-1, len(sd)) * sd
        self._residual, self._noise = residual, noise
        covariance = self._rows @ self._rows.T + noise
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ residual
        self.evidence = -0.5 * (float(residual @ self._weights) + float(np.linalg.slogdet(covariance)[1]))
        self.coefficients: Vector = sd * (self._rows.T @ self._weights)

    def draw(self, rng: np.random.Generator) -> Vector:
        """Return coefficients ``[P]`` drawn from what is believed of them (Matheron's rule: a corrected prior draw)."""
        prior = rng.standard_normal(len(self.sd))
        noise = np.linalg.cholesky(self._noise) @ rng.standard_normal(len(self._noise))
        seen = self._rows @ prior + noise
        return np.asarray(self.sd * (prior + self._rows.T @ (self._inverse @ (self._residual - seen))))

    def before(self, rows: FloatTable) -> tuple[FloatTable, Vector]:
        """Return what rows ``[N, P]`` have in common with those observed ``[N, n]``, and the variance before them."""
        rows = rows * self.sd
        return rows @ self._rows.T, (rows**2).sum(axis=1)

    def after(self, known: FloatTable, variance: Vector) -> tuple[Vector, Vector]:
        """Return mean and variance ``[N]``, from what :meth:`before` gives for the same prior and rows."""
        return known @ self._weights, np.maximum(variance - ((known @ self._inverse) * known).sum(axis=1), 0.0)

    def at(self, rows: FloatTable) -> tuple[Vector, Vector]:
        """Return mean and variance ``[N]`` at rows ``[N, P]``."""
        return self.after(*self.before(rows))


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
        (g, self._choices), self._features = error2.shape, features
        sizes = (1, features, self._choices, g * self._choices)
        self._sds = [np.repeat([_LEVEL, *(m * sd for sd in (_PARAMETER, _CHOICE, _ENTRY))], sizes) for m in _MISFIT]
        self._fits = [_Fit(sd) for sd in self._sds]
        self._weights = self._normalised()

    def _normalised(self) -> Vector:
        logs = np.array([fit.evidence for fit in self._fits]) + _LOG_PRIOR
        weights = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())

    @property
    def spread(self) -> float:
        """Standard deviation of ln(D) of one run around the mean over seeds, by everything measured."""
        return math.sqrt(float(self._weights @ _SPREADS**2))

    def shares(self, points: Points) -> tuple[FloatTable, Vector]:
        """Return every group's share ``[N, G]`` of the squared error of points, and their sums ``[N]``."""
        error2 = points.pick(self._error2)
        total = np.clip(error2.sum(axis=1) + points.base2, 1e-30, 1e300)
        return error2 / total[:, None], total

    def _start(self, points: Points) -> tuple[FloatTable, Vector]:
        """Return the regressors ``[N, P]`` of points, and the prior mean of ln(D) ``[N]``."""
        part, total = self.shares(points)
        return points.rows(part, self._choices), _START + 0.5 * np.log(total / self._unit)

    def _correlation(self, points: Points, seeds: IntVector) -> FloatTable:
        """Return how the seed noise of runs correlates ``[n, n]``."""
        amplitudes = np.sqrt(self.shares(points)[0])
        same = points.index[:, None, :] == points.index[None, :, :]
        overlap = np.einsum("ig,jg,ijg->ij", amplitudes, amplitudes, same)
        together = np.where(seeds[:, None] == seeds[None, :], _SEED + _OVERLAP * overlap**2, 0.0)
        return np.asarray(together + np.eye(len(points)) * (1 - _SEED - _OVERLAP))

    def fit(self, points: Points, values: Vector, seeds: IntVector) -> None:
        """Refit to runs: their divergences ``[N]`` (NaN where there is none) and paired seeds ``[N]``.

        Args:
            points: N runs.
            values: ``[N]`` divergences.
            seeds: ``[N]`` paired seeds.
        """
        error2 = points.pick(self._error2).sum(axis=1) + points.base2  # infinite where a parameter's probe failed
        kept = np.isfinite(values) & np.isfinite(error2) & (error2 > 0)
        points = Points(points.index[kept], points.features[kept], points.base2[kept])
        rows, prior = self._start(points)
        noise, residual = self._correlation(points, seeds[kept]), np.log(np.clip(values[kept], _TINY, _MOST)) - prior
        scaled = zip(self._sds, _SPREADS, strict=True)
        self._fits = [_Fit(sd, rows, residual, spread**2 * noise) for sd, spread in scaled]
        self._weights = self._normalised()

    def predict(self, points: Points) -> tuple[Vector, Vector]:
        """Return mean and standard deviation ``[N]`` of ln(mean of D over seeds)."""
        rows, prior = self._start(points)
        means, variances = np.moveaxis(np.array([fit.at(rows) for fit in self._fits]), 1, 0)
        # D is lognormal over seeds: the logarithm of its mean is by half a variance above the mean of its logarithm
        logs = prior + means + _SPREADS[:, None] ** 2 / 2
        log = self._weights @ logs
        variance = self._weights @ (variances + (logs - log) ** 2)
        return np.clip(log, math.log(_TINY), 30.0), np.sqrt(variance)

    def law(self) -> tuple[FloatTable, float, Vector]:
        """Return the most likely law: what each entry ``[G, C]`` adds to the squared divergence (a mean over seeds).

        Returns:
            That table; what a squared error of 1 adds; and the effects ``[K]`` of parameters on ln(D).
        """
        return self._law(self._weights @ np.array([fit.coefficients for fit in self._fits]), self.spread)

    def drawn_law(self, rng: np.random.Generator) -> tuple[FloatTable, float, Vector]:
        """Return a law like :meth:`law`, drawn from everything that is still possible."""
        at = int(rng.choice(len(self._fits), p=self._weights))
        return self._law(self._fits[at].draw(rng), float(_SPREADS[at]))

    def _law(self, theta: Vector, spread: float) -> tuple[FloatTable, float, Vector]:
        start, c = 1 + self._features, self._choices
        shift = theta[start : start + c] + theta[start + c :].reshape(-1, c)
        scale = math.exp(2 * (_START + float(theta[0])) + spread**2) / self._unit
        squares = scale * self._error2 * np.exp(np.clip(2 * shift, -12.0, 12.0))
        return np.where(self._allowed, squares, np.inf), scale, theta[1:start]


class LinearModel:
    """Posterior of an additive quantity (step time in ms, memory in bytes) per group, choice and parameter value.

    ``value = base + sum_g table[g, i_g] * (1 + factors of choice, kind and entry) + parameters``: a recipe may
    be faster or slower than the table says everywhere, in layers of one kind (a depthwise convolution in bf16), and in
    one group.

    Args:
        table: ``[G, C]`` prior; infinite where not offered.
        base: prior of what does not depend on the choices, in the same unit.
        parameter: ``[K]`` prior effect of each parameter feature.
        noise: possible relative noises of one measurement -> their prior weights; the study itself shows which it is.
        trust: relative uncertainty of a choice's times in groups of one kind; half of its variance is the kind's own.
        kinds: positions of groups of one kind.
        effect_sd: ``[K]`` how far each parameter's effect may be off, relative to the whole quantity.
    """

    def __init__(
        self,
        table: FloatTable,
        base: float,
        parameter: Vector,
        *,
        noise: Mapping[float, float],
        trust: float = 0.2,
        kinds: Sequence[Sequence[int]] = (),
        effect_sd: Vector | float = 0.0,
    ) -> None:
        self._allowed = np.isfinite(table)
        self._table = np.where(self._allowed, table, 0.0)
        self._base, self._prior, self._features, self._kinds = base, parameter, len(parameter), kinds
        #: The size of the whole quantity: its prior at the most expensive choices.
        self.scale = max(abs(base) + float(np.abs(self._table).max(axis=1).sum()), 1e-12)
        effect = trust * np.abs(parameter) + (0.01 * trust + effect_sd) * self.scale  # most parameters cost nothing
        shared, wrong = trust / math.sqrt(2.0) if kinds else trust, _WRONG if kinds else {1.0: 1.0}
        counts = (table.shape[1], len(kinds) * table.shape[1], table.size)
        sds = [
            np.concatenate([[0.3 * self.scale], effect, np.repeat([shared, times * shared, 0.15 * trust], counts)])
            for times in wrong
        ]
        self._priors = len(sds)
        self._possible = [(sd, level * self.scale) for sd in sds for level in noise]
        self._prior_weights = np.outer(list(wrong.values()), list(noise.values())).ravel()
        self._fits, self._weights = [_Fit(sd) for sd, _ in self._possible], self._prior_weights

    def _start(self, points: Points) -> tuple[FloatTable, Vector]:
        """Return the regressors ``[N, P]`` of points, and their prior mean ``[N]``."""
        picked = points.pick(self._table)
        prior = self._base + picked.sum(axis=1) + points.features @ self._prior
        return points.rows(picked, self._table.shape[1], self._kinds), prior

    def fit(self, points: Points, values: Vector, known: Vector | None = None, of: int = 1) -> None:
        """Refit to runs, of values ``[N]`` (NaN where there is none).

        Args:
            known: ``[N]`` standard deviations of values, in their unit, where they are known; elsewhere NaN.
            of: runs that the first value is of.
        """
        rows, prior = self._start(points)
        kept = np.isfinite(values)
        rows, residual = rows[kept], (values - prior)[kept]
        sds = np.full(len(residual), np.nan) if known is None else known[kept]
        share = np.ones(len(residual))
        share[:1] = 1.0 / math.sqrt(of)
        self._fits = [
            _Fit(sd, rows, residual, np.diag(np.where(np.isnan(sds), noise * share, sds) ** 2))
            for sd, noise in self._possible
        ]
        logs = np.array([fit.evidence for fit in self._fits])
        weights = np.exp(logs - logs.max()) * self._prior_weights
        self._weights = weights / weights.sum()

    def predict(self, points: Points) -> tuple[Vector, Vector]:
        """Return mean and standard deviation ``[N]`` of points."""
        rows, prior = self._start(points)
        each = len(self._fits) // self._priors  # these share a prior, and what follows from it alone
        shared = [fit.before(rows) for fit in self._fits[::each]]
        found = [fit.after(*shared[i // each]) for i, fit in enumerate(self._fits)]
        means, variances = np.moveaxis(np.array(found), 1, 0)
        mean = self._weights @ means
        return prior + mean, np.sqrt(self._weights @ (variances + (means - mean) ** 2))

    def mean(self) -> tuple[FloatTable, float, Vector]:
        """Return the most likely (table ``[G, C]``, base, parameter effects ``[K]``)."""
        return self._law(self._weights @ np.array([fit.coefficients for fit in self._fits]))

    def drawn(self, rng: np.random.Generator) -> tuple[FloatTable, float, Vector]:
        """Return the same as :meth:`mean`, drawn from everything that is still possible."""
        return self._law(self._fits[int(rng.choice(len(self._fits), p=self._weights))].draw(rng))

    def _law(self, theta: Vector) -> tuple[FloatTable, float, Vector]:
        c, k, count = self._table.shape[1], self._features, len(self._kinds)
        factors = theta[1 + k :].reshape(-1, c)  # of choices, of kinds, of groups
        own = 1.0 + factors[0] + factors[1 + count :]
        for factor, kind in zip(factors[1:], self._kinds, strict=False):
            own[list(kind)] += factor
        table = self._table * own
        return np.where(self._allowed, table, np.inf), self._base + float(theta[0]), self._prior + theta[1 : 1 + k]
