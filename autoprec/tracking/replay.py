"""Sending later what a tracking server missed: ``autoprec sync``."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autoprec.errors import StudyError
from autoprec.support.files import file_lock
from autoprec.support.redact import redact_uri
from autoprec.support.text import visible
from autoprec.tracking.drain import ENVIRONMENT, drain
from autoprec.tracking.spool import Spool, default_uri, named_uri

#: The background process of a search that has just ended gives up after half a minute at the latest.
_PATIENCE_S = 40.0
_OF_A_FILE = ("sqlite:", "file:")
_UNNAMED = (
    "an address of a server is not taken from a study's folder, which may be anybody's: if you trust it, pass "
    "--tracking-uri {} (with its login, if it had one) or set MLFLOW_TRACKING_URI"
)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What became of one study: ``sent`` events, or why not (``reason``); ``run_id`` is its parent run."""

    study: str
    tracking_uri: str
    sent: int
    ok: bool
    reason: str = ""
    run_id: str = ""
    experiment_id: str = ""


def sync(
    runs_dir: Path | str,
    *,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    report: Callable[[SyncReport], None] = lambda _: None,
) -> list[SyncReport]:
    """Replay every study under ``runs_dir`` that a store has not seen to its end; idempotent.

    Args:
        runs_dir: ``autoprec-runs``, or one study directory in it.
        tracking_uri: the store; else ``MLFLOW_TRACKING_URI``; else the study's own, if that is a file. A server is
            never taken from the study: a folder of somebody else's would name one that is sent the user's token.
        experiment: the experiment; else what each study was opened with.
    """
    runs = Path(runs_dir)
    spools = sorted(runs.glob("*/tracking/spool.jsonl")) or sorted(runs.glob("tracking/spool.jsonl"))
    os.environ.update(ENVIRONMENT)
    out = []
    for path in spools:
        done = _sync_one(Spool.of(path.parent.parent), tracking_uri, experiment)
        report(done)
        out.append(done)
    return out


def _sync_one(spool: Spool, tracking_uri: str | None, experiment: str | None) -> SyncReport:
    study_dir = spool.directory.parent
    opened = spool.target()
    recorded = opened.get("tracking_uri", "")
    named = named_uri(tracking_uri)
    if not named and recorded and not recorded.startswith(_OF_A_FILE):
        return SyncReport(study_dir.name, recorded, 0, False, _UNNAMED.format(visible(shlex.quote(recorded))))
    uri = named or recorded or default_uri(study_dir.resolve().parent)
    name = experiment or opened.get("experiment") or "autoprec"
    sent = 0

    def count() -> None:
        nonlocal sent
        sent += 1

    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with file_lock(spool.directory / "drain.lock", what="study's tracking"):
                state, _ = drain(spool, uri, name, progress=count)
            break
        except StudyError as error:  # the search that writes it, or its background process, is still there
            if time.monotonic() > deadline:
                return SyncReport(study_dir.name, redact_uri(uri), 0, False, f"still being sent: {error.what}")
            time.sleep(0.2)
    ok = state.status not in ("unreachable", "failed")
    return SyncReport(
        study_dir.name, redact_uri(uri), sent, ok, "" if ok else state.reason, state.run_id, state.experiment_id
    )
