"""What a trial tells at its end: what was warned of, what kind of failure an error is, and the driver's file."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError, AutoPrecWarning, UnsupportedError
from autoprec.support.files import canonical_json, finite
from autoprec.trial.protocol import TrialResult


def note_warnings(into: dict[str, None]) -> None:
    """Keep what AutoPrec warns of for the audit, in order: of a trial that ends well nothing else is shown."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, AutoPrecWarning):
            into[str(message)] = None
        shown(message, category, *where)

    warnings.showwarning = show  # type: ignore[assignment]


def status_of(error: BaseException) -> str:
    """Map an error to one of :data:`autoprec.trial.protocol.FAILURES`."""
    if isinstance(error, UnsupportedError):
        return "unsupported"
    return "mismatch" if isinstance(error, AutoPrecError) else "crashed"


def write_result(path: Path, result: TrialResult) -> None:
    """Write a result so that a reader sees all of it or nothing."""
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    temporary.write_text(canonical_json(finite(result.to_json())), encoding="utf-8")
    os.replace(temporary, path)


def wait_and_exit(path: Path) -> None:
    """End this process as soon as there is a file: the result of the first rank."""
    while not path.exists():
        time.sleep(0.02)
    os._exit(0)
