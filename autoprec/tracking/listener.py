"""A search's side of tracking: notes what it was asked and answered, and starts the process that writes to MLflow.

No method waits for a server, apart from a moment at the end, and none raises for what a server does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autoprec.report.html import write_charts
from autoprec.support.redact import redact, redact_uri
from autoprec.tracking.folder import About, State, TrackedFolder, default_uri, named_uri
from autoprec.tracking.log import ENVIRONMENT
from autoprec.tracking.origin import commit_of, versions
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from autoprec.tuning.study.study import default_storage

#: All the waiting one search does for its store, in total: a server that does not answer must cost < 2 s.
_REMOTE_PATIENCE_S, _LOCAL_PATIENCE_S = 1.0, 20.0
#: ... and where the search was interrupted: the process beside it writes the rest.
_INTERRUPTED_S = 1.0
#: What sends to MLflow what is missing.
PENDING = "autoprec ui --sync"


def child_environment() -> dict[str, str]:
    """Return the environment of a process of ours: it finds AutoPrec where this one did, and is not a trial."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {key: value for key, value in os.environ.items() if key != "AUTOPREC_SPEC"}
    return inherited | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


class TrackingListener:
    """Has a search's events logged; see :class:`autoprec.tuning.events.Listener`.

    Args:
        runs_dir: ``autoprec-runs``; the default store is ``mlflow.db`` in it.
        tracking_uri: MLflow store; else ``MLFLOW_TRACKING_URI``; else the default store.
        experiment: MLflow experiment; else ``MLFLOW_EXPERIMENT_NAME``; else ``autoprec``.
    """

    def __init__(self, runs_dir: Path | str, *, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._named = named_uri(tracking_uri)  # refused before anything is run
        self._uri = self._named or default_uri(Path(runs_dir))
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "autoprec"
        remote = urlsplit(self._uri).scheme in ("http", "https", "databricks", "postgresql", "mysql", "mssql")
        self._patience_s = _REMOTE_PATIENCE_S if remote else _LOCAL_PATIENCE_S
        self._folder: TrackedFolder | None = None
        self._storage = ""
        self._about: About | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._finished = False

    def phase(self, name: str, detail: str = "") -> None:
        """Phases are for the terminal."""

    def note(self, text: str) -> None:
        """Notes are in the result."""

    def started(self, info: SearchInfo) -> None:
        """Note what the search was asked; secrets in arguments and settings are hidden."""
        self._folder = TrackedFolder(Path(info.study_dir).resolve())
        self._storage = info.options.get("storage") or default_storage(self._folder.path)
        document: dict[str, Any] = asdict(info)
        document["groups"] = len(info.groups)
        # flat, beside what the script was found to be: steps, seed, budget_s, ...; empty ones say nothing
        folder = document.pop("folder")
        asked = {key: value for key, value in document.pop("options").items() if value not in ("", None)}
        document = redact({**asked, **document, "version": versions(), **commit_of(folder)})
        self._about = About(
            info.study, redact_uri(self._named), self._experiment, redact_uri(info.storage), document, time.time()
        )
        self._folder.save_about(self._about)
        self._start()

    def trial(self, record: Run, done: int, total: int, best: Run | None, seconds_left: float) -> None:  # noqa: ARG002
        """Say that the study has one more record."""
        if self._folder is not None:
            self._folder.tell(f"{record.kind} {record.number}")
            self._start()

    def finished(self, result: SearchResult) -> None:
        """The outcome is recorded by :meth:`attach`, which the command calls once the policy is written."""

    def attach(self, result: SearchResult, study_dir: Path | str) -> SearchResult:
        """Record the outcome and return it with its ``mlflow`` part filled in; never raises."""
        if self._folder is None:
            return result
        with contextlib.suppress(Exception):  # an observer must never end a search
            self._folder = TrackedFolder(Path(study_dir).resolve())
            write_charts(self._folder.path / "charts", result, self._folder.records(self._storage))
            self._folder.save_outcome(result)
            self._finished = True
            self._start()
            share = 0.75 if self._patience_s > _REMOTE_PATIENCE_S else 0.5  # the rest is for close()
            self._wait(lambda state: bool(state.run_id), share * self._patience_s)
            return replace(result, mlflow=self.reference())
        return result

    def reference(self) -> dict[str, Any]:
        """Return where the study is in MLflow, as far as known; ``pending`` is the command that sends the rest."""
        state = self._state()
        out: dict[str, Any] = {
            "tracking_uri": redact_uri(self._uri),
            "experiment_id": state.experiment_id or None,
            "run_id": state.run_id or None,
        }
        return out | ({"pending": PENDING, "reason": state.reason} if state.reason else {})

    def close(self, timeout_s: float | None = None) -> None:
        """Have the reports logged and the run ended (KILLED when the search did not finish); never raises.

        Args:
            timeout_s: how long to wait for the store; default: what is left of 20 s for a local one, of 1 s for a
                server. One that is known not to answer is not waited for.
        """
        folder, about, self._folder = self._folder, self._about, None
        if folder is None or about is None:
            return
        with contextlib.suppress(Exception):
            folder.save_about(replace(about, ended="FINISHED" if self._finished else "KILLED"))
            self._start(folder)
            patience = self._patience_s if self._finished else _INTERRUPTED_S
            news = folder.news
            self._wait(lambda state: state.news >= news, patience if timeout_s is None else timeout_s, folder)

    def _state(self, folder: TrackedFolder | None = None) -> State:
        known = folder or self._folder
        return known.state(self._uri) if known is not None else State()

    def _wait(self, done: Callable[[State], bool], limit_s: float, folder: TrackedFolder | None = None) -> None:
        """Wait until the store's state is as wanted, the store is known to fail, or patience is used up."""
        start = time.monotonic()
        while not done(state := self._state(folder)) and not state.reason:
            if time.monotonic() - start >= limit_s or self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.05)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - start))

    def _start(self, folder: TrackedFolder | None = None) -> None:
        """Start the process beside the search unless it runs; failing to start it is not the search's problem."""
        folder = folder or self._folder
        if folder is None or (self._process is not None and self._process.poll() is None):
            return
        addresses = {"AUTOPREC_TRACKING_STORE": self._uri, "AUTOPREC_TRACKING_STUDY": self._storage}
        # -P: a file called mlflow.py beside the user's script must not be imported in place of MLflow
        command = [sys.executable, "-P", "-m", "autoprec.tracking", str(folder.path), str(os.getpid())]
        with contextlib.suppress(OSError), (folder.own / "writer.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=child_environment() | addresses | {"PYTHONWARNINGS": "ignore"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=str(folder.own),
            )
            # it may outlive this object: it must be reaped
            threading.Thread(target=self._process.wait, daemon=True).start()
