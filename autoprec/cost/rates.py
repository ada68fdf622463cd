"""How much of its peak a device reaches, per recipe family: the parameters that calibration replaces.

The defaults are fitted on one half of the published tables and scored on the other half (``benchmarks/cost_model.py``
prints both; docs/cost-model.md says which rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoprec.errors import FileError
from autoprec.hardware import Target

__all__ = ["Rates", "default_rates"]


@dataclass(frozen=True)
class Rates:
    """What a device reaches in practice.

    Attributes:
        gemm: family -> fraction of the dense peak that a large GEMM reaches.
        cast: family -> fraction of the memory bandwidth that its quantisation kernels reach.
        quantise_us: family -> fixed microseconds per quantised operand (amax, scale and swizzle kernels).
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
    label: str = "modelled, uncalibrated"

    def to_dict(self) -> dict[str, Any]:
        """Return the plain-data form of a calibration file."""
        return {
            "gemm": dict(self.gemm),
            "cast": dict(self.cast),
            "quantise_us": dict(self.quantise_us),
            "bandwidth": self.bandwidth,
            "launch_us": self.launch_us,
            "host_us": self.host_us,
            "attention": self.attention,
            "error": dict(self.error),
        }

    def merged(self, document: Mapping[str, Any], label: str) -> Rates:
        """Return these rates with what a calibration measured put over them.

        Raises:
            FileError: a value that is no positive number.
        """
        values: dict[str, Any] = {}
        for name in ("gemm", "cast", "quantise_us", "error"):
            values[name] = {**getattr(self, name), **document.get(name, {})}
            for family, value in values[name].items():
                if not isinstance(value, (int, float)) or value < 0 or (name != "quantise_us" and value == 0):
                    raise FileError(f"rates.{name}.{family} is {value!r}, not a positive number", where="calibration")
        for name in ("bandwidth", "launch_us", "host_us", "attention"):
            value = document.get(name, getattr(self, name))
            if not isinstance(value, (int, float)) or value <= 0:
                raise FileError(f"rates.{name} is {value!r}, not a positive number", where="calibration")
            values[name] = float(value)
        return replace(self, **values, label=label)


_GEMM = {"fp32": 0.85, "tf32": 0.75, "bf16": 0.73, "fp16": 0.73, "int8": 0.6}
_ERROR = {"fp32": 0.15, "tf32": 0.15, "bf16": 0.12, "fp16": 0.12, "nvfp4": 0.3, "int8": 0.3, "rest": 0.35}

# gemm, cast and quantise_us: benchmarks/fit_rates.py on the rows marked `fit` of published.yaml (2026-11), rounded.
# No Blackwell row measures row-wise scaling alone: its ratio to tensor-wise is Hopper's. int8 and the consumer cards
# rest on no measurement.
_HOPPER = Rates(
    gemm={
        **_GEMM,
        "bf16": 0.74,
        "fp16": 0.74,
        "fp8_tensor": 0.68,
        "fp8_delayed": 0.68,
        "fp8_row": 0.62,
        "fp8_block": 0.58,
    },
    cast={"fp8_tensor": 0.62, "fp8_delayed": 0.93, "fp8_row": 0.63, "fp8_block": 0.67, "int8": 0.63},
    quantise_us={"fp8_tensor": 2.0, "fp8_delayed": 2.0, "fp8_row": 2.0, "fp8_block": 2.0, "int8": 2.0},
    error={**_ERROR, "fp8_tensor": 0.12, "fp8_delayed": 0.12, "fp8_row": 0.15, "fp8_block": 0.12},
)
_BLACKWELL = Rates(
    gemm={
        **_GEMM,
        "bf16": 0.7,
        "fp16": 0.7,
        "fp8_tensor": 0.7,
        "fp8_delayed": 0.7,
        "fp8_row": 0.65,
        "fp8_block": 0.62,
        "mxfp8": 0.63,
        "nvfp4": 0.40,
    },
    cast={
        "fp8_tensor": 0.55,
        "fp8_delayed": 0.80,
        "fp8_row": 0.55,
        "fp8_block": 0.7,
        "mxfp8": 0.7,
        "nvfp4": 0.65,
        "int8": 0.5,
    },
    quantise_us={
        "fp8_tensor": 12.0,
        "fp8_delayed": 8.0,
        "fp8_row": 12.0,
        "fp8_block": 8.0,
        "mxfp8": 12.0,
        "nvfp4": 25.0,
        "int8": 12.0,
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
)
_CDNA3 = Rates(
    gemm={**_GEMM, "bf16": 0.5, "fp16": 0.5, "tf32": 0.4, "fp8_tensor": 0.35, "fp8_delayed": 0.35, "fp8_row": 0.35},
    cast={"fp8_tensor": 0.5, "fp8_delayed": 0.5, "fp8_row": 0.4, "int8": 0.4},
    quantise_us={"fp8_tensor": 8.0, "fp8_delayed": 6.0, "fp8_row": 8.0, "int8": 8.0},
    bandwidth=0.7,
    error={**_ERROR, "bf16": 0.25, "fp8_tensor": 0.25, "fp8_delayed": 0.25, "fp8_row": 0.25},
)
#: target -> what its kernels reach of the architecture's rates: torchao's compiled casts on a B200, fitted on its
#: tensor-wise Llama3-8B row; Transformer Engine's (measured on a B300) are what _BLACKWELL says.
_CASTS = {"b200": 0.56, "gb200": 0.56}
_BY_ARCHITECTURE = {
    "hopper": _HOPPER,
    "blackwell": _BLACKWELL,
    "blackwell-rtx": _BLACKWELL,
    "cdna3": _CDNA3,
}


def default_rates(target: Target) -> Rates:
    """Return the uncalibrated rates of a target's architecture; an unknown one is taken as Hopper-like."""
    rates = _BY_ARCHITECTURE.get(target.architecture, _HOPPER)
    slower = _CASTS.get(target.name, 1.0)
    return rates if slower == 1.0 else replace(rates, cast={name: v * slower for name, v in rates.cast.items()})
