"""Calibration files: what was measured on a device, with machine, versions and date, laid over the default rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoprec.errors import FileError
from autoprec.files import read_document

__all__ = ["SCHEMA", "load_calibration"]

SCHEMA = "autoprec.calibration/1"
_KEYS = {"schema", "device", "target", "machine", "versions", "date", "rates", "points", "label"}


def load_calibration(path: Path | str) -> dict[str, Any]:
    """Read a calibration file written by ``autoprec calibrate``.

    Raises:
        FileError: missing, malformed, or of another schema.
    """
    document = read_document(path)
    if document.get("schema") != SCHEMA:
        raise FileError(f"schema is {document.get('schema')!r}, not {SCHEMA}", where=str(path), fix="run calibrate")
    unknown = sorted(set(document) - _KEYS)
    if unknown:
        raise FileError(f"unknown key '{unknown[0]}'", where=str(path), fix=f"valid: {', '.join(sorted(_KEYS))}")
    for key in ("device", "date", "rates"):
        if key not in document:
            raise FileError(f"'{key}' is missing", where=str(path), fix="write it with `autoprec calibrate`")
    if not isinstance(document["rates"], dict):
        raise FileError("'rates' is no mapping", where=str(path), fix="write it with `autoprec calibrate`")
    document.setdefault("label", f"modelled, calibrated on {document['device']} ({document['date']})")
    return document
