"""What a transferred policy is predicted to do to the big model's gradient.

The proxy's table of squared errors, one row per group, times the law of :mod:`.law` for the growth from one model to
the other, times what a spot check found there (:mod:`.correction`). All errors and noises are relative to the gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoprec.graph.roles import Place
from autoprec.policy import Policy
from autoprec.policy.solver import FloatTable, IntVector
from autoprec.policy.space import Choice
from autoprec.precision.recipes import KEEP
from autoprec.support.arrays import np
from autoprec.tuning.decide.problem import GroupVariable, Problem
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.transfer.correction import Correction, segment_name, split_segment
from autoprec.tuning.transfer.counterparts import Counterparts
from autoprec.tuning.transfer.law import Growth, error_factor, noise_factor
from autoprec.tuning.transfer.proxy import Proxy, around2


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the law says of the transferred policy on the big model; NaN where the proxy's study is not known.

    ``error`` and ``noise`` are relative to the gradient, ``budget`` is the most that was allowed, ``segments`` the
    error of each kind of layer under its recipe (:func:`segment_of`), ``factors`` what a spot check corrected those by.
    """

    error: float = math.nan
    noise: float = math.nan
    budget: float = math.nan
    segments: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)


def segment_of(group: str, here: Mapping[str, Place], layers: Sequence[str], choice: str) -> str:
    """Return the name of the segment of a group: the same layers in every block, under one choice."""
    return segment_name(here[layers[0]].alike if layers else group, choice)


@dataclass(frozen=True)
class Forecast:
    """Predicted errors of the big model's groups under every choice.

    Attributes:
        policy: of the proxy.
        proxy, errors: the small model, and its table.
        problem: groups and choices of the big model: rows and columns of :attr:`table`.
        matched: the counterparts of the big model's layers in the proxy.
        grown: from the proxy to the big model.
        correction: what a spot check found on the big model.
    """

    policy: Policy
    proxy: Proxy
    errors: SensitivityTable
    problem: Problem
    matched: Counterparts
    grown: Growth
    correction: Correction

    @cached_property
    def table(self) -> FloatTable:
        """``[G, C]`` predicted squared errors on the big model; infinite where the proxy was not asked."""
        return self.problem.table(self.error2)

    def error2(self, group: GroupVariable, choice: str) -> float:
        """Return the predicted squared error of one group under a choice; infinite where the proxy was not asked."""
        if choice == KEEP:
            return 0.0
        rows = self._counterpart_rows(group)
        if not rows:  # nothing was measured of such a layer: it may run what changes nothing, or 16 bits
            return math.inf if Choice.parse(choice).plan(self.problem.space.all_recipes).scaled else 0.0
        alike = self.matched.here[group.layers[0]].alike
        factor = error_factor(self.grown) * self.correction.factor(alike, choice)
        return factor**2 * sum(
            self.proxy.error2(self.errors, name, choice) * blocks / self._sharing[key]
            for key, (name, blocks) in rows.items()
        )

    @cached_property
    def _sharing(self) -> Counter[tuple[int, str, int]]:
        """How many groups of a block here share one row of the proxy's table (a fused q/k/v in three parts)."""
        return Counter(key for group in self.problem.groups for key in self._counterpart_rows(group))

    def _counterpart_rows(self, group: GroupVariable) -> dict[tuple[int, str, int], tuple[str, float]]:
        """Return (row of the proxy's table, stack, block) -> (a layer of it, blocks of the proxy per block here)."""
        out = {}
        for name in group.layers:
            if self.matched.of.get(name) in self.proxy.rows:
                place, small = self.matched.pair(name)
                out[self.proxy.rows[small.name], place.stack, place.rank] = (small.name, small.count / place.count)
        return out

    @cached_property
    def noise(self) -> float:
        """Mini-batch gradient noise of the big model: measured, else by the law; NaN where the proxy's is not known."""
        if math.isfinite(self.correction.noise):
            return self.correction.noise
        return self.errors.noise * noise_factor(self.grown) if self.errors.noise else math.nan

    def error(self, index: IntVector) -> float:
        """Return the predicted error of a policy, given as a column of :attr:`table` per group."""
        return self._root(self.table[np.arange(len(index)), index])

    def _root(self, squares: Sequence[float] | FloatTable) -> float:
        known = sum(float(s) for s in squares if math.isfinite(s)) + around2(self.errors, self.policy)
        return math.sqrt(known) * self.errors.misfit.ratio

    def budget(self, mapped: Sequence[str], max_gradient_error: float) -> float:
        """Return the most predicted error that is allowed: what the proxy's policy would cause here, nothing dropped.

        Or what it caused there, in units of the mini-batch noise, if that is more; never more than the limit.

        Args:
            mapped: what the proxy's policy asks of every group of the big model.
            max_gradient_error: the limit, as a share of the mini-batch gradient noise.
        """
        as_mapped = self._root([self.error2(g, choice) for g, choice in zip(self.problem.groups, mapped, strict=True)])
        if not self.errors.noise:
            return as_mapped
        as_there = self.proxy.predicted(self.policy) / self.errors.noise * self.noise
        return min(max(as_there, as_mapped), max_gradient_error * self.noise)

    def room(self, budget: float) -> float:
        """Return the sum of squared errors that the layers may have within a budget."""
        return max(0.0, (budget / self.errors.misfit.ratio) ** 2 - around2(self.errors, self.policy))

    def prediction(self, index: IntVector, budget: float) -> Prediction:
        """Return what is said of a policy, given as a column of :attr:`table` per group."""
        squares: dict[str, float] = {}
        for g, group in enumerate(self.problem.groups):
            choice, square = self.problem.choice_names[int(index[g])], float(self.table[g, index[g]])
            if choice != KEEP and math.isfinite(square):
                segment = segment_of(group.name, self.matched.here, group.layers, choice)
                squares[segment] = squares.get(segment, 0.0) + square
        segments = {name: math.sqrt(square) * self.errors.misfit.ratio for name, square in squares.items()}
        factors = {name: self.correction.factor(*split_segment(name)) for name in segments if self.correction.ratios}
        return Prediction(self.error(index), self.noise, budget, segments, factors)
