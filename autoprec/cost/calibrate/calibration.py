"""Calibration: rates of one device fitted from a few measured points, in a small JSON file with machine and date.

A file is laid over the default rates (``autoprec estimate --calibration FILE``); what it does not measure stays as it
was. Without one every figure is labelled *modelled, uncalibrated*.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoprec.cost.calibrate.linears import Linears
from autoprec.cost.kernels import cast_traffic, gemm_seconds
from autoprec.cost.rates import Rates, default_rates
from autoprec.errors import FileError, UsageError
from autoprec.precision.hardware import Target
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.files import cache_folder, read_document
from autoprec.support.optional import installed_version

if TYPE_CHECKING:
    from autoprec.cost.calibrate.cuda_bench import CudaBench

SCHEMA = "autoprec.calibration/2"
#: Schemas that are read: the first had no timed linears.
_READ = ("autoprec.calibration/1", SCHEMA)
_KEYS = {
    *("schema", "device", "target", "machine", "versions", "date", "rates", "points", "label", "seconds", "drift"),
    "linears",
}
#: M, K, N of the measured GEMMs: square and large, as a transformer has them, and small.
GEMM_SHAPES = ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 4096, 4096), (2048, 1024, 4096), (1024, 1024, 1024))
#: Rows and columns of the measured casts.
CAST_SHAPES = ((8192, 8192), (512, 1024), (4096, 2048))
#: Seconds after which no further point is begun.
LIMIT_S = 120.0
#: Families that run in the kernel of another.
_SAME_KERNEL = {"bf16": ("fp16",), "fp8_tensor": ("fp8_delayed",)}
#: What a file is laid over to see whether its rates are rates.
_ANY = Rates(gemm={}, cast={}, quantise_us={})
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
    """One measurement: gemm (shape M, K, N), cast in both layouts (rows, columns), copy (bytes), launch or host."""

    kind: str
    family: str
    shape: tuple[int, ...]
    seconds: float


def _quiet(_line: str) -> None:
    return None


def _plan(target: Target) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (kind, family, shape) of every point, what matters most first: the time may run out."""
    yield "copy", "", (1 << 30,)
    yield "launch", "", ()
    yield "host", "", ()
    families = [f for f in ("bf16", *_RECIPES, "fp32") if target.can_run(BUILTIN_RECIPES[_RECIPES.get(f, f)]).ok]
    shared = {name for names in _SAME_KERNEL.values() for name in names}
    for family in families:
        if family not in shared:
            yield from (("gemm", family, shape) for shape in GEMM_SHAPES)
    for shape in CAST_SHAPES:  # large ones of every family before small ones: each is compiled for seconds
        yield from (("cast", family, shape) for family in families if family in _RECIPES)


def measure_points(
    bench: CudaBench, target: Target, say: Callable[[str], None] = _quiet, limit_s: float = LIMIT_S
) -> list[Point]:
    """Measure every point that the device can run within ``limit_s`` seconds; what fails is said and left out."""
    points: list[Point] = []
    failed: dict[tuple[str, str], str] = {}
    start = time.monotonic()
    for kind, family, shape in _plan(target):
        name = f"{kind} {family}".rstrip()
        if (kind, family) in failed:
            continue
        if time.monotonic() - start > limit_s:
            say(f"stopped after {limit_s:.0f} s: {name} and what follows keep their defaults")
            break
        try:
            seconds = getattr(bench, kind)(*((family,) if kind in ("gemm", "cast") else ()), *shape)
        except Exception as error:  # a kernel, compiler or driver that fails takes its family along, not the rest
            failed[kind, family] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            say(f"{name}: {failed[kind, family]}; what is left of it keeps its default")
            continue
        if seconds is None or not seconds > 0:
            failed[kind, family] = "cannot be measured here"
            say(f"{name}: {failed[kind, family]}; the default is kept")
            continue
        points.append(Point(kind, family, shape, seconds))
        say(f"{name} {'x'.join(str(size) for size in shape)}: {seconds * 1e6:.1f} us")
    return points


def _drift(bench: CudaBench, points: Sequence[Point]) -> float | None:
    """Return how much slower the first GEMM runs at the end than it did: what heat and power limits took."""
    first = next((point for point in points if point.kind == "gemm"), None)
    if first is None:
        return None
    try:
        again = bench.gemm(first.family, *first.shape)
    except Exception:  # a device that died on the way: the points before are what there is
        return None
    return None if again is None else again / first.seconds - 1.0


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
        elif point.kind in ("launch", "host"):
            out[f"{point.kind}_us"] = max(0.1, point.seconds * 1e6)
    known = base.merged({key: value for key, value in out.items() if not isinstance(value, dict)}, base.label)
    for family in sorted({point.family for point in points if point.kind == "gemm"}):
        mine = [point for point in points if point.kind == "gemm" and point.family == family]
        share, spread = _fit_gemm(target, known, family, mine)
        for name in (family, *_SAME_KERNEL.get(family, ())):
            out["gemm"][name], out["error"][name] = share, spread
    for family in sorted({point.family for point in points if point.kind == "cast"}):
        mine = [point for point in points if point.kind == "cast" and point.family == family]
        fixed = known.quantise_us.get(family, 5.0)
        out["cast"][family], out["quantise_us"][family] = _fit_cast(target, family, mine, fixed)
    return {key: value for key, value in out.items() if value}


