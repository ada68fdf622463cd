"""``autoprec search``: find the policy, emit it, prove it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoprec.cli import options
from autoprec.cli.console import clock, command_began, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.progress import TerminalProgress
from autoprec.cli.script import script_command
from autoprec.errors import AutoPrecError, NothingAcceptableError
from autoprec.support.files import write_json
from autoprec.support.optional import how_to_install, installed_version
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study.records import SearchResult

if TYPE_CHECKING:
    from autoprec.tuning.engine import Search

Files = dict[str, Path]

EXAMPLES = (
    "autoprec search train.py --lr 3e-4",
    "autoprec search --dry-run --target h100 train.py",
    "autoprec search --target h100 --cost-scale width=16,depth=4,tokens=32 --trials 12 train.py",
    "autoprec search --budget 20m --max-divergence 0.1% -m package.train --config c.yaml",
    "autoprec search --resume --study train -- torchrun --nproc-per-node 2 train.py",
)


@script_command("search", groups=options.search_groups(), examples=EXAMPLES)
@options.search_options
@click.option("--dry-run", is_flag=True, help="Record one step, say what would be tried and how long; try nothing.")
@options.as_json("The result")
@options.quiet
@click.option("-v", "--verbose", is_flag=True, help="Every trial.")
def search(
    script: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    dry_run: bool,
    **values: Any,
) -> int:
    """Search the precision policy that trains SCRIPT fastest without changing its loss curve."""
    asked = SearchOptions(command=script, **values)
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
    """Return what a search ends with: nothing can be said if cut short too early, or beside a faulty reference."""
    return NothingAcceptableError.exit_code if result.verdict == "undecided" else 0


def perform(asked: SearchOptions, *, verbosity: int = 0) -> tuple[Search, SearchResult, Files]:
    """Search, tell the terminal and MLflow, and write the reports.

    Returns:
        The engine, its result, and the report files that could be written, by name.
    """
    from autoprec.tracking.listener import tracked

    with (
        contextlib.closing(TerminalProgress(verbosity)) as progress,
        tracked(asked, progress, started=command_began()) as (engine, result),
    ):
        return engine, result, write_reports(engine, result)


def write_reports(engine: Search, result: SearchResult) -> Files:
    """Write report.html and result.json beside the study; one that fails is named, never fatal."""
    from autoprec.reports.html import write_html

    records = engine.records
    out = {}
    writers: dict[str, Callable[[Path], Any]] = {
        "result.json": lambda path: write_json(path, result.to_json()),
        "report.html": lambda path: write_html(path, result, records, engine.graph),
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
    """Print the final table and what to do next, on stdout.

    Args:
        engine: the search that ended.
        result: its answer.
        files: what was written, by what it is.
    """
    from autoprec.reports.text import verdict_lines

    console = stdout_console()
    console.print(replace(result.table(), notes=("; ".join(result.facts()),)).rich())  # the verdict follows
    first, *caveats = verdict_lines(result)
    lines = [f"verdict: {result.verdict}. {first}", *(f"         - {line}" for line in caveats)]
    lines += [f"variant: {row['name']} {row['status']}: {row['reason']}" for row in result.variants]
    if result.stopped:
        lines.append(f"stopped: {result.stopped}")
    if result.resume:
        lines.append(f"go on:   {engine.go_on_command()}")
    lines.append(f"policy:  {_policy_text(engine, result)}")
    if "report.html" in files:
        lines.append(f"report:  {files['report.html']}")
    uri = result.mlflow.get("tracking_uri")
    if uri:
        first = "" if installed_version("mlflow") else f"{how_to_install('mlflow')}, then "
        lines.append(f"trials:  {first}autoprec ui")
    lines.append(f"took:    {clock(time.monotonic() - command_began())}, the reports and MLflow included")
    if result.verdict == "adopt":
        lines += [
            f"load it: policy = autoprec.load({result.policy!r}); policy.apply(model)",
            "         optimizer = policy.wrap_optimizer(optimizer)",
        ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _policy_text(engine: Search, result: SearchResult) -> str:
    """Say which policy was written, or that none was and what is there instead."""
    if result.policy:
        plain = "" if result.verdict == "adopt" else ", which changes nothing"
        return f"{result.policy}{plain}" + (f" ({engine.set_aside})" if engine.set_aside else "")
    best = engine.study_dir / "best.yaml"
    text = "none was written, because nothing is decided yet"
    return f"{text}; the best that was tried is {best}" if best.exists() else text
