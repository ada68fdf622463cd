"""``autoprec ui``: MLflow's interface on the study's store, opened at its trials."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autoprec.cli.echo import echo
from autoprec.cli.machine.sync import synced
from autoprec.cli.phases import Phases

if TYPE_CHECKING:
    from autoprec.tracking.server import Study


@contextlib.contextmanager
def serve_told(study: Study, port: int, phases: Phases) -> Iterator[str]:
    """Start the server, saying so from the first second: importing MLflow and preparing its store takes a while."""
    from autoprec.tracking.server import free_port, serve

    phases.begin(f"starting MLflow on {study.name}")
    with serve(study.tracking_uri, free_port(port)) as base:
        yield base


def _has_browser() -> bool:
    """Say whether a browser could open: without a display, xdg-open tries six programs and complains about each."""
    if os.environ.get("BROWSER") or sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@click.command("ui", short_help="Open MLflow at the trials of a study.")
@click.argument("runs", type=click.Path(path_type=Path), default=Path("autoprec-runs"))
@click.option("--study", metavar="NAME", help="Which study; default: the newest.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=5000,
    show_default=True,
    help="Port on 127.0.0.1; another free one if it is taken.",
)
@click.option("--tracking-uri", metavar="URI", help="Store to show; default: MLFLOW_TRACKING_URI, or the study's.")
@click.option("--sync", is_flag=True, help="Open nothing: send to MLflow what its server missed.")
@click.option("--no-open", is_flag=True, help="Print the address without opening a browser.")
def ui(runs: Path, study: str | None, port: int, tracking_uri: str | None, sync: bool, no_open: bool) -> int:
    """Serve the studies under RUNS on this machine and open the trials table, fastest first.

    The server listens on 127.0.0.1 only and ends with Ctrl-C. With --sync the exit code is 1 when a store cannot be
    reached.
    """
    if sync:
        return synced(runs, tracking_uri)
    from autoprec.tracking.server import newest_study

    chosen = newest_study(runs, study, tracking_uri)
    with Phases() as phases, serve_told(chosen, port, phases) as base:
        phases.close()
        url = chosen.url(base)
        echo(url)
        echo(f"charts: {chosen.url(base, charts=True)}", err=True)
        if not no_open and _has_browser():
            click.launch(url)
        elif not no_open:
            echo("no browser here: open the address above, over ssh with -L", err=True)
        echo("Ctrl-C ends it", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()
    return 0
