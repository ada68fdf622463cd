"""Answers of a scan, a line each, written as soon as they are known.

A scan that is killed has lost none but those at work.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from autoprec.errors import FileError
from autoprec.support.files import finite, with_checksum, without_checksum
from autoprec.support.plain import rebuild, shallow
from autoprec.trial.protocol import ProbeResult


def append_row(path: Path | str, row: ProbeResult) -> None:
    """Add an answer to a file, in one write; one that failed is left out, and whatever cannot be written.

    A probe may have failed because its process was ended, with the search's.

    Args:
        path: of the file; empty for none.
        row: what the probe found.
    """
    if not str(path) or row.failed:
        return
    # begun with a line break, not ended with one: the line before may have been cut off by a kill
    line = b"\n" + json.dumps(with_checksum(finite(shallow(row)))).encode()
    with contextlib.suppress(OSError):  # a full disk: the scan answers all the same
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def read_rows(paths: Iterable[Path]) -> dict[str, ProbeResult]:
    """Return the answers in some files by the names of their probes; damaged lines are passed over."""
    found: dict[str, ProbeResult] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            for line in path.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, TypeError, AttributeError, FileError):
                    row = rebuild(ProbeResult, without_checksum(json.loads(line), where=str(path)))
                    found[row.id] = row
    return found
