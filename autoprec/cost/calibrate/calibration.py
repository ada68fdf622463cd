"""Calibration: what one device reaches, measured, in a small JSON file with machine and date.

A file is laid over the default rates (``autoprec estimate --calibration FILE``); what it does not measure stays as it
was. Without one every figure is labelled *modelled, uncalibrated*.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
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

SCHEMA = "autoprec.calibration/3"
#: Bytes of the timed copy.
_COPIED = 1 << 30
#: What a file is laid over to see whether its rates are rates.
_ANY = Rates(gemm={}, cast={}, quantise_us={})


def measured_rates(bench: CudaBench, target: Target, say: Callable[[str], None]) -> dict[str, float]:
    """Measure the part of :class:`Rates` that no linear shows; what fails is said and left out."""
    how: dict[str, Callable[[], float]] = {
        "bandwidth": lambda: min(1.0, 2.0 * _COPIED / bench.copy(_COPIED) / target.bandwidth),
        "launch_us": lambda: max(0.1, bench.launch() * 1e6),
        "host_us": lambda: max(0.1, bench.host() * 1e6),
    }
    rates = {}
    for name, measure in how.items():
        try:
            rates[name] = measure()
            say(f"{name}: {rates[name]:.3g}")
        except Exception as error:  # a kernel or driver that fails takes its rate along, not the rest
            why = (str(error).strip().splitlines() or [""])[0][:200]
            say(f"{name}: {type(error).__name__}: {why}; the default is kept")
    return rates


def calibrate(
    bench: CudaBench, target: Target, device: str, date: str, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure a device and return the document that :func:`load_calibration` reads, without its linears.

    Raises:
        UsageError: nothing could be measured.
    """
    try:
        bench.warm()
    except Exception as error:  # the rates will tell what works
        say(f"warming up failed: {type(error).__name__}")
    rates = measured_rates(bench, target, say)
    if not rates:
        raise UsageError(f"nothing could be measured on {device}", fix="`autoprec doctor` says what works here")
    return {
        "schema": SCHEMA,
        "device": device,
        "target": target.name,
        "machine": f"{platform.node()} ({platform.machine()})",
        "versions": bench.versions(),
        "date": date,
        "rates": rates,
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
    if document.get("schema") != SCHEMA:
        raise FileError(f"schema is {document.get('schema')!r}, not {SCHEMA}", where=str(path), fix=fix)
    for key, kind in (("device", str), ("date", str), ("rates", dict)):
        if not isinstance(document.get(key), kind):
            raise FileError(f"has no '{key}'", where=str(path), fix=fix)
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
