"""What ``autoprec ui --sync`` does: send to MLflow what it lacks, of every study."""

from __future__ import annotations

import os
from pathlib import Path

from autoprec.cli.echo import echo
from autoprec.errors import FileError


def synced(runs: Path, tracking_uri: str | None) -> int:
    """Write into MLflow the trials of every study under RUNS that it lacks.

    Sending twice changes nothing: trials are recognised, not duplicated. Returns 1 when a store cannot be reached.
    """
    from autoprec.tracking.log import log_study
    from autoprec.tracking.server import studies

    folders = studies(runs)
    if not folders:
        raise FileError("no tracked study here", where=str(runs), fix="name the autoprec-runs directory of a search")
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
    complete = True
    for folder in folders:
        done = log_study(folder.path, tracking_uri, experiment)
        complete &= done.ok
        if not done.ok:
            echo(f"{done.study}: not sent to {done.tracking_uri}: {done.reason}", err=True)
        elif done.written:
            echo(f"{done.study}: {done.written} runs sent to {done.tracking_uri} (run {done.run_id})")
        else:
            echo(f"{done.study}: nothing was missing")
    return 0 if complete else 1
