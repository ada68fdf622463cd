"""MLflow's own interface, started on the loopback for as long as somebody looks at it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from autoprec.errors import AutoPrecError, FileError, MissingDependencyError, StudyError
from autoprec.support.optional import installed_version
from autoprec.tracking.log import is_at_work, reachable
from autoprec.tracking.page import STORE
from autoprec.tracking.study import TrackedStudy


def studies(runs: Path) -> list[TrackedStudy]:
    """Return the tracked studies in ``autoprec-runs``, or the one that the path itself is.

    Raises:
        FileError: there is none.
    """
    found = sorted(runs.glob("*/tracking/id")) or sorted(runs.glob("tracking/id"))
    if not found:
        beside = ", ".join(path.parent.parent.name for path in sorted(runs.parent.glob("*/tracking/id")))
        fix = f"studies here: {beside}" if beside else "name the autoprec-runs directory of a search"
        raise FileError("no tracked study here", where=str(runs), fix=fix)
    return [TrackedStudy(path.parent.parent) for path in found]


def newest_study(runs: Path) -> TrackedStudy:
    """Return the study last written under ``runs``, or the one whose folder that is.

    One with trials and an answer, or still running, comes before one that was cut short, and that before one without
    any trial.

    Raises:
        FileError: there is none.
    """
    return max(studies(runs), key=lambda study: (_to_look_at(study), study.changed))


def _to_look_at(folder: TrackedStudy) -> int:
    """Say how much of a study there is to look at: 0 without trials, 1 with trials, 2 with an answer or one to come."""
    with suppress(StudyError):
        if any(record.kind in ("preset", "search") for record in folder.records()):
            outcome = folder.outcome()
            answered = outcome is not None and outcome[0].verdict != "undecided"
            return 2 if answered or is_at_work(folder.path) else 1
    return 0


def free_port(wanted: int) -> int:
    """Return ``wanted`` when nobody listens there, else a free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise AutoPrecError("no free port on the loopback", fix="name one with --port")


@contextmanager
def serve(uri: str, port: int, *, timeout_s: float = 300.0) -> Iterator[str]:
    """Serve a store on the loopback and yield the server's address; a store that is a server is used as it is.

    Args:
        uri: of the store: a file, a database, or ``http(s)://`` of a server.
        port: of the loopback to serve on.
        timeout_s: until the server has to answer.

    Raises:
        MissingDependencyError: only mlflow-skinny is installed, which tracks and has no web interface.
        AutoPrecError: the server did not come up; its own output is in the message.
    """
    if urlsplit(uri).scheme in ("http", "https"):
        problem = reachable(uri, timeout_s=3.0)
        if problem:
            raise AutoPrecError(problem, fix="start the server, or name another store by MLFLOW_TRACKING_URI")
        yield uri
        return
    if installed_version("mlflow") is None:
        raise MissingDependencyError("MLflow's web interface is not installed", fix="pip install 'autoprec[ui]'")
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "autoprec.tracking.page", str(port)]
    # by the environment: everybody on the machine can read a command line, and the address may hold a password
    package = str(Path(__file__).resolve().parents[2])  # -P: a file called mlflow.py here is not MLflow
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    ours = {STORE: uri, "PYTHONPATH": paths, "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=os.environ | ours, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(process, base, timeout_s, log)
            yield base
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], base: str, timeout_s: float, log: IO[bytes]) -> None:
    deadline = time.monotonic() + timeout_s
    while reachable(base, timeout_s=1.0):
        if process.poll() is not None:
            log.seek(0)
            output = log.read().decode("utf-8", "replace")[-1500:]
            raise AutoPrecError(f"MLflow ended: {output}", fix="see the lines above")
        if time.monotonic() > deadline:
            raise AutoPrecError(f"MLflow did not answer within {timeout_s:.0f} s", fix="try again")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server with the workers it started: they are the process group we made for it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