def _fit_gemm(target: Target, rates: Rates, family: str, points: Sequence[Point]) -> tuple[float, float]:
    share = rates.gemm.get(family, 0.6)
    ratios = [1.0]
    for _ in range(8):  # the launch and the traffic bound do not scale, so the ratio is approached in steps
        trial = rates.merged({"gemm": {family: share}}, rates.label)
        ratios = [gemm_seconds(target, trial, family, p.shape[0], p.shape[1], p.shape[2]) / p.seconds for p in points]
        share = min(1.0, max(0.01, share * statistics.median(ratios)))
    return share, max(0.05, statistics.median(abs(ratio - 1.0) for ratio in ratios))


def _fit_cast(target: Target, family: str, points: Sequence[Point], default_us: float) -> tuple[float, float]:
    moved, _ = cast_traffic(family, (0, 1), 2.0, layouts=target.layouts, library=False)
    ideal = np.array([moved * p.shape[0] * p.shape[1] / target.bandwidth for p in points])
    seconds = np.array([p.seconds for p in points])
    if len(points) == 1:  # one size tells no fixed cost
        slope = max(seconds[0] - default_us * 1e-6, 0.1 * seconds[0]) / ideal[0]
        return float(min(1.0, max(0.01, 1.0 / slope))), default_us
    rows = np.stack([ideal, np.ones_like(ideal)], axis=1) / seconds[:, None]
    slope, fixed = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, float(np.median(seconds / ideal))
    return float(min(1.0, max(0.01, 1.0 / max(slope, 1e-6)))), float(fixed * 1e6)


def calibrate(
    bench: CudaBench, target: Target, device: str, date: str, say: Callable[[str], None] = _quiet
) -> dict[str, Any]:
    """Measure a device and return the document that :func:`load_calibration` reads.

    Raises:
        UsageError: nothing could be measured.
    """
    try:
        bench.warm()
    except Exception as error:  # the points will tell what works
        say(f"warming up failed: {type(error).__name__}")
    points = measure_points(bench, target, say)
    if not points:
        raise UsageError(f"nothing could be measured on {device}", fix="`autoprec doctor` says what works here")
    drift = _drift(bench, points)
    if drift is not None and abs(drift) > 0.1:
        say(f"the first GEMM took {drift:+.0%} at the end: clocks moved or something else runs here; calibrate again")
    return {
        "schema": SCHEMA,
        "device": device,
        "target": target.name,
        "machine": f"{platform.node()} ({platform.machine()})",
        "versions": bench.versions(),
        "date": date,
        "rates": fit_rates(target, points),
        "points": [asdict(point) for point in points],
        **({} if drift is None else {"drift": round(drift, 3)}),
    }


def check_target(document: Mapping[str, Any], target: Target, path: Path | str) -> None:
    """Refuse to lay what one device reaches over the peaks of another.

    Raises:
        UsageError: the file was measured on another target.
    """
    measured = document.get("target", target.name)
    if measured != target.name:
        raise UsageError(
            f"was measured on {document['device']} (target {measured}), not on {target.name}",
            where=str(path),
            fix=f"--target {measured}, or leave --calibration out: every figure is then called uncalibrated",
        )


def load_calibration(path: Path | str) -> dict[str, Any]:
    """Read a calibration file written by ``autoprec calibrate``.

    Raises:
        FileError: missing, malformed, of another schema, or its rates are none.
    """
    document = read_document(path)
    fix = "write it with `autoprec calibrate`"
    if document.get("schema") not in _READ:
        raise FileError(f"schema is {document.get('schema')!r}, not {SCHEMA}", where=str(path), fix=fix)
    unknown = sorted(set(document) - _KEYS)
    if unknown:
        raise FileError(f"unknown key '{unknown[0]}'", where=str(path), fix=f"valid: {', '.join(sorted(_KEYS))}")
    for key in ("device", "date", "rates"):
        if key not in document:
            raise FileError(f"'{key}' is missing", where=str(path), fix=fix)
    if not isinstance(document["rates"], dict):
        raise FileError("'rates' is not a mapping", where=str(path), fix=fix)
    try:  # every rate is looked at before a script is started for them
        _ANY.merged(document["rates"], "")
        Linears.of(document)
    except FileError as error:
        raise FileError(error.what, where=str(path), fix=error.fix) from error
    document.setdefault("label", f"modelled, calibrated on {document['device']} ({document['date']})")
    return document


def kept_file(device: str) -> Path:
    """Return where `autoprec calibrate` keeps what it last measured on a device of this machine, by name."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder() / f"calibration-{name}.json"


def kept_calibration(device: str) -> dict[str, Any] | None:
    """Return what `autoprec calibrate` last measured on a device of this machine.

    None where it never ran, where what it wrote cannot be read, or where torch or a library has changed since.
    """
    try:
        document = load_calibration(kept_file(device))
    except FileError:
        return None
    measured = document.get("versions", {})
    names = ("torch", "torchao", "transformer_engine", "deep_gemm")
    changed = [name for name in names if _release(measured.get(name)) != _release(installed_version(name))]
    return None if changed or document["device"] != device else document


def _release(version: str | None) -> str:
    return (version or "").split("+")[0]
