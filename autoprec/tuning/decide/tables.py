"""Vocabulary of the decision modules: tables of one row per group and one column per choice, limits, pair costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FloatTable", "IntVector", "Limit", "PairCosts"]

#: ``[G, C]`` float64: a row per group, a column per choice; infinite where a group does not offer a choice.
FloatTable = npt.NDArray[np.float64]
#: ``[G]`` int64: the column each group takes.
IntVector = npt.NDArray[np.int64]
#: (group, group) -> extra time ``[C, C]`` of the two groups' choices together, e.g. a cast between formats.
PairCosts = Mapping[tuple[int, int], FloatTable]


@dataclass(frozen=True, slots=True)
class Limit:
    """A further additive quantity ``[G, C]`` (memory, a second error measure) and its upper bound."""

    cost: FloatTable
    bound: float
