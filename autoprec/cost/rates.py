"""How much of its peak a device reaches, per recipe family.

The defaults are fitted on one half of the published tables and scored on the other half
(``benchmarks/cost/cost_model.py`` prints both; docs/cost-model.md says which rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from autoprec.precision.hardware import Target
from autoprec.support.files import read_document


@dataclass(frozen=True)
class Rates:
    """What a device reaches in practice.

    Attributes:
        gemm: family -> fraction of the dense peak that a large GEMM reaches.
        cast: family -> fraction of the memory bandwidth that its quantisation kernels reach.
        eager_casts: what the casts of an uncompiled script reach of ``cast``, see :func:`kernels.eager_traffic`.
        compiled_casts: what casts compiled by torch reach of ``cast`` (see :meth:`compiled`).
        library: casts are a library's own kernels (Transformer Engine), not compiled by torch.
        quantise_us: family -> fixed microseconds per quantised operand (amax, scale and swizzle kernels).
        epilogue: family -> bytes per result value that a forward GEMM moves beyond writing its result.
        bandwidth: fraction of the memory bandwidth that plain kernels reach.
        launch_us: microseconds between two kernels on the device.
        host_us: microseconds of CPU time per eager operator (a step never runs faster than its launches).
        attention: fraction of the bf16 peak that fused attention reaches.
        error: family -> relative half width of the uncertainty of a time.
        label: what the figures rest on: ``modelled, uncalibrated`` or ``modelled, calibrated on ...`` (measured.py).
    """

    gemm: Mapping[str, float]
    cast: Mapping[str, float]
    quantise_us: Mapping[str, float]
    bandwidth: float = 0.8
    launch_us: float = 3.0
    host_us: float = 6.0
    attention: float = 0.45
    error: Mapping[str, float] = field(default_factory=dict)
    epilogue: Mapping[str, float] = field(default_factory=dict)
    eager_casts: Mapping[str, float] = field(default_factory=dict)
    compiled_casts: float = 1.0
    library: bool = True
    label: str = "modelled, uncalibrated"

    def compiled(self) -> Rates:
        """Return the rates of casts compiled by torch, as this package's native backend and torchao run them."""
        if not self.library:
            return self
        cast = {family: share * self.compiled_casts for family, share in self.cast.items()}
        return replace(self, cast=cast, compiled_casts=1.0, library=False)


@lru_cache(maxsize=1)
def _architectures() -> dict[str, Rates]:
    """Return the rates in ``rates.yaml`` by architecture."""
    document = read_document(Path(__file__).with_name("rates.yaml"))
    common = document["common"]
    merged = {
        name: row | {field: {**families, **row[field]} for field, families in common.items()}
        for name, row in document["architectures"].items()
    }
    return {name: Rates(**row) for name, row in merged.items()}


def default_rates(target: Target, *, library: bool = False) -> Rates:
    """Return the uncalibrated rates of a target's architecture; an unknown one is taken as Hopper-like.

    Args:
        library: casts are a library's own kernels (Transformer Engine); compiled by torch otherwise.
    """
    known = _architectures()
    rates = known.get(target.architecture.removesuffix("-rtx"), known["hopper"])
    return rates if library else rates.compiled()
