"""A search's side of tracking: one thread of it writes to MLflow, and the search never waits for it.

The thread knows nothing but that the study has changed: it has :func:`.log.log_study` bring MLflow up to date, once
more when the search is over. What it could not send by then (a server that is dead or slow, a search that was killed)
is in the study, from which ``autoprec ui`` sends it. Nothing here raises for what a server does; a moment's waiting at
the end is all that a search spends on it.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autoprec._version import __version__
from autoprec.support.optional import installed_version
from autoprec.support.redact import redact, redact_uri
from autoprec.tracking.log import Logged, log_study
from autoprec.tracking.study import About, TrackedStudy, default_uri, named_uri
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listener, Listeners, SearchInfo
from autoprec.tuning.options import RUNS, SearchOptions
from autoprec.tuning.paired import OVERRUN
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from autoprec.tuning.study.study import default_storage

#: All the waiting one search does for its store, in total: a server that does not answer must cost < 2 s.
_REMOTE_PATIENCE_S, _LOCAL_PATIENCE_S = 1.0, 20.0
#: ... and where the search was interrupted: somebody wants it to end.
_INTERRUPTED_S = 3.0
#: Until a store that failed is tried again.
_RETRY_S = 10.0
#: What changes numerics, times or proposals; optional packages only where they are installed.
_PACKAGES = ("torch", "optuna", "mlflow-skinny", "numpy", "torchao", "transformer_engine", "transformers", "accelerate")


def versions() -> dict[str, str]:
    """Return the version of AutoPrec, of Python, and of every installed package that matters; nothing is imported."""
    found = {name.replace("_", "-"): installed_version(name) for name in _PACKAGES}
    known = {name: version for name, version in found.items() if version is not None}
    return {"autoprec": __version__, "python": platform.python_version(), **known}


def commit_of(folder: str) -> dict[str, str]:
    """Return ``git_commit`` of a folder and ``git_changes``: ``none`` or ``uncommitted``; empty outside one."""

    def git(*words: str) -> str:
        line = ["git", "-C", folder or ".", *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=2.0, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        commit = git("rev-parse", "HEAD")
        return {"git_commit": commit, "git_changes": "uncommitted" if git("status", "--porcelain", "-uno") else "none"}
    return {}


@contextlib.contextmanager
def tracked(options: SearchOptions, *listeners: Listener, started: float) -> Iterator[tuple[Search, SearchResult]]:
    """Search, and yield the engine with its result; what is written until the block ends goes to MLflow as well.

    Args:
        started: ``time.monotonic()`` at which the time of the search begins to count.

    Raises:
        AutoPrecError: as :meth:`autoprec.tuning.engine.Search.run`.
    """
    command = ScriptCommand.parse(options.command)
    until = math.inf if options.budget_s is None else started + OVERRUN * options.budget_s
    tracker = TrackingListener(RUNS, until=until) if options.track else None
    heard = Listeners(*listeners, *([tracker] if tracker is not None else []))
    engine = Search(options, command, heard, started=started)
    try:
        result = engine.run()
        if tracker is not None:
            heard.phase("tracking")
            result = tracker.attach(result, engine.study_dir)
        yield engine, engine.timed(result)
    finally:
        if tracker is not None:
            tracker.close()


class TrackingListener(Listener):
    """Has a search's runs logged.

    The outcome is recorded by :meth:`attach`, which the command calls once the policy is written.

    Args:
        runs_dir: ``autoprec-runs``; the default store is ``mlflow.db`` in it.
        tracking_uri: MLflow store; else ``MLFLOW_TRACKING_URI``; else the default store.
        experiment: MLflow experiment; else ``MLFLOW_EXPERIMENT_NAME``; else ``autoprec``.
        until: ``time.monotonic()`` at which a time budget has nothing waited for any more.
    """

    def __init__(
        self,
        runs_dir: Path | str,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        until: float = math.inf,
    ) -> None:
        self._named = named_uri(tracking_uri)  # refused before anything is run
        self._uri = self._named or default_uri(Path(runs_dir))
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "autoprec"
        remote = urlsplit(self._uri).scheme in ("http", "https", "databricks", "postgresql", "mysql", "mssql")
        self._patience_s = _REMOTE_PATIENCE_S if remote else _LOCAL_PATIENCE_S
        self._until = until
        self._study: TrackedStudy | None = None
        self._storage = ""
        self._news, self._over = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._write, name="autoprec-tracking", daemon=True)
        self._logged = Logged("", redact_uri(self._uri))
        self._finished = False

    def started(self, info: SearchInfo) -> None:
        """Note what the search was asked; secrets in arguments and settings are hidden."""
        self._study = TrackedStudy(Path(info.study_dir).resolve())
        self._storage = info.options.get("storage") or default_storage(self._study.path)
        document: dict[str, Any] = asdict(info)
        document["groups"] = len(info.groups)
        # flat, beside what the script was found to be: steps, seed, budget_s, ...; empty ones say nothing
        folder = document.pop("folder")
        asked = {key: value for key, value in document.pop("options").items() if value not in ("", None)}
        document = redact({**asked, **document, "version": versions(), **commit_of(folder)})
        store, storage = redact_uri(self._named), redact_uri(info.storage)
        self._study.save_about(About(info.study, store, self._experiment, storage, document, time.time()))
        self._tell()

    def trial(self, record: Run, done: int, total: int, best: Run | None, seconds_left: float) -> None:  # noqa: ARG002
        """Say that the study has one more record.

        Args:
            record: the run that ended.
            done, total: runs of its kind that ended, and those that are planned at most.
            best: the best acceptable run so far.
            seconds_left: that the search usually takes from here on; at most, with a time budget.
        """
        if self._study is not None:
            self._tell()

    def attach(self, result: SearchResult, study_dir: Path | str) -> SearchResult:
        """Record the outcome and return it with its ``mlflow`` part filled in; never raises."""
        if self._study is None:
            return result
        with contextlib.suppress(Exception):  # an observer must never end a search
            self._study = TrackedStudy(Path(study_dir).resolve())
            self._study.save_outcome(result)
            self._finished = True
            self._tell()
            share = 0.75 if self._patience_s > _REMOTE_PATIENCE_S else 0.5  # the rest is for close()
            self._wait(share * self._patience_s, lambda: bool(self._logged.run_id))
            return replace(result, mlflow=self.reference())
        return result

    def reference(self) -> dict[str, Any]:
        """Return where the study is in MLflow, as far as known; ``pending`` is the command that sends the rest."""
        logged = self._logged
        ids = {"experiment_id": logged.experiment_id or None, "run_id": logged.run_id or None}
        reason = logged.reason or ("" if logged.run_id else "not written within the time")
        rest = {"pending": "autoprec ui --sync", "reason": reason} if reason else {}
        return {"tracking_uri": redact_uri(self._uri), **ids, **rest}

    def close(self, timeout_s: float | None = None) -> None:
        """Have the reports logged and the run ended (KILLED when the search did not finish); never raises.

        Args:
            timeout_s: how long to wait for the store; default: what is left of 20 s for a local one, of 1 s for a
                server. One that is known not to answer is not waited for.
        """
        if self._study is None or self._over.is_set():
            return
        self._over.set()
        self._tell()
        patience = self._patience_s if self._finished else min(self._patience_s, _INTERRUPTED_S)
        self._wait(patience if timeout_s is None else timeout_s, lambda: False)

    def _wait(self, limit_s: float, done: Callable[[], bool]) -> None:
        """Wait until something is done, the store is known to fail, the thread has ended, or patience is used up."""
        start = time.monotonic()
        limit_s = min(limit_s, self._until - start)
        while not done() and self._logged.ok and self._writer.is_alive():
            if time.monotonic() - start >= limit_s:
                break
            time.sleep(0.05)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - start))

    def _tell(self) -> None:
        """Have the thread look at the study; it begins with the first news. Never waits, never raises."""
        self._news.set()
        if self._writer.ident is None:
            with contextlib.suppress(RuntimeError):  # no thread can be started here: `autoprec ui` sends all of it
                self._writer.start()

    def _write(self) -> None:
        """Bring MLflow up to date whenever the study has changed, and once more when the search is over."""
        with contextlib.suppress(OSError):  # the trials are being timed on the same cores
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        over = False
        while self._study is not None and not over:
            self._news.wait()
            self._news.clear()
            over = self._over.is_set()
            self._logged = log_study(self._study.path, self._uri, storage=self._storage, running=not over)
            if not self._logged.ok:
                self._over.wait(_RETRY_S)
                self._news.set()
