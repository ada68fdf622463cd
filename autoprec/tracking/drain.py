"""The background process that reads a study's spool and writes it into MLflow.

It may be slow, fail, or find no server: nobody waits for it. It lives as long as the search that started it, plus
the time to write what is left.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autoprec.errors import StudyError
from autoprec.support.files import file_lock
from autoprec.support.redact import redact_text, redact_uri
from autoprec.tracking.spool import Spool, State
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run

#: What MLflow is told in our processes: no telemetry, and no minutes of retries when a server is gone.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_TRACKING_INSECURE_TLS_WARNINGS": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "OMP_NUM_THREADS": "1",
}
_POLL_S = 0.5
_RETRY_S = 10.0
_LINGER_S = 30.0


def child_environment() -> dict[str, str]:
    """Return the environment of a process of ours: it finds AutoPrec where this one did, and is not a trial."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {key: value for key, value in os.environ.items() if key != "AUTOPREC_SPEC"}
    return inherited | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def reachable(uri: str, *, timeout_s: float = 1.0) -> str:
    """Return an empty text when a store can be reached, else the reason; local stores always can.

    An HTTP server must accept a connection and answer ``/health`` within ``timeout_s`` each.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return ""
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            pass
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(f"{parts.scheme}://{host}:{port}/health", timeout=timeout_s):
                return ""
        except urllib.error.HTTPError:
            return ""  # it answers; whether it accepts us is for MLflow to find out
    except OSError as error:
        return f"{redact_uri(uri)} does not answer: {error}"


class _Writer:
    """Applies spool events to a store, opened when the first one needs it."""

    def __init__(self, spool: Spool, uri: str, experiment: str, state: State) -> None:
        self.spool, self.uri, self.experiment, self.state = spool, uri, experiment, state
        self.store: Any = None

    def apply(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "open":
            return
        if self.store is None:
            self._open(event)
        if kind == "study":
            self.store.open_parent(event.get("info") or {}, float(event.get("time") or 0.0))
        elif kind == "trial":
            self.store.write_trial(Run.from_json(event["record"]), event.get("groups"))
        elif kind == "finished":
            result = SearchResult.from_json(event["result"])
            self.store.write_result(result, self._files(event), float(event.get("time") or 0.0))
        elif kind == "artifacts":
            self.store.write_files(self._files(event))
        elif kind == "end":
            self.store.close_parent(str(event.get("status") or "FINISHED"))

    def _files(self, event: dict[str, Any]) -> list[Path]:
        return [path for name in event.get("artifacts") or () if (path := self.spool.kept(str(name))) is not None]

    def _open(self, event: dict[str, Any]) -> None:
        from autoprec.tracking.store import Store

        os.environ.update(ENVIRONMENT)
        study = self.spool.target().get("study") or self.spool.directory.parent.name
        # Two studies may meet a new database at the same moment; its tables must be created once.
        lock = self.spool.directory.parent.parent / ".mlflow-setup.lock"
        deadline = time.monotonic() + 120
        while True:
            try:
                with file_lock(lock, what="tracking store"):
                    self.store = Store(self.uri, self.experiment, self.spool.uid, study)
                    if event["kind"] != "study":
                        self.store.open_parent({}, float(event.get("time") or time.time()))
                break
            except StudyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        self.state.experiment_id = self.store.experiment_id


def drain(
    spool: Spool,
    uri: str,
    experiment: str,
    *,
    writer: Any = None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[State, Any]:
    """Write everything the store has not seen yet; return the new state and the open writer.

    Never raises for what a server does: the reason is in the state (``unreachable`` or ``failed``).
    """
    state = spool.load_state(uri)
    if writer is None:
        writer = _Writer(spool, uri, experiment, state)
    writer.state = state
    state.tracking_uri, state.experiment = redact_uri(uri), experiment
    if state.offset > spool.size:  # the spool was replaced: start over, nothing is written twice
        state.offset = 0
    if state.offset == spool.size:
        return state, writer
    problem = reachable(uri)
    if problem:
        state.status, state.reason = "unreachable", problem
        spool.save_state(uri, state)
        return state, None
    try:
        state.status, state.reason = "draining", ""
        for event, offset in spool.read(state.offset):
            writer.apply(event)
            state.offset, state.ended = offset, event["kind"] == "end"
            state.status = "draining" if offset < spool.size else "drained"
            if writer.store is not None:
                state.run_id = writer.store.run_id
            spool.save_state(uri, state)
            progress()
        state.status = "drained"
    except Exception as error:  # whatever a server or a database does must not be the search's problem
        state.status, state.reason = "failed", redact_text(f"{type(error).__name__}: {error}")[:2000]
        writer = None
    spool.save_state(uri, state)
    return state, writer


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _watched(spool: Spool, uri: str, parent: int) -> None:
    """End this process when a server keeps one call waiting for ever after the search has ended.

    A server that sends a byte now and then is never late for a socket's timeout, and ``autoprec sync`` must not wait
    for a process that waits for it.
    """

    def watch() -> None:
        known, since = -1, time.monotonic()
        while True:
            time.sleep(1.0)
            offset = spool.load_state(uri).offset
            over = os.getppid() != parent or not _alive(parent) or spool.ended(offset)
            if offset != known or not over:
                known, since = offset, time.monotonic()
            elif time.monotonic() - since > _LINGER_S:
                os._exit(1)

    threading.Thread(target=watch, name="autoprec-drain", daemon=True).start()


def drain_until_end(spool: Spool, uri: str, experiment: str, parent: int) -> int:
    """Drain a study while its search (process ``parent``) lives, then what is left; return an exit code."""
    writer: Any = None
    attempt = 0.0
    try:
        with file_lock(spool.directory / "drain.lock", what="study's tracking"):
            _watched(spool, uri, parent)
            left = _LINGER_S
            while True:
                alive = os.getppid() == parent and _alive(parent)
                known = spool.load_state(uri).offset
                ended = spool.ended(known)
                if known < spool.size and (ended or time.monotonic() >= attempt):
                    state, writer = drain(spool, uri, experiment, writer=writer)
                    if state.status in ("unreachable", "failed"):
                        attempt = time.monotonic() + _RETRY_S
                        if ended:
                            return 1  # nobody is left to keep trying for: ``autoprec sync`` replays it
                state = spool.load_state(uri)
                done = state.offset >= spool.size
                if done and state.ended:
                    return 0
                if not alive:
                    if done and writer is not None and writer.store is not None:
                        writer.store.close_parent("KILLED")
                    if done or state.status == "unreachable" or left <= 0:
                        return 0 if done else 1
                    left -= _POLL_S
                time.sleep(_POLL_S)
    except StudyError:
        return 0  # another drainer of this study is at work
