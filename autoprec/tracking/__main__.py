"""``python -m autoprec.tracking STUDY_DIR``: the process beside a search that writes its trials into MLflow.

A process, not a thread: importing MLflow and making a new database take 5.6 s of CPU, which would hold the driver's
interpreter; its timeouts, log lines and exit hooks stay out of the user's process. What it hears and says is in
:mod:`autoprec.tracking.beside`.

The addresses of the store and of the study come from the environment, because they may carry a login and command lines
are visible to other users.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from autoprec.tracking.log import ENVIRONMENT, log_study

_RETRY_S = 10.0
#: How long it may go on after its search, however slowly a server trickles; ``autoprec ui`` sends the rest.
_LINGER_S = 30.0


def follow(study_dir: Path, uri: str, storage: str, search: BinaryIO, reports: int) -> int:
    """Log a study whenever its search says that it has changed, and once more when the search is over.

    Args:
        search: a line from the search for every change; its end is the search's.
        reports: descriptor that each outcome is written to as a line of JSON.

    Returns:
        0 when MLflow has all of the study, else 1.
    """
    news, over = threading.Event(), threading.Event()

    def listen() -> None:
        while search.read(1):
            news.set()
        over.set()
        news.set()
        time.sleep(_LINGER_S)
        os._exit(1)

    threading.Thread(target=listen, name="autoprec-tracking", daemon=True).start()
    while True:
        news.wait()
        news.clear()
        last = over.is_set()
        done = log_study(study_dir, uri, storage=storage, running=not last)
        with contextlib.suppress(OSError):  # a search that was killed reads no more
            os.write(reports, json.dumps(asdict(done)).encode() + b"\n")
        if last:
            return int(not done.ok)
        if not done.ok:
            over.wait(_RETRY_S)
            news.set()


def main(arguments: list[str]) -> int:
    """Follow one study until its search has ended."""
    uri, storage = (os.environ.pop(f"AUTOPREC_TRACKING_{name}") for name in ("STORE", "STUDY"))
    os.environ.update(ENVIRONMENT)
    with contextlib.suppress(OSError):
        os.nice(5)  # the trials are being timed on the same cores
    reports = os.dup(1)
    os.dup2(2, 1)  # what a library prints goes to the log
    return follow(Path(arguments[0]), uri, storage, sys.stdin.buffer, reports)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
