"""How gradient errors change from a small model to a large one: the law that carries a table of errors over.

The relative error that a role causes in all its blocks together hardly depends on depth: with twice the blocks each has
half the share of the squared gradient. It falls with the width (wider sums average roundings out) and rises a little
with the tokens of a step, as the gradient that errors are measured against loses its noise. The powers are fitted on
tiny GPTs and ViTs (``benchmarks/transfer``) whose initial weights and learning rates follow the width as in muP;
without that, models of different width are not in the same state, and no power fits. What lies beyond the measured
range is held at its end.

Most of what is left is not the size: two seeds of one model differ by 1.2 to 1.4x in their errors, a proxy's and a big
model's seed together by more. :data:`SPREAD` is what to expect, and the spot check asks the model itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from autoprec.graph.report import Layer


@dataclass(frozen=True, slots=True)
class Growth:
    """How many times as wide and as deep a model is, and how many times the tokens its step has."""

    width: float = 1.0
    depth: float = 1.0
    tokens: float = 1.0

    def to_json(self) -> dict[str, float]:
        """Return plain data, three significant digits."""
        return {name: float(f"{value:.3g}") for name, value in asdict(self).items()}

    def describe(self) -> str:
        """Return the text form: ``width x8, depth x4, tokens x32``."""
        return ", ".join(f"{name} x{value:g}" for name, value in self.to_json().items())


#: axis -> power of the relative gradient error of a role in all its blocks. Fitted to errors at one step of training;
#: means over four steps depend less on the width (benchmarks/results/2026-11-23_transfer.md).
ERROR_POWERS: Mapping[str, float] = {"width": -0.35, "depth": -0.1, "tokens": 0.25}
#: The same of the mini-batch noise, relative to the gradient: neither width nor depth was seen to change it.
NOISE_POWERS: Mapping[str, float] = {"tokens": -0.125}
#: Factor, either way, within which nine of ten predictions were.
SPREAD = 1.9
#: Factors between the smallest and the largest size that was measured.
MEASURED: Mapping[str, float] = {"width": 8.0, "depth": 4.0, "tokens": 16.0}


def _factor(grown: Growth, powers: Mapping[str, float]) -> float:
    """Return the product of the powers, each factor of growth held within what was measured."""
    sizes = asdict(grown)
    held = [min(max(sizes[axis], 1.0 / MEASURED[axis]), MEASURED[axis]) ** power for axis, power in powers.items()]
    return float(math.prod(held))


def error_factor(grown: Growth) -> float:
    """Return the factor of the relative gradient error that a role causes in all its blocks together."""
    return _factor(grown, ERROR_POWERS)


def noise_factor(grown: Growth) -> float:
    """Return the factor of the mini-batch gradient noise, relative to the gradient."""
    return _factor(grown, NOISE_POWERS)


def growth(pairs: Sequence[tuple[Layer, Layer]], blocks: Mapping[str, tuple[int, int]]) -> Growth:
    """Return the growth from a proxy to a big model.

    Args:
        pairs: (layer of the big model, its counterpart), with their recorded GEMMs.
        blocks: per series of blocks, (blocks of the big model, of the proxy).
    """
    widths, tokens = [], []
    for big, small in pairs:
        one, other = (
            next((g for g in layer.gemms if g.role in ("fprop", "recompute")), None) for layer in (big, small)
        )
        if one is not None and other is not None and "head" not in big.flags:
            widths.append(math.log(one.k * one.n / (other.k * other.n)) / 2)
            tokens.append(math.log(one.m * one.calls * one.batch / (other.m * other.calls * other.batch)))
    depths = [math.log(big / small) for big, small in blocks.values() if small > 1 or big > 1]
    return Growth(*(math.exp(statistics.median_high(logs or [0.0])) for logs in (widths, depths, tokens)))
