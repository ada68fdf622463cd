"""Bring MLflow up to date with a study: the one function behind a search and ``autoprec ui``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from autoprec.errors import StudyError
from autoprec.support.files import file_lock
from autoprec.support.redact import redact_text, redact_uri
from autoprec.support.text import visible
from autoprec.tracking.rows import trial_runs
from autoprec.tracking.study import TrackedStudy, default_uri, named_uri

#: What MLflow is set to while we log: no telemetry, no log lines, and no minutes of retries when a server is gone.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_TRACKING_INSECURE_TLS_WARNINGS": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "GIT_PYTHON_REFRESH": "quiet",
}
#: How long to wait for another process that logs the same study.
_PATIENCE_S = 40.0
_UNNAMED = (
    "an address of a server is not taken from a study's folder, which may be anybody's: if you trust it, set "
    "MLFLOW_TRACKING_URI={} (with its login, if it had one)"
)


@dataclass(frozen=True, slots=True)
class Logged:
    """What became of one study: how many runs were ``written``, or why not (``reason``); ``run_id`` is its own run."""

    study: str
    tracking_uri: str
    written: int = 0
    reason: str = ""
    run_id: str = ""
    experiment_id: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything was written."""
        return not self.reason


def reachable(uri: str, *, timeout_s: float = 1.0) -> str:
    """Return an empty text when a store can be reached, else the reason; local stores always can.

    An HTTP server must accept a connection and answer ``/health`` within ``timeout_s`` each.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return ""
    import urllib.error
    import urllib.request

    try:
        # without its login, which MLflow's own client sends
        with urllib.request.urlopen(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/health", timeout=timeout_s):
            return ""
    except urllib.error.HTTPError:
        return ""  # it answers; whether it accepts us is for MLflow to find out
    except OSError as error:
        return f"{redact_uri(uri)} does not answer: {error}"


def log_study(
    study_dir: Path | str,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    *,
    storage: str = "",
    running: bool | None = None,
) -> Logged:
    """Write into MLflow what it lacks of a study; what is there already stays, so calling again changes nothing.

    Never raises for what a server or a database does: the reason is in the answer.

    Args:
        study_dir: ``autoprec-runs/<study>``.
        tracking_uri: the store; else ``MLFLOW_TRACKING_URI``; else the study's own, if that is a file. A server is
            never taken from the study: a folder of somebody else's would name one that is sent the user's token.
        experiment: the experiment; else the one that the study was begun with.
        storage: address of the study's database with its login; default: ``OPTUNA_STORAGE``, or the study's own file.
        running: whether the search is at work; None: see whether one holds the study.
    """
    study = TrackedStudy(Path(study_dir))
    about = study.about()
    named = named_uri(tracking_uri)
    if not named and about.tracking_uri and not about.tracking_uri.startswith(("sqlite:", "file:")):
        why = _UNNAMED.format(visible(shlex.quote(about.tracking_uri)))
        return Logged(about.study, about.tracking_uri, reason=why)
    uri = named or about.tracking_uri or default_uri(study.path.resolve().parent)
    done = Logged(about.study, redact_uri(uri))
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment())
            _hold(stack, study.own / "lock")
            at_work = is_at_work(study.path) if running is None else running
            return _write(study, uri, experiment or about.experiment, storage, at_work, done)
    except Exception as error:  # whatever a server or a database does must not be the search's problem
        why = redact_text(error.what if isinstance(error, StudyError) else f"{type(error).__name__}: {error}")[:2000]
        return replace(done, reason=why or "it failed")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set what MLflow reads, but for what a person has set; a process that goes on has its own settings again."""
    ours = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _hold(stack: contextlib.ExitStack, path: Path) -> None:
    """Hold a lock once what has it, another process of ours, is done."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return stack.enter_context(file_lock(path, what="study's tracking"))
        except StudyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def is_at_work(study_dir: Path) -> bool:
    """Say whether a search holds the study."""
    try:
        with (study_dir / "lock").open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _write(study: TrackedStudy, uri: str, experiment: str, storage: str, running: bool, begun: Logged) -> Logged:
    """Write a study into a store and return what has become of it.

    Raises:
        StudyError: the study's database cannot be read, or the store's server does not answer.
        Exception: of MLflow.
    """
    records, outcome, about = study.records(storage), study.outcome(), study.about()
    result, found_at = outcome or (None, 0.0)
    if problem := reachable(uri):
        raise StudyError(problem)
    from autoprec.tracking.store import Store

    with contextlib.ExitStack() as stack:
        # two studies may meet a new database at the same moment; its tables must be created once
        _hold(stack, study.path.parent / ".mlflow-setup.lock")
        store = Store(uri, experiment, study.uid, about.study)
        store.open_parent(about.info, about.started, running=running)
    runs = trial_runs(records, result, about.info, about.study)
    written = sum([store.write_trial(record, run, found_at) for record, run in zip(records, runs, strict=True)])
    written += store.write_study(result, records, study.files(), study.status(running=running), found_at)
    if not running:
        (study.own / "told").write_text(begun.tracking_uri, encoding="utf-8")
    return replace(begun, written=written, run_id=store.run_id, experiment_id=store.experiment_id)
