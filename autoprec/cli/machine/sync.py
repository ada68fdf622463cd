"""What ``autoprec ui --sync`` does: send to MLflow what a tracking server missed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from autoprec.cli.echo import echo
from autoprec.errors import FileError

if TYPE_CHECKING:
    from autoprec.tracking.replay import SyncReport


def _print(done: SyncReport) -> None:
    if not done.ok:
        echo(f"{done.study}: not sent to {done.tracking_uri}: {done.reason}", err=True)
    elif done.sent:
        echo(f"{done.study}: {done.sent} records sent to {done.tracking_uri} (run {done.run_id})")
    else:
        echo(f"{done.study}: nothing was missing")


def synced(runs: Path, tracking_uri: str | None) -> int:
    """Replay the trials of every study under RUNS that MLflow has not seen.

    Sending twice changes nothing: trials are recognised, not duplicated. Returns 1 when a store cannot be reached.
    """
    from autoprec.tracking.replay import sync as replay

    if not runs.is_dir():
        raise FileError("no studies here", where=str(runs), fix="name the autoprec-runs directory of a search")
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
    reports = replay(runs, tracking_uri=tracking_uri, experiment=experiment, report=_print)
    if not reports:
        raise FileError("no tracked study here", where=str(runs), fix="name the autoprec-runs directory of a search")
    return 0 if all(report.ok for report in reports) else 1
