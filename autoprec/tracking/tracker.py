"""The driver's side of tracking: append to the spool, start the background process, never wait."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from autoprec.support.redact import redact, redact_uri
from autoprec.tracking.drain import child_environment
from autoprec.tracking.spool import Spool, State, default_uri, named_uri
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run

#: All the waiting one search does for its store, in total: a server that does not answer must cost < 2 s.
_REMOTE_PATIENCE_S = 1.2
_LOCAL_PATIENCE_S = 20.0


class Tracker:
    """Records one study. No method waits for a server, and none raises for what a server does.

    Built by :meth:`open`. ``study_started`` once, ``trial`` after every trial (again when its tags change), then
    ``finished`` and ``close``. A search that dies in between leaves a spool that ``autoprec sync`` replays.
    """

    def __init__(self, spool: Spool, uri: str, experiment: str, study: str) -> None:
        self._spool, self._uri, self._experiment, self._study = spool, uri, experiment, study
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._patience_s = _REMOTE_PATIENCE_S if self.remote else _LOCAL_PATIENCE_S

    @classmethod
    def open(
        cls,
        study_dir: Path | str,
        *,
        study: str,
        tracking_uri: str | None = None,
        experiment: str | None = None,
    ) -> Tracker:
        """Open the tracker of a study directory (``autoprec-runs/<study>``).

        Args:
            study_dir: where the spool lives; the default store is ``mlflow.db`` in its parent.
            study: name of the parent run.
            tracking_uri: MLflow store; else ``MLFLOW_TRACKING_URI``; else the default store.
            experiment: MLflow experiment; else ``MLFLOW_EXPERIMENT_NAME``; else ``autoprec``.
        """
        study_dir = Path(study_dir).resolve()
        named = named_uri(tracking_uri)
        uri = named or default_uri(study_dir.parent)
        name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "autoprec"
        spool = Spool.of(study_dir)
        spool.append("open", tracking_uri=redact_uri(named), experiment=name, study=study)
        return cls(spool, uri, name, study)

    @property
    def remote(self) -> bool:
        """True when the store is reached over a network."""
        return urlsplit(self._uri).scheme in ("http", "https", "databricks", "postgresql", "mysql", "mssql")

    @property
    def state(self) -> State:
        """What the store is known to hold by now."""
        return self._spool.load_state(self._uri)

    def recorded(self) -> list[Run]:
        """Return every trial of the study as last recorded, those of earlier sessions of a resumed study included."""
        latest: dict[tuple[str, int, int], Run] = {}
        for event, _ in self._spool.read():
            if event["kind"] == "trial":
                record = Run.from_json(event["record"])
                latest[(record.kind, record.number, record.seed)] = record
        return list(latest.values())

    def study_started(self, info: Mapping[str, Any]) -> None:
        """Record what the study was asked to do; secrets in arguments and settings are hidden."""
        self._spool.append("study", info=redact(dict(info)), time=time.time())
        self._start()

    def trial(self, record: Run, groups: Mapping[str, str] | None = None) -> None:
        """Record a trial, with the choice of every layer group; calling again updates the same run."""
        self._spool.append("trial", record=record.to_json(), groups=dict(groups) if groups else None)
        self._start()

    def finished(self, result: SearchResult, artifacts: Sequence[Path | str] = ()) -> dict[str, Any]:
        """Record the outcome and return the ``mlflow`` part of ``--json``.

        Args:
            result: the outcome; the winner table in the run's description is made from it.
            artifacts: files to attach to the study's run.

        Returns:
            ``{"tracking_uri", "experiment_id", "run_id"}``; the ids are None while the store has not answered, and
            then ``pending`` names the command that sends the rest.
        """
        names = [self._spool.keep(path) for path in artifacts]
        self._spool.append("finished", result=result.to_json(), artifacts=names, time=time.time())
        self._start()
        self._wait(lambda state: bool(state.run_id), self._patience_s * (0.5 if self.remote else 0.75))
        return self.reference()

    def attach(self, artifacts: Sequence[Path | str]) -> None:
        """Record further files of the study's run: reports written after the outcome was known."""
        self._spool.append("artifacts", artifacts=[self._spool.keep(path) for path in artifacts])
        self._start()

    def _wait(self, done: Callable[[State], bool], limit_s: float) -> State:
        """Wait until the store's state is as wanted, the store is known to be gone, or patience is used up."""
        start = time.monotonic()
        state = self.state
        while not done(state) and state.status not in ("unreachable", "failed"):
            if time.monotonic() - start >= limit_s or self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.05)
            state = self.state
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - start))
        return self.state

    def reference(self) -> dict[str, Any]:
        """Return where the study is in MLflow, as far as known."""
        state = self.state
        out: dict[str, Any] = {
            "tracking_uri": redact_uri(self._uri),
            "experiment_id": state.experiment_id or None,
            "run_id": state.run_id or None,
        }
        if state.status in ("unreachable", "failed"):
            out |= {"pending": "autoprec sync", "reason": state.reason}
        return out

    def close(self, timeout_s: float | None = None, *, status: str = "FINISHED") -> State:
        """End the study's run and wait briefly for the background process.

        Args:
            timeout_s: how long to wait; by default what is left of 20 s for a local store, of 1.2 s for a server.
                A store known to be unreachable is not waited for at all.
            status: FINISHED, FAILED, or KILLED for an interrupted search.
        """
        if not self._closed:
            self._closed = True
            self._spool.append("end", status=status)
            self._start()
        size = self._spool.size
        return self._wait(lambda state: state.offset >= size, self._patience_s if timeout_s is None else timeout_s)

    def _start(self) -> None:
        """Start the background process unless it runs; failing to start it is not the search's problem."""
        if self._process is not None and self._process.poll() is None:
            return
        environment = child_environment() | {"AUTOPREC_TRACKING_STORE": self._uri, "PYTHONWARNINGS": "ignore"}
        directory = str(self._spool.directory.parent)
        # -P: a file called mlflow.py beside the user's script must not be imported in place of MLflow
        command = [sys.executable, "-P", "-m", "autoprec.tracking", directory, self._experiment, str(os.getpid())]
        with contextlib.suppress(OSError), (self._spool.directory / "drain.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=str(self._spool.directory),
            )
            # it may outlive this object: somebody must reap it
            threading.Thread(target=self._process.wait, daemon=True).start()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(status="FINISHED" if kind is None else "KILLED")
