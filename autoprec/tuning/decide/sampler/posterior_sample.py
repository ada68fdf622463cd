"""A world the models allow, and what a point would be worth in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoprec.tuning.decide.pareto import added_area
from autoprec.tuning.decide.sampler.posterior import Belief
from autoprec.tuning.decide.tables import FloatTable, IntVector

__all__ = ["Candidate", "World"]

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """A drawn truth, and where everything that was asked lies in it: ``asked`` is (relative time, ln divergence)."""

    belief: Belief
    table: FloatTable
    base: float
    effects: Vector
    unit: float
    asked: FloatTable

    def places(self, index: npt.NDArray[np.int64], features: FloatTable, base2: Vector) -> FloatTable:
        """Return (relative time, ln divergence) ``[N, 2]`` of assignments ``[N, G]``."""
        times = self.base + self.table[np.arange(index.shape[1]), index].sum(axis=1) + features @ self.effects
        gaps = self.belief.divergences(index, features, base2)
        return np.stack([times / self.unit, np.log(np.maximum(gaps, 1e-9))], axis=1)

    def gains(self, places: FloatTable) -> Vector:
        """Return by how much each place would enlarge what was asked."""
        every = np.concatenate([self.asked, places])
        corner = every.max(axis=0)
        return added_area(self.asked, places, (float(corner[0]) * 1.02, float(corner[1]) + 0.1))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point that could be asked."""

    index: IntVector
    parameters: dict[str, Any]
    features: Vector
    base2: float
