"""``autoprec ui``: MLflow's interface on the study's store, opened at its trials."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import click

__all__ = ["ui"]


@click.command("ui", short_help="Open MLflow at the trials of a study.")
@click.argument("runs", type=click.Path(path_type=Path), default=Path("autoprec-runs"))
@click.option("--study", metavar="NAME", help="Which study; default: the newest.")
@click.option("--port", default=5000, show_default=True, help="Port on 127.0.0.1; another free one if it is taken.")
@click.option("--tracking-uri", metavar="URI", help="Store to show; default: MLFLOW_TRACKING_URI, or the study's.")
@click.option("--no-open", is_flag=True, help="Print the address without opening a browser.")
def ui(runs: Path, study: str | None, port: int, tracking_uri: str | None, no_open: bool) -> None:
    """Serve the studies under RUNS on this machine and open the trials table, fastest first.

    The server listens on 127.0.0.1 only and ends with Ctrl-C.
    """
    from autoprec.tracking.server import free_port, newest_study, serve

    chosen = newest_study(runs, study, tracking_uri)
    click.echo(f"starting MLflow on {chosen.name} ...", err=True)
    with serve(chosen.tracking_uri, free_port(port)) as base:
        url = chosen.url(base)
        click.echo(url)
        if not no_open:
            click.launch(url)
        click.echo("Ctrl-C ends it", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()
