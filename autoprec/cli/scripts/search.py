"""``autoprec search``: find the policy, emit it, prove it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autoprec.cli import options
from autoprec.cli.console import print_json
from autoprec.cli.script import script_command
from autoprec.errors import AutoPrecError

__all__ = ["search"]


@script_command("search")
@click.option("--target", default="auto", metavar="NAME", help="auto (this device, timed), or a GPU to rehearse for.")
@click.option("--space", default="", metavar="NAME|FILE", help="Search space; default: the target's.")
@click.option("--trials", default=30, show_default=True, metavar="N", help="Trials, presets included.")
@click.option(
    "--budget", "budget_s", callback=options.parsed("parse_duration"), metavar="TIME", help="Stop in time: 20m, 90s."
)
@click.option("--steps", default=20, show_default=True, metavar="N", help="Measured steps per trial.")
@click.option("--warmup", default=3, show_default=True, metavar="N", help="Steps before measuring.")
@options.max_divergence
@click.option("--max-gradient-error", default=0.12, show_default=True, metavar="X",
              help="Largest gradient error, in units of the mini-batch gradient noise.")  # fmt: skip
@click.option("--max-memory", callback=options.parsed("parse_bytes"), metavar="BYTES", help="e.g. 60GB.")
@click.option("--objective", type=click.Choice(["throughput", "memory", "balanced"]), default="throughput",
              show_default=True, help="What to optimise among acceptable policies.")  # fmt: skip
@click.option("--reference", type=click.Choice(["script", "fp32", "bf16"]), default="script", show_default=True,
              help="What divergence and speed are compared with.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the search itself.")
@click.option("--seeds", default=4, show_default=True, metavar="N", help="Paired seeds of the finalists.")
@click.option("--finalists", default=3, show_default=True, metavar="N", help="Policies re-measured over several seeds.")
@click.option("--output", "-o", default="policy.yaml", show_default=True, metavar="FILE", help="Where the policy goes.")
@click.option("--study", default="", metavar="NAME", help="Name of the study; default: from the script.")
@click.option("--storage", envvar="OPTUNA_STORAGE", default="", metavar="URL", help="Optuna RDB; default: SQLite.")
@click.option("--resume", is_flag=True, help="Continue a study; finished trials are not repeated.")
@click.option("--workers", default=0, metavar="N", help="Parallel trials; default: by target.")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Where trials run.")  # fmt: skip
@click.option("--ray-address", default="", metavar="ADDRESS", help="Of the Ray cluster; default: one on this machine.")
@click.option("--gpus-per-trial", default=1, show_default=True, metavar="N", help="With --engine ray.")
@click.option("--sampler", type=click.Choice(["ours", "tpe", "nsga2", "random", "ilp", "greedy"]), default="ours",
              show_default=True, help="Who proposes trials; all but ours are for comparison.")  # fmt: skip
@click.option("--cost-scale", default="", metavar="width=16,depth=4,tokens=32",
              help="Rehearsal: evaluate the cost model at scaled shapes.")  # fmt: skip
@click.option("--calibration", default="", metavar="FILE", help="Rehearsal: a file written by `autoprec calibrate`.")
@options.backend
@click.option("--force", is_flag=True, help="Search even where the verdict is 'stay'.")
@click.option("--no-mlflow", is_flag=True, help="Track nothing.")
@options.as_json("The result")
@options.quiet
@click.option("-v", "--verbose", is_flag=True, help="Every trial.")
def search(script: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, no_mlflow: bool, **values: Any) -> int:
    """Search the precision policy that trains SCRIPT fastest without changing its loss curve."""
    from autoprec.cli.progress import TerminalProgress
    from autoprec.tracking.listener import TrackingListener
    from autoprec.trial.command import ScriptCommand
    from autoprec.tuning.engine import Search
    from autoprec.tuning.events import Listener, Listeners
    from autoprec.tuning.options import SearchOptions
    from autoprec.tuning.study.records import SearchResult

    values["trials"] = int(values["trials"])
    asked = SearchOptions(command=script, **values)
    command = ScriptCommand.parse(asked.command)
    progress = TerminalProgress(-1 if quiet else int(verbose))
    members: list[Listener] = [progress]
    tracker = None if no_mlflow else TrackingListener(asked.runs_dir)
    if tracker is not None:
        members.append(tracker)
    engine = Search(asked, command, Listeners(*members))
    try:
        result: SearchResult = engine.run()
        if tracker is not None:
            result = tracker.attach(result, engine.study_dir)
        files = write_reports(engine, result)
    finally:
        progress.close()
        if tracker is not None:
            tracker.close()
    if as_json:
        print_json(result.to_json(), indent=1)
    else:
        print_result(engine, result, files)
    return 0


def write_reports(engine: Any, result: Any) -> dict[str, Path]:
    """Write report.html, report.md and result.json beside the study; one that fails is named, never fatal."""
    from autoprec import report
    from autoprec.support.files import write_json

    records = engine.records
    out = {}
    writers: dict[str, Callable[[Path], Any]] = {
        "result.json": lambda path: write_json(path, result.to_json()),
        "report.html": lambda path: report.write_html(path, result, records, engine.graph),
        "report.md": lambda path: report.write_markdown(path, result, records),
    }
    for name, write in writers.items():
        path = engine.study_dir / name
        try:
            write(path)
            out[name] = path
        except (AutoPrecError, OSError) as error:  # the policy is written: that is what the search was for
            click.echo(f"autoprec: {name} could not be written: {error}", err=True)
    return out


def print_result(engine: Any, result: Any, files: dict[str, Path]) -> None:
    """Print the final table and what to do next, on stdout."""
    from autoprec import report
    from autoprec.cli.console import stdout_console

    console = stdout_console()
    console.print(report.terminal_table(result, engine.records))
    lines = [f"verdict: {result.verdict}. {result.reason}", f"policy:  {result.policy}"]
    if "report.html" in files:
        lines.append(f"report:  {files['report.html']}")
    uri = result.mlflow.get("tracking_uri")
    if uri:
        lines.append("trials:  autoprec ui")
    lines.append(f"load it: autoprec.load({result.policy!r}).apply(model)")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
