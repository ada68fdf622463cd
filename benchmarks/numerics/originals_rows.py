"""One row of the table of originals, and the values that are compared in it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoprec.precision.recipes import Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class Row:
    """One comparison; ``limit`` is the original's own rounding, 0 where bits must be equal."""

    quantity: str
    original: str
    ours: Tensor
    theirs: Tensor
    limit: float = 0.0
    reason: str = ""

    @property
    def difference(self) -> float:
        """Largest difference, relative to the original's largest value; NaN counts as equal to NaN."""
        ours, theirs = self.ours.double().nan_to_num(nan=-1.0), self.theirs.double().nan_to_num(nan=-1.0)
        if torch.equal(ours, theirs):
            return 0.0
        finite = (ours - theirs).abs()
        return float(finite.max() / theirs.abs().max().clamp_min(1e-300))

    @property
    def verdict(self) -> str:
        """What the table says."""
        if self.difference == 0.0:
            return "bit-equal"
        if self.difference <= self.limit:
            return "within rounding"
        return "differs, see reason" if self.reason and not self.limit else "DIFFERENT"


Comparison = Callable[[], Iterator[Row]]
COMPARISONS: list[Comparison] = []


def comparison(function: Comparison) -> Comparison:
    """Add a comparison to the table."""
    COMPARISONS.append(function)
    return function


def version(package: str) -> str:
    """Return ``name version`` as installed."""
    return f"{package} {importlib.metadata.version(package).split('+')[0]}"


def wide(count: int, seed: int = 3) -> Tensor:
    """Return ``[count / 128, 128]`` float32 over 30 orders of magnitude, with zeros and subnormals in it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.exp(torch.randn(count, generator=generator) * 6)
    x[::997], x[5::4999] = 0.0, 1e-41
    return x.reshape(-1, 128)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal float32 values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8(granularity: str, form: str = "e4m3", **scaling: Any) -> Recipe:
    """Return an FP8 recipe whose input has a format."""
    operands = {"input": form, "weight": "e4m3", "grad_output": "e4m3"}
    return Recipe.model_validate(
        {"format": "fp8", "scaling": {"granularity": granularity, **scaling}, "operands": operands}
    )
