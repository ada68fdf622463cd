"""Answers of a scan, and rounds of a duel, a line each, written as soon as they are known.

A trial that is killed has lost none but those at work.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from autoprec.errors import FileError
from autoprec.support.files import finite, with_checksum, without_checksum
from autoprec.support.plain import Document, rebuild, shallow
from autoprec.trial.protocol import ProbeResult


def append_row(path: Path | str, row: ProbeResult) -> None:
    """Add an answer to a file, in one write; one that failed is left out, and whatever cannot be written.

    A probe may have failed because its process was ended, with the search's.

    Args:
        path: of the file; empty for none.
        row: what the probe found.
    """
    if not row.failed:
        _append(path, shallow(row))


def append_round(path: Path | str, times: Mapping[str, float], seconds: float) -> None:
    """Add a round of a duel to a file, as :func:`append_row`.

    Args:
        path: of the file; empty for none.
        times: milliseconds per step by contender.
        seconds: that the duel has taken by now, of those that it may take.
    """
    _append(path, {"times": dict(times), "seconds": seconds})


def _append(path: Path | str, document: Document) -> None:
    if not str(path):
        return
    # begun with a line break, not ended with one: the line before may have been cut off by a kill
    line = b"\n" + json.dumps(with_checksum(finite(document))).encode()
    with contextlib.suppress(OSError):  # a full disk: the scan answers all the same
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def read_rows(paths: Iterable[Path]) -> dict[str, ProbeResult]:
    """Return the answers in some files by the names of their probes; damaged lines are passed over."""
    rows = [rebuild(ProbeResult, line) for path in paths for line in _lines(path) if "id" in line]
    return {row.id: row for row in rows}


def read_rounds(paths: Iterable[Path]) -> tuple[list[dict[str, float]], float]:
    """Return the rounds in some files, and the seconds that they took; damaged lines are passed over.

    Seconds begin anew in each process: what one took is its largest number.
    """
    rounds: list[dict[str, float]] = []
    taken = before = 0.0
    for line in (line for path in paths for line in _lines(path) if "times" in line):
        rounds.append(line["times"])
        taken += line["seconds"] - (before if line["seconds"] >= before else 0.0)
        before = line["seconds"]
    return rounds, taken


def _lines(path: Path) -> Iterator[Document]:
    with contextlib.suppress(OSError):
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError, AttributeError, FileError):
                yield without_checksum(json.loads(line), where=str(path))
