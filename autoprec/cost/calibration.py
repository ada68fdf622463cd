"""Calibration: rates of one device fitted from a few measured points, in a small JSON file with machine and date.

A file is laid over the default rates (``autoprec estimate --calibration FILE``); what it does not measure stays as it
was. Without one every figure is labelled *modelled, uncalibrated*.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autoprec.cost.kernels import cast_traffic, gemm_seconds
from autoprec.cost.rates import Rates, default_rates
from autoprec.errors import FileError, UsageError
from autoprec.files import read_document
from autoprec.hardware import Target
from autoprec.recipes import BUILTIN_RECIPES

__all__ = ["CAST_SHAPES", "GEMM_SHAPES", "SCHEMA", "Bench", "Point", "calibrate", "fit_rates", "load_calibration"]

SCHEMA = "autoprec.calibration/1"
_KEYS = {"schema", "device", "target", "machine", "versions", "date", "rates", "points", "label", "seconds"}
#: M, K, N of the measured GEMMs: square and large, as a transformer has them, and small.
GEMM_SHAPES = ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 4096, 4096), (2048, 1024, 4096), (1024, 1024, 1024))
#: Rows and columns of the measured casts.
CAST_SHAPES = ((8192, 8192), (8192, 4096), (2048, 2048), (512, 1024))
_RECIPES = {
    "fp8_tensor": "fp8_tensorwise",
    "fp8_delayed": "fp8_delayed",
    "fp8_row": "fp8_rowwise",
    "fp8_block": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a GEMM (shape M, K, N), a cast in both layouts (rows, columns), a copy, or an empty launch."""

    kind: str
    family: str
    shape: tuple[int, ...]
    seconds: float


class Bench(Protocol):
    """What can be measured on a device; None where it cannot run, and then the default stays."""

    def gemm(self, family: str, m: int, k: int, n: int) -> float | None:
        """Return seconds of one GEMM on operands that are quantised already."""

    def cast(self, family: str, rows: int, columns: int) -> float | None:
        """Return seconds to quantise one bf16 operand for both of its uses."""

    def copy(self, size: int) -> float | None:
        """Return seconds to copy ``size`` bytes inside the device."""

    def launch(self) -> float | None:
        """Return seconds between two kernels that do nothing."""

    def versions(self) -> dict[str, str]:
        """Return the versions the figures depend on."""


def measure_points(bench: Bench, target: Target, say: Callable[[str], None] = lambda _line: None) -> list[Point]:
    """Measure every point that the device can run."""
    points: list[Point] = []

    def add(kind: str, family: str, shape: tuple[int, ...], seconds: float | None) -> None:
        if seconds is None:
            return
        points.append(Point(kind, family, shape, seconds))
        say(f"{kind} {family} {'x'.join(str(size) for size in shape)}: {seconds * 1e6:.1f} us".replace("  ", " "))

    for family in ("fp32", "bf16", *_RECIPES):
        recipe = BUILTIN_RECIPES[_RECIPES.get(family, family)]
        if not target.can_run(recipe).ok:
            continue
        for shape in GEMM_SHAPES:
            add("gemm", family, shape, bench.gemm(family, *shape))
        if family in _RECIPES:
            for rows, columns in CAST_SHAPES:
                add("cast", family, (rows, columns), bench.cast(family, rows, columns))
    add("copy", "", (1 << 30,), bench.copy(1 << 30))
    add("launch", "", (), bench.launch())
    return points


