"""One posterior sample: everything known for certain for once, and what a point would be worth if it were so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoprec.tuning.decide.pareto import added_area
from autoprec.tuning.decide.problem import FloatTable, IntVector
from autoprec.tuning.decide.sampler.posterior import DivergenceLaw

__all__ = ["Candidate", "PosteriorSample"]

Vector = npt.NDArray[np.float64]
#: Where the hypervolume is bounded beyond the worst point: a share of its time, and nats of divergence.
_BEYOND_TIME, _BEYOND_LN_GAP = 1.02, 0.1
#: Divergences below this are not told apart.
_LEAST_GAP = 1e-9


@dataclass(frozen=True)
class PosteriorSample:
    """A draw of both models, and where the points that were asked lie in it.

    Attributes:
        law: how an assignment comes to its divergence.
        time_ms: ``[G, C]`` milliseconds of each group under each choice.
        base_ms: milliseconds outside the groups.
        effects: ``[K]`` milliseconds of each parameter feature.
        unit: the size of a step time, milliseconds; times are compared in this unit.
        asked: ``[N, 2]`` (time in units, ln divergence) of the points asked so far; their single noisy measurements
            are only what the posterior learned from.
    """

    law: DivergenceLaw
    time_ms: FloatTable
    base_ms: float
    effects: Vector
    unit: float
    asked: FloatTable

    def places(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> FloatTable:
        """Return (time in units, ln divergence) ``[N, 2]`` of assignments ``[N, G]`` with features ``[N, K]``."""
        times = self.base_ms + self.time_ms[np.arange(index.shape[1]), index].sum(axis=1) + features @ self.effects
        gaps = self.law.divergences(index, features, base2)
        return np.stack([times / self.unit, np.log(np.maximum(gaps, _LEAST_GAP))], axis=1)

    def gains(self, places: FloatTable) -> Vector:
        """Return by how much each place alone would enlarge the hypervolume of what was asked."""
        every = np.concatenate([self.asked, places])
        corner = every.max(axis=0)
        bound = (float(corner[0]) * _BEYOND_TIME, float(corner[1]) + _BEYOND_LN_GAP)
        return added_area(self.asked, places, bound)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point that could be asked: columns ``[G]``, parameter values and features ``[K]``, their squared error."""

    index: IntVector
    parameters: dict[str, Any]
    features: Vector
    base2: float
