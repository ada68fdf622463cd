"""Calibration: what one device reaches, measured, in a small JSON file with machine and date.

A file is laid over the default rates (``autoprec estimate --calibration FILE``); what it does not measure stays as it
was. Without one every figure is labelled *modelled, uncalibrated*.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.cost.calibrate.linears import Linears
from autoprec.cost.rates import Rates
from autoprec.errors import FileError, UsageError
from autoprec.precision.hardware import Target
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
#: Bytes of the timed copy.
_COPIED = 1 << 30
#: What a file is laid over to see whether its rates are rates.
_ANY = Rates(gemm={}, cast={}, quantise_us={})


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a ``copy`` of ``bytes`` inside the device, a ``launch`` on it, or one by its ``host``."""

    kind: str
    seconds: float
    bytes: int = 0


def _quiet(_line: str) -> None:
    return None


def measure_points(bench: CudaBench, say: Callable[[str], None] = _quiet) -> list[Point]:
    """Measure what no linear shows: memory bandwidth and launches; what fails is said and left out."""
    points: list[Point] = []
    for kind, size in (("copy", _COPIED), ("launch", 0), ("host", 0)):
        try:
            seconds = getattr(bench, kind)(*(size,) * bool(size))
        except Exception as error:  # a kernel or driver that fails takes its point along, not the rest
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        else:
            if seconds > 0:
                points.append(Point(kind, seconds, size))
                say(f"{kind}: {seconds * 1e6:.1f} us")
                continue
            why = "cannot be measured here"
        say(f"{kind}: {why}; the default is kept")
    return points


def fit_rates(target: Target, points: Sequence[Point]) -> dict[str, Any]:
    """Return the part of :class:`Rates` that the points determine; GEMMs and casts are corrected by the linears."""
    out: dict[str, Any] = {}
    for point in points:
        if point.kind == "copy":
            out["bandwidth"] = min(1.0, 2.0 * point.bytes / point.seconds / target.bandwidth)
        else:
            out[f"{point.kind}_us"] = max(0.1, point.seconds * 1e6)
    return out


def calibrate(
    bench: CudaBench, target: Target, device: str, date: str, say: Callable[[str], None] = _quiet
) -> dict[str, Any]:
    """Measure a device and return the document that :func:`load_calibration` reads, without its linears.

    Raises:
        UsageError: nothing could be measured.
    """
    try:
        bench.warm()
    except Exception as error:  # the points will tell what works
        say(f"warming up failed: {type(error).__name__}")
    points = measure_points(bench, say)
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
    names = ("torch", "torchao", "transformer_engine")
    changed = [name for name in names if _release(measured.get(name)) != _release(installed_version(name))]
    return None if changed or document["device"] != device else document


def _release(version: str | None) -> str:
    return (version or "").split("+")[0]
