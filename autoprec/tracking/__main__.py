"""``python -m autoprec.tracking STUDY_DIR PARENT_PID``: the process beside a search that writes its trials into MLflow.

A process, not a thread: importing MLflow and making a new database take 5.6 s of CPU, which would hold the driver's
interpreter; its timeouts, log lines and exit hooks stay out of the user's process.

The addresses of the store and of the study come from the environment, because they may carry a login and command lines
are visible to other users.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from autoprec.tracking.folder import TrackedFolder
from autoprec.tracking.log import ENVIRONMENT, log_study

_POLL_S = 0.5
_RETRY_S = 10.0
#: How long it may go on after its search; what is missing then is sent by ``autoprec ui``.
_LINGER_S = 30.0


def _end_after(parent: int) -> None:
    """End this process some time after its search, even when a server keeps one call waiting for ever.

    A server that sends a byte now and then is never late for a socket's timeout.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        time.sleep(_LINGER_S)
        os._exit(1)

    threading.Thread(target=watch, name="autoprec-tracking", daemon=True).start()


def follow(folder: TrackedFolder, uri: str, storage: str, parent: int) -> int:
    """Log a study whenever it has changed, while its search (process ``parent``) lives, then once more.

    Returns:
        0 when MLflow has all of the study, else 1.
    """
    seen, attempt = -1, 0.0
    while True:
        over = folder.about().ended or os.getppid() != parent
        news = folder.news
        if news != seen and (over or time.monotonic() >= attempt):
            done = log_study(folder.path, uri, storage=storage, running=not over)
            attempt = 0.0 if done.ok else time.monotonic() + _RETRY_S
            seen = news if done.ok else seen
        if over and news == folder.news:
            return int(seen != news)
        time.sleep(_POLL_S)


def main(arguments: list[str]) -> int:
    """Follow one study until its search has ended."""
    folder, parent = TrackedFolder(Path(arguments[0])), int(arguments[1])
    uri, storage = (os.environ.pop(f"AUTOPREC_TRACKING_{name}") for name in ("STORE", "STUDY"))
    os.environ.update(ENVIRONMENT)
    with contextlib.suppress(OSError):
        os.nice(5)  # the trials are being timed on the same cores
    _end_after(parent)
    return follow(folder, uri, storage, parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