def fit_rates(target: Target, points: Sequence[Point]) -> dict[str, Any]:
    """Return the part of :class:`Rates` that the points determine.

    GEMM: the share of the peak whose modelled times have a median ratio of one to the measured. Casts: bandwidth
    share and fixed cost by least squares on relative errors. ``error`` is the spread of what is left.
    """
    base = default_rates(target)
    out: dict[str, Any] = {"gemm": {}, "cast": {}, "quantise_us": {}, "error": {}}
    for point in points:
        if point.kind == "copy":
            out["bandwidth"] = min(1.0, 2.0 * point.shape[0] / point.seconds / target.bandwidth)
        elif point.kind == "launch":
            out["launch_us"] = max(0.1, point.seconds * 1e6)
    known = base.merged({key: value for key, value in out.items() if not isinstance(value, dict)}, base.label)
    for family in sorted({point.family for point in points if point.kind == "gemm"}):
        mine = [point for point in points if point.kind == "gemm" and point.family == family]
        share, spread = _fit_gemm(target, known, family, mine)
        out["gemm"][family], out["error"][family] = share, spread
    for family in sorted({point.family for point in points if point.kind == "cast"}):
        mine = [point for point in points if point.kind == "cast" and point.family == family]
        out["cast"][family], out["quantise_us"][family] = _fit_cast(target, family, mine)
    return {key: value for key, value in out.items() if value}


def _fit_gemm(target: Target, rates: Rates, family: str, points: Sequence[Point]) -> tuple[float, float]:
    share = rates.gemm.get(family, 0.6)
    ratios = [1.0]
    for _ in range(8):  # the launch and the traffic bound do not scale, so the ratio is approached in steps
        trial = rates.merged({"gemm": {family: share}}, rates.label)
        ratios = [gemm_seconds(target, trial, family, p.shape[0], p.shape[1], p.shape[2]) / p.seconds for p in points]
        share = min(1.0, max(0.01, share * statistics.median(ratios)))
    return share, max(0.05, statistics.median(abs(ratio - 1.0) for ratio in ratios))


def _fit_cast(target: Target, family: str, points: Sequence[Point]) -> tuple[float, float]:
    moved, _ = cast_traffic(family, (0, 1), 2.0, layouts=target.layouts, library=False)
    ideal = np.array([moved * p.shape[0] * p.shape[1] / target.bandwidth for p in points])
    seconds = np.array([p.seconds for p in points])
    rows = np.stack([ideal, np.ones_like(ideal)], axis=1) / seconds[:, None]
    slope, fixed = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, float(np.median(seconds / ideal))
    return float(min(1.0, max(0.01, 1.0 / max(slope, 1e-6)))), float(fixed * 1e6)


def calibrate(
    bench: Bench, target: Target, device: str, date: str, say: Callable[[str], None] = lambda _line: None
) -> dict[str, Any]:
    """Measure a device and return the document that :func:`load_calibration` reads.

    Raises:
        UsageError: nothing could be measured.
    """
    points = measure_points(bench, target, say)
    if not points:
        raise UsageError(f"nothing could be measured on {device}", fix="`autoprec doctor` says what works here")
    return {
        "schema": SCHEMA,
        "device": device,
        "target": target.name,
        "machine": f"{platform.node()} ({platform.machine()})",
        "versions": bench.versions(),
        "date": date,
        "rates": fit_rates(target, points),
        "points": [asdict(point) for point in points],
    }


def load_calibration(path: Path | str) -> dict[str, Any]:
    """Read a calibration file written by ``autoprec calibrate``.

    Raises:
        FileError: missing, malformed, or of another schema.
    """
    document = read_document(path)
    fix = "write it with `autoprec calibrate`"
    if document.get("schema") != SCHEMA:
        raise FileError(f"schema is {document.get('schema')!r}, not {SCHEMA}", where=str(path), fix=fix)
    unknown = sorted(set(document) - _KEYS)
    if unknown:
        raise FileError(f"unknown key '{unknown[0]}'", where=str(path), fix=f"valid: {', '.join(sorted(_KEYS))}")
    for key in ("device", "date", "rates"):
        if key not in document:
            raise FileError(f"'{key}' is missing", where=str(path), fix=fix)
    if not isinstance(document["rates"], dict):
        raise FileError("'rates' is no mapping", where=str(path), fix=fix)
    document.setdefault("label", f"modelled, calibrated on {document['device']} ({document['date']})")
    return document
