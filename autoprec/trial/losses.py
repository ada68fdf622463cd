"""The unit in which loss gaps are measured, for the trial that ends itself early and for the search that scores it.

A gap is relative to the reference's loss at the same step. Where a loss goes to zero (regression on clean data, a
classifier that has learnt its training set) that ratio is meaningless: 1e-6 against 3e-6 is a gap of 200 % that does
not matter. So the unit never falls below a tenth of the loss that training started from; curves that stay above it, as
those of language models do, are measured relatively throughout.

Where a metric of the script's own takes the place of the loss, its values are a :class:`Series`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.support.plain import Document, or_null, rebuild, shallow

#: Which values of a metric are better.
LOWER, HIGHER = "lower", "higher"
#: What a trial measures itself between the two sides of reinforcement learning; less of either is no fault.
MISMATCH = ("rollout_kl", "rollout_flips")
#: Share of the initial (or usual, whichever is larger) loss below which gaps are absolute.
_LEAST_SHARE = 0.1


def loss_units(reference: Sequence[float]) -> list[float]:
    """Return the unit of a loss gap at every step of a reference: positive, finite where the loss is."""
    sizes = [abs(v) for v in reference]
    finite = [v for v in sizes if math.isfinite(v)]
    if not any(finite):
        return [1.0] * len(sizes)
    start = statistics.fmean(finite[: max(1, len(finite) // 4)])
    least = _LEAST_SHARE * max(start, statistics.median(finite))
    return [max(v, least) if math.isfinite(v) else v for v in sizes]


@dataclass(frozen=True, slots=True)
class Series:
    """What a run reported of the metric that it was asked for.

    Attributes:
        name: the metric.
        higher: more of it is better.
        steps: how many steps were done at a report, each number once.
        values: what was last reported before the next step.
        names: every metric that was reported.
        source: who reported this one.
    """

    name: str
    higher: bool = False
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    source: str = ""

    @property
    def curve(self) -> tuple[float, ...]:
        """The values as those of a loss, of which less is better: with their sign turned where more is."""
        return tuple(-value for value in self.values) if self.higher else self.values

    def to_json(self) -> Document:
        """Return the JSON form; values that are not finite are null."""
        return shallow(self) | {"values": or_null(self.values)}

    @classmethod
    def from_json(cls, document: Document | None) -> Series | None:
        """Rebuild from :meth:`to_json`; None from None."""
        return None if document is None else rebuild(cls, document)
