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
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from autoprec.errors import AutoPrecError, FileError, MissingDependencyError
from autoprec.support.optional import installed_version
from autoprec.support.redact import HIDDEN
from autoprec.tracking.drain import child_environment, reachable
from autoprec.tracking.page import STORE
from autoprec.tracking.spool import Spool, State, default_uri, named_uri
from autoprec.tracking.view import trials_url


@dataclass(frozen=True, slots=True)
class Study:
    """Where a study's trials are: its store, experiment and identity."""

    name: str
    uid: str
    tracking_uri: str
    experiment_id: str

    def url(self, base: str, *, charts: bool = False) -> str:
        """Return the address of its table of policies on a server, or that of their charts."""
        return trials_url(base, self.experiment_id or "0", uid=self.uid, charts=charts)


def newest_study(runs: Path, name: str | None = None, tracking_uri: str | None = None) -> Study:
    """Return the study last written under ``runs``, or the one named.

    One with trials and an answer, or still running, comes before one that was cut short, and that before one without
    any trial.

    Raises:
        FileError: there is none; the message lists those that exist.
    """
    spools = sorted(runs.glob("*/tracking/spool.jsonl"), key=lambda path: path.stat().st_mtime)
    names = [path.parent.parent.name for path in spools]
    chosen = [path for path, found in zip(spools, names, strict=True) if name in (None, found)]
    if not chosen:
        known = f"studies here: {', '.join(names)}" if names else "name the autoprec-runs directory of a search"
        raise FileError("no tracked study" + (f" '{name}'" if name else "") + " here", where=str(runs), fix=known)
    chosen.sort(key=_worth)  # stable: among equals the newest stays last
    spool = Spool.of(chosen[-1].parent.parent)
    opened = spool.target()
    recorded = opened.get("tracking_uri", "")
    if HIDDEN in recorded or not recorded.startswith(("sqlite:", "file:", "http:", "https:")):
        recorded = ""  # a folder of somebody else's must not choose the database that is sent the user's password
    uri = named_uri(tracking_uri) or recorded
    uri = uri or default_uri(runs.resolve())
    state: State = spool.load_state(uri)
    return Study(opened.get("study") or spool.directory.parent.name, spool.uid, uri, state.experiment_id)


def _worth(path: Path) -> int:
    """Say how much of a study there is to look at: 0 without trials, 1 with trials, 2 with an answer or one to come."""
    tried = ended = answered = False
    for event, _ in Spool.of(path.parent.parent).read():
        tried |= event["kind"] == "trial" and event["record"].get("kind") in ("preset", "search")
        answered |= event["kind"] == "finished" and event["result"].get("verdict") != "undecided"
        ended = event["kind"] == "end"
    return tried * (1 + (answered or not ended))


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

    Raises:
        MissingDependencyError: only mlflow-skinny is installed, which tracks and has no web interface.
        AutoPrecError: the server did not come up; its own output is in the message.
    """
    if urlsplit(uri).scheme in ("http", "https"):
        problem = reachable(uri, timeout_s=3.0)
        if problem:
            raise AutoPrecError(problem, fix="start the server, or pass --tracking-uri sqlite:///.../mlflow.db")
        yield uri
        return
    if installed_version("mlflow") is None:
        raise MissingDependencyError("MLflow's web interface is not installed", fix="pip install 'autoprec[ui]'")
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "autoprec.tracking.page", str(port)]
    # by the environment: everybody on the machine can read a command line, and the address may hold a password
    environment = child_environment() | {STORE: uri}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
