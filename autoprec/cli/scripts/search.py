"""``autoprec search``: find the policy, emit it, prove it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoprec.cli import options
from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.script import script_command
from autoprec.errors import AutoPrecError, NothingAcceptableError
from autoprec.trial.protocol import STEPS

if TYPE_CHECKING:
    from autoprec.tuning.engine import Search
    from autoprec.tuning.options import SearchOptions
    from autoprec.tuning.study.records import SearchResult

Files = dict[str, Path]


#: The order in which a first reader needs them; what has no place here comes last.
GROUPS = {
    "What to search": ("--target", "--cost-scale", "--calibration", "--space", "--reference", "--backend"),
    "How long": ("--trials", "--budget", "--steps", "--warmup", "--seeds", "--dry-run", "--force"),
    "What the whole run is": ("--run-steps", "--phases", "--at-step", "--at"),
    "What is acceptable": ("--max-divergence", "--max-gradient-error", "--max-memory", "--objective"),
    "Where it is kept": ("--output", "--study", "--storage", "--resume", "--no-mlflow"),
    "Who runs and proposes trials": (
        *("--workers", "--engine", "--ray-address", "--gpus-per-trial"),
        *("--sampler", "--seed"),
    ),
    "What is printed": ("--json", "--quiet", "--verbose"),
}
EXAMPLES = (
    "autoprec search train.py --lr 3e-4",
    "autoprec search --dry-run --target h100 train.py",
    "autoprec search --target h100 --cost-scale width=16,depth=4,tokens=32 --trials 12 train.py",
    "autoprec search --budget 20m --max-divergence 0.1% -m package.train --config c.yaml",
    "autoprec search --resume --study train -- torchrun --nproc-per-node 2 train.py",
)


@script_command("search", groups=GROUPS, examples=EXAMPLES)
@click.option("--target", default="auto", metavar="NAME", help="auto (this device, timed), or a GPU to rehearse for.")
@click.option("--space", default="", metavar="NAME|FILE", help="Search space; default: the target's.")
@click.option("--trials", default=30, show_default=True, metavar="N", help="Trials, presets included.")
@click.option(
    "--budget", "budget_s", callback=options.parsed("parse_duration"), metavar="TIME", help="Stop in time: 20m, 90s."
)
@click.option("--steps", default=STEPS, show_default=True, metavar="N", help="Measured steps per trial.")
@click.option("--warmup", default=3, show_default=True, metavar="N", help="Steps before measuring.")
@options.max_divergence
@click.option("--max-gradient-error", default=0.12, show_default=True, metavar="X",
              help="Largest gradient error, in units of the mini-batch gradient noise.")  # fmt: skip
@click.option("--max-memory", callback=options.parsed("parse_bytes"), metavar="BYTES", help="e.g. 60GiB.")
@click.option("--objective", type=click.Choice(["throughput", "memory", "balanced"]), default="throughput",
              show_default=True, help="What to optimise among acceptable policies.")  # fmt: skip
@click.option("--reference", type=click.Choice(["script", "fp32", "bf16"]), default="script", show_default=True,
              help="What divergence and speed are compared with.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the search itself.")
@click.option(
    "--seeds",
    default=4,
    show_default=True,
    metavar="N",
    help="Paired seeds of a policy: as many where the loss cannot judge, else 2 to 24, as the decision needs.",
)
@click.option("--run-steps", default=0, metavar="N", help="Optimizer steps of the whole run, for --phases.")
@click.option("--phases", default="", metavar="first-bf16,last-bf16",
              help="Begin (200 steps) and end (15 %) the run in bf16.")  # fmt: skip
@click.option("--at-step", default=0, metavar="N",
              help="Train the script to step N first; every trial starts there.")  # fmt: skip
@click.option("--at", default="", metavar="0,1000,5000",
              help="Measure gradient errors at these steps of the script; the worst of all ages counts.")  # fmt: skip
@click.option("--output", "-o", default="policy.yaml", show_default=True, metavar="FILE", help="Where the policy goes.")
@click.option("--study", default="", metavar="NAME", help="Name of the study; default: from the script.")
@click.option("--storage", envvar="OPTUNA_STORAGE", default="", metavar="URL", help="Optuna RDB; default: SQLite.")
@click.option("--resume", is_flag=True, help="Continue a study; finished trials are not repeated.")
@click.option("--workers", default=0, metavar="N", help="Parallel trials; default: by target, on one GPU 1.")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Where trials run.")  # fmt: skip
@click.option("--ray-address", default="", metavar="ADDRESS", help="Of the Ray cluster; default: one on this machine.")
@click.option("--gpus-per-trial", default=1, show_default=True, metavar="N", help="With --engine ray.")
@click.option("--sampler", type=click.Choice(["ours", "tpe", "nsga2", "random", "gp", "ilp", "greedy"]), default="ours",
              show_default=True, help="Who proposes trials; all but ours are for comparison.")  # fmt: skip
@click.option("--cost-scale", default="", metavar="width=16,depth=4,tokens=32",
              help="Rehearsal: evaluate the cost model at scaled shapes.")  # fmt: skip
@click.option("--calibration", default="", metavar="FILE", help="From `autoprec calibrate`; not needed on that device.")
@click.option("--runs-dir", default="autoprec-runs", hidden=True)  # what a search from Python says to resume it
@options.backend
@click.option("--dry-run", is_flag=True, help="Print the plan and how long it would take; search nothing.")
@click.option("--force", is_flag=True, help="Search even where the verdict is 'stay'.")
@click.option("--no-mlflow", is_flag=True, help="Track nothing.")
@options.as_json("The result")
@options.quiet
@click.option("-v", "--verbose", is_flag=True, help="Every trial.")
def search(
    script: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_mlflow: bool,
    dry_run: bool,
    **values: Any,
) -> int:
    """Search the precision policy that trains SCRIPT fastest without changing its loss curve."""
    from autoprec.tuning.options import SearchOptions

    asked = SearchOptions(command=script, track=not no_mlflow, **values)
    if dry_run:
        from autoprec.cli.scripts.plan import print_plan

        print_plan(asked, as_json=as_json, quiet=quiet)
        return 0
    engine, result, files = perform(asked, verbosity=-1 if quiet else int(verbose))
    if as_json:
        print_json(result.to_json(), indent=1)
    else:
        print_result(engine, result, files)
    return exit_code(result)


def exit_code(result: SearchResult) -> int:
    """Return what a search ends with: nothing could be said when it was cut short before it measured enough."""
    return NothingAcceptableError.exit_code if result.verdict == "undecided" else 0


def perform(asked: SearchOptions, *, verbosity: int = 0) -> tuple[Search, SearchResult, Files]:
    """Search, tell the terminal and MLflow, and write the reports.

    Returns:
        The engine, its result, and the report files that could be written, by name.
    """
    from autoprec.cli.console import command_began
    from autoprec.cli.progress import TerminalProgress
    from autoprec.tracking.listener import TrackingListener
    from autoprec.trial.command import ScriptCommand
    from autoprec.tuning.engine import Search
    from autoprec.tuning.events import Listener, Listeners

    command = ScriptCommand.parse(asked.command)
    progress = TerminalProgress(verbosity)
    listeners: list[Listener] = [progress]
    tracker = TrackingListener(asked.runs_dir) if asked.track else None
    if tracker is not None:
        listeners.append(tracker)
    engine = Search(asked, command, Listeners(*listeners), started=command_began())
    try:
        result = engine.run()
        if tracker is not None:
            progress.phase("tracking")
            result = tracker.attach(result, engine.study_dir)
        result = engine.timed(result)
        return engine, result, write_reports(engine, result)
    finally:
        if tracker is not None:
            tracker.close()
        progress.close()


def write_reports(engine: Search, result: SearchResult) -> Files:
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
            echo(f"autoprec: {name} could not be written: {error}", err=True)
    return out


def print_result(engine: Search, result: SearchResult, files: Files) -> None:
    """Print the final table and what to do next, on stdout."""
    from autoprec import report
    from autoprec.cli.console import clock, command_began, stdout_console

    console = stdout_console()
    console.print(report.terminal_table(result, engine.records))
    lines = [f"verdict: {result.verdict}. {result.reason}"]
    if result.stopped:
        lines.append(f"stopped: {result.stopped}")
    if result.resume:
        lines.append(f"go on:   {engine.go_on_command()}")
    if result.policy:
        lines.append(f"policy:  {result.policy}")
    if "report.html" in files:
        lines.append(f"report:  {files['report.html']}")
    uri = result.mlflow.get("tracking_uri")
    if uri:
        lines.append("trials:  autoprec ui")
    lines.append(f"took:    {clock(time.monotonic() - command_began())}, the reports and MLflow included")
    if result.policy:
        lines.append(f"load it: autoprec.load({result.policy!r}).apply(model)")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
