"""``autoprec ui``: MLflow's interface on the study's store, opened at its trials."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import click

from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.support.redact import redact_uri


def _has_browser() -> bool:
    """Say whether a browser could open: without a display, xdg-open tries six programs and complains about each."""
    if named := os.environ.get("BROWSER"):
        return named != "none"
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@click.command("ui", short_help="Open MLflow at the trials of a study.")
@click.argument("runs", type=click.Path(path_type=Path), default=Path("autoprec-runs"))
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True,
              help="Port on 127.0.0.1; another free one if it is taken.")  # fmt: skip
@click.option("--sync", is_flag=True, help="Open nothing: send to MLflow what its server missed.")
def ui(runs: Path, port: int, sync: bool) -> int:
    """Serve the studies under RUNS on this machine and open the newest one's trials, fastest first.

    RUNS is autoprec-runs, or the folder of one study in it. The store is MLFLOW_TRACKING_URI, else the study's own.
    The server listens on 127.0.0.1 only and ends with Ctrl-C; BROWSER=none opens nothing. With --sync the exit code
    is 1 when a store cannot be reached.
    """
    if sync:
        return _sync(runs)
    from autoprec.tracking.log import is_at_work, log_study
    from autoprec.tracking.server import free_port, newest_study, serve, studies
    from autoprec.tracking.study import store_of
    from autoprec.tracking.view import trials_url

    chosen = newest_study(runs)
    uri = store_of(chosen)
    with Phases() as phases:
        phases.begin(f"bringing MLflow up to date with {chosen.path.name}")
        logged = log_study(chosen.path)
        if not logged.ok:
            echo(f"MLflow may lack trials of this study: {logged.reason}", err=True)
        for other in studies(runs):  # MLflow would show one whose search was killed as running for ever
            if other.path == chosen.path or other.told() == redact_uri(store_of(other)):
                continue
            if other.status(running=is_at_work(other.path)) == "KILLED":
                log_study(other.path)
        phases.begin(f"starting MLflow on {chosen.path.name}")
        with serve(uri, free_port(port)) as base:
            phases.close()
            outcome = chosen.outcome()
            known = outcome[0].mlflow.get("experiment_id") if outcome else ""
            experiment = logged.experiment_id or known or "0"
            url, charts = (trials_url(base, experiment, chosen.uid, charts=charts) for charts in (False, True))
            _show(url, charts)
    return 0


def _show(url: str, charts: str) -> None:
    """Print the addresses, open the first in a browser where there is one, and wait for Ctrl-C."""
    echo(url)
    echo(f"charts: {charts}", err=True)
    if _has_browser():
        click.launch(url)
    else:
        echo("no browser here: open the address above, over ssh with -L", err=True)
    echo("Ctrl-C ends it", err=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def _sync(runs: Path) -> int:
    """Write into MLflow the trials of every study under RUNS that it lacks.

    Sending twice changes nothing: trials are recognised, not duplicated. Returns 1 when a store cannot be reached.
    """
    from autoprec.tracking.log import log_study
    from autoprec.tracking.server import studies

    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
    complete = True
    for folder in studies(runs):
        done = log_study(folder.path, experiment=experiment)
        complete &= done.ok
        if not done.ok:
            echo(f"{done.study}: not sent to {done.tracking_uri}: {done.reason}", err=True)
        elif done.written:
            echo(f"{done.study}: {done.written} runs sent to {done.tracking_uri} (run {done.run_id})")
        else:
            echo(f"{done.study}: nothing was missing")
    return 0 if complete else 1
