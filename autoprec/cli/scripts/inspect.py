"""``autoprec inspect``: the operators of one training step, their classes, the tunable share, and the reasons."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autoprec.cli import options
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import step_of
from autoprec.cli.script import script_command
from autoprec.cli.scripts.sensitivity import print_sensitivity

if TYPE_CHECKING:
    from autoprec.graph.report import GraphReport, Layer


#: Layers that are printed.
MOST_ROWS = 1000


def _row(layer: Layer, total: int) -> tuple[str, ...]:
    from autoprec.graph.summary import alignment, shape_text

    why = ("yes: " if layer.tunable else "no: ") + layer.reason
    return (
        layer.name or "(root)",
        layer.type,
        shape_text(layer),
        f"{layer.total_flops / total:.1%}" if total else "-",
        str(alignment(layer)) if layer.gemms else "-",
        ", ".join(layer.flags),
        "" if layer.group == layer.name else layer.group,
        why,
    )


def _print_tables(report: GraphReport) -> None:
    from autoprec.cli.console import plain_table, stdout_console
    from autoprec.graph.summary import class_shares, coverage_line

    console = stdout_console()
    headings = ("layer", "type", "M x K x N", "FLOPs", "multiple of", "flags", "group", "tunable")
    console.print(plain_table(headings, [_row(layer, report.total_flops) for layer in report.layers[:MOST_ROWS]]))
    if (more := len(report.layers) - MOST_ROWS) > 0:
        echo(f"and {more:,} more layers: --json and --save list all")
    total, moved = report.total_flops or 1, sum(operator.bytes for operator in report.operators) or 1
    rows = [
        (share.name, share.precision, str(share.calls), f"{share.flops / total:.1%}", f"{share.bytes / moved:.1%}")
        for share in class_shares(report)
    ]
    console.print(plain_table(("class", "precision", "calls", "FLOPs", "bytes"), rows))
    for note in report.notes:
        echo(f"note: {note}")
    echo(coverage_line(report))


def _step(words: tuple[str, ...]) -> GraphReport:
    with Phases() as phases:
        report, host = step_of(words, phases)
    return replace(report, notes=tuple(dict.fromkeys((*host.notes, *report.notes)))) if host else report


@script_command("inspect")
@click.option("--save", type=click.Path(path_type=Path), help="Write the recorded step as JSON.")
@click.option("--sensitivity", is_flag=True, help="Gradient error of each recipe in each group of layers instead.")
@click.option("--passes", default=60, show_default=True, metavar="N", type=click.IntRange(min=2),
              help="With --sensitivity: gradients to spend.")  # fmt: skip
@options.of_search("target", help="With --sensitivity: device whose recipes are probed; default: this one.")
@options.of_search("space", help="With --sensitivity: search space whose choices are probed.")
@options.as_json("Everything")
def inspect(
    script: tuple[str, ...],
    save: Path | None,
    sensitivity: bool,
    passes: int,
    target: str,
    space: str,
    as_json: bool,
) -> None:
    """Record one training step: every operator, its class and precision, and what share of the step is tunable.

    In the place of SCRIPT: a preset, a decoder's config.json, or a step saved with --save.
    With --sensitivity: the gradient error of every group of layers under every recipe, on the same weights and batch.
    """
    from autoprec.cli.console import print_json
    from autoprec.graph.report import MAX_GRAPH_BYTES
    from autoprec.support.files import check_kind, holds_keys, write_atomic

    if sensitivity:
        print_sensitivity(script, target, space, passes, as_json=as_json)
        return
    if save is not None:
        ours = holds_keys("operators", "layers")
        check_kind(save, "a recorded step", ours, option="--save", most_bytes=MAX_GRAPH_BYTES)
    report = _step(script)
    if save is not None:
        write_atomic(save, json.dumps(report.to_json()))
    if as_json:
        print_json(report.to_json())
    else:
        _print_tables(report)
