"""How much of its peak a device reaches, per recipe family: the parameters that calibration replaces.

The defaults are fitted on one half of the published tables and scored on the other half
(``benchmarks/cost/cost_model.py`` prints both; docs/cost-model.md says which rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from autoprec.errors import FileError
from autoprec.precision.hardware import Target


@dataclass(frozen=True)
class Rates:
    """What a device reaches in practice.

    Attributes:
        gemm: family -> fraction of the dense peak that a large GEMM reaches.
        cast: family -> fraction of the memory bandwidth that its quantisation kernels reach.
        compiled_casts: what casts compiled by torch reach of ``cast`` (see :meth:`compiled`).
        library: casts are a library's own kernels (Transformer Engine), not compiled by torch.
        quantise_us: family -> fixed microseconds per quantised operand (amax, scale and swizzle kernels).
        epilogue: family -> bytes per result value that a forward GEMM moves beyond writing its result.
        bandwidth: fraction of the memory bandwidth that plain kernels reach.
        launch_us: microseconds between two kernels on the device.
        host_us: microseconds of CPU time per eager operator (a step never runs faster than its launches).
        attention: fraction of the bf16 peak that fused attention reaches.
        error: family -> relative half width of the uncertainty of a time.
        label: what the figures rest on: ``modelled, uncalibrated`` or ``modelled, calibrated on ...``.
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
    compiled_casts: float = 1.0
    library: bool = True
    label: str = "modelled, uncalibrated"

    def compiled(self) -> Rates:
        """Return the rates of casts compiled by torch, as this package's native backend and torchao run them."""
        if not self.library:
            return self
        cast = {family: share * self.compiled_casts for family, share in self.cast.items()}
        return replace(self, cast=cast, compiled_casts=1.0, library=False)

    def merged(self, document: Mapping[str, Any], label: str) -> Rates:
        """Return these rates with what a calibration measured put over them.

        Raises:
            FileError: an unknown name, a value that is not a positive number, or a share above 1.
        """
        fix = "write the file with `autoprec calibrate`"
        for name, value in document.items():
            if name not in MEASURED:
                raise FileError(f"unknown rates.{name}", where="calibration", fix=f"valid: {', '.join(MEASURED)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
            if not number or value <= 0:
                raise FileError(f"rates.{name} is {value!r}, not a positive number", where="calibration", fix=fix)
            if name == "bandwidth" and value > 1:
                raise FileError(f"rates.{name} is {value!r}, a share above 1", where="calibration", fix=fix)
        values: dict[str, Any] = {name: float(value) for name, value in document.items()}
        return replace(self, **values, label=label)


#: What a calibration measures of these; linears correct the rest.
MEASURED = ("bandwidth", "launch_us", "host_us")
_GEMM = {"fp32": 0.85, "tf32": 0.75, "bf16": 0.73, "fp16": 0.73, "int8": 0.6}
_ERROR = {"fp32": 0.15, "tf32": 0.15, "bf16": 0.12, "fp16": 0.12, "nvfp4": 0.3, "int8": 0.3, "rest": 0.35}

# benchmarks/cost/fit_rates.py on the rows marked `fit` of published.yaml (2026-11), rounded. fp8_row reaches what
# fp8_tensor reaches wherever no row tells them apart; fp8_block on Blackwell casts like mxfp8. int8 and the consumer
# cards rest on no measurement.
# Two implementations of casts were published: Transformer Engine's kernels and casts compiled by torch, which reach
# about half of that on Hopper and on Blackwell alike (compiled_casts; fitted on one table each).
# Hopper's row-wise forward GEMM is a CUTLASS kernel of its own, up to twice as slow as the tensor-wise one (pytorch
# issue 147971): its epilogue scales every result value and reads the result it overwrites (pytorch PR 178644), which a
# short sum does not hide. Backward products run in cuBLAS' tensor-wise kernel and are scaled afterwards (torchao's
# float8_ops), which a compiler fuses into what follows.
_HOPPER = Rates(
    gemm={
        **_GEMM,
        "bf16": 0.73,
        "fp16": 0.73,
        "fp8_tensor": 0.68,
        "fp8_delayed": 0.68,
        "fp8_row": 0.68,
        "fp8_block": 0.58,
    },
    cast={"fp8_tensor": 0.90, "fp8_delayed": 0.94, "fp8_row": 0.90, "fp8_block": 0.65, "int8": 0.90},
    quantise_us={"fp8_tensor": 2.0, "fp8_delayed": 2.0, "fp8_row": 2.0, "fp8_block": 2.0, "int8": 2.0},
    error={**_ERROR, "fp8_tensor": 0.12, "fp8_delayed": 0.12, "fp8_row": 0.15, "fp8_block": 0.12},
    epilogue={"fp8_row": 3.4},
    compiled_casts=0.55,
)
_BLACKWELL = Rates(
    gemm={
        **_GEMM,
        "bf16": 0.7,
        "fp16": 0.7,
        "fp8_tensor": 0.72,
        "fp8_delayed": 0.72,
        "fp8_row": 0.72,
        "fp8_block": 0.62,
        "mxfp8": 0.64,
        "nvfp4": 0.39,
    },
    cast={
        "fp8_tensor": 0.53,
        "fp8_delayed": 0.83,
        "fp8_row": 0.53,
        "fp8_block": 0.85,
        "mxfp8": 0.85,
        "nvfp4": 0.73,
        "int8": 0.53,
    },
    quantise_us={
        "fp8_tensor": 15.0,
        "fp8_delayed": 10.0,
        "fp8_row": 15.0,
        "fp8_block": 10.0,
        "mxfp8": 15.0,
        "nvfp4": 31.0,
        "int8": 15.0,
    },
    error={
        **_ERROR,
        "fp8_tensor": 0.15,
        "fp8_delayed": 0.15,
        "fp8_row": 0.25,
        "fp8_block": 0.25,
        "mxfp8": 0.15,
        "nvfp4": 0.25,
    },
    compiled_casts=0.52,
)
_CDNA3 = Rates(
    gemm={**_GEMM, "bf16": 0.5, "fp16": 0.5, "tf32": 0.4, "fp8_tensor": 0.33, "fp8_delayed": 0.33, "fp8_row": 0.33},
    cast={"fp8_tensor": 0.5, "fp8_delayed": 0.5, "fp8_row": 0.5, "int8": 0.5},
    quantise_us={"fp8_tensor": 8.0, "fp8_delayed": 6.0, "fp8_row": 8.0, "int8": 8.0},
    bandwidth=0.7,
    error={**_ERROR, "bf16": 0.25, "fp8_tensor": 0.25, "fp8_delayed": 0.25, "fp8_row": 0.25},
)
_BY_ARCHITECTURE = {
    "hopper": _HOPPER,
    "blackwell": _BLACKWELL,
    "blackwell-rtx": _BLACKWELL,
    "cdna3": _CDNA3,
}


def default_rates(target: Target, *, library: bool = False) -> Rates:
    """Return the uncalibrated rates of a target's architecture; an unknown one is taken as Hopper-like.

    Args:
        library: casts are a library's own kernels (Transformer Engine); compiled by torch otherwise.
    """
    rates = _BY_ARCHITECTURE.get(target.architecture, _HOPPER)
    return rates if library else rates.compiled()
