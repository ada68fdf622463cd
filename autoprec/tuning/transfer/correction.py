"""What the passes of a spot check say of the law: how far off it is on one big model, by kind of layer.

``autoprec transfer`` predicts errors from the proxy; ``autoprec check --sensitivity`` measures some of them on the big
model. Their ratios correct every other prediction: what was asked by its own ratio, the same layers under another
recipe by the mean ratio of these layers, the rest by the mean of all. A ratio counts by half its logarithm: errors at
one training step differ from those some steps later by about as much as predictions are off (``benchmarks/transfer``),
so the geometric mean of what was predicted and what was measured is nearer to the error over many steps than either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoprec.errors import FileError

#: Power of a measured ratio that a prediction is multiplied with.
_TRUST = 0.5


def segment_name(alike: str, choice: str) -> str:
    """Return the name of a segment: the same layers in every block (``h.*.mlp.up``), under one choice."""
    return f"{alike}|{choice}"


def split_segment(segment: str) -> tuple[str, str]:
    """Return what :func:`segment_name` joined."""
    alike, _, choice = segment.rpartition("|")
    return alike, choice


@dataclass(frozen=True)
class Correction:
    """Measured over predicted gradient error on the big model; predicted by the law alone.

    Attributes:
        ratios: segment -> measured over predicted; those that could be compared.
        noise: mini-batch gradient noise of the big model, relative to the gradient; NaN where it was not measured.
    """

    ratios: Mapping[str, float] = field(default_factory=dict)
    noise: float = math.nan

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, where: str) -> Correction:
        """Read what ``autoprec check --sensitivity N --json`` printed.

        Raises:
            FileError: it has no spot check, or none that had a prediction to compare with.
        """
        found = document.get("sensitivity")
        if not isinstance(found, Mapping) or not isinstance(found.get("rows"), list):
            raise FileError(
                "has no spot check",
                where=where,
                fix="autoprec check --policy big.yaml --sensitivity 8 --json train_big.py > spot.json",
            )
        ratios = {str(row["name"]): row.get("of_law") for row in found["rows"] if "|" in str(row["name"])}
        known = {name: float(ratio) for name, ratio in ratios.items() if ratio and 0.0 < float(ratio) < math.inf}
        if not known:
            raise FileError(
                "compares nothing: the policy that was checked carries no predictions",
                where=where,
                fix="transfer with the proxy's study (--from), and check the policy that this writes",
            )
        noise = found.get("noise")
        return cls(known, float(noise) if noise else math.nan)

    def factor(self, alike: str, choice: str) -> float:
        """Return what to multiply the predicted error of these layers under a choice with."""
        own = self.ratios.get(segment_name(alike, choice))
        same = [ratio for segment, ratio in self.ratios.items() if split_segment(segment)[0] == alike]
        return math.pow(_mean([own] if own is not None else same or self.ratios.values()), _TRUST)


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0
