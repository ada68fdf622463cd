"""``autoprec inspect``: the operators of one training step, their classes, the tunable share, and the reasons.

With ``--sensitivity`` the gradient error of each recipe in each group of layers instead.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoprec.cli import options
from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.policies.published import bound
from autoprec.cli.recording import gradient_errors, is_description, record, running, step_of, times_of
from autoprec.cli.script import script_command
from autoprec.errors import UsageError
from autoprec.graph.census import Judged
from autoprec.graph.report import GraphReport, Layer, OperatorTimes
from autoprec.graph.summary import alignment, class_shares, coverage_line, shape_text
from autoprec.graph.time_table import time_shares
from autoprec.policy.space import default_space, load_space
from autoprec.support.plain import Document
from autoprec.tuning.decide.sentences import unmoved
from autoprec.tuning.phases.record import tunable
from autoprec.tuning.target import resolve_target

if TYPE_CHECKING:
    from autoprec.tuning.decide.table import SensitivityTable

#: Layers that are printed.
MOST_ROWS = 1000
#: Training steps before the scan.
WARMUP = 5


def _row(layer: Layer, total: int) -> tuple[str, ...]:
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
    console = stdout_console()
    headings = ("layer", "type", "M x K x N", "FLOPs", "multiple of", "flags", "group", "tunable")
    console.print(plain_table(headings, [_row(layer, report.total_flops) for layer in report.layers[:MOST_ROWS]]))
    if (more := len(report.layers) - MOST_ROWS) > 0:
        echo(f"and {more:,} more layers: --json lists all")
    total, moved = report.total_flops or 1, sum(operator.bytes for operator in report.operators) or 1
    rows = [
        (name, dtypes, str(calls), f"{flops / total:.1%}", f"{size / moved:.1%}")
        for name, dtypes, calls, flops, size in class_shares(report)
    ]
    console.print(plain_table(("class", "ran in", "calls", "FLOPs", "bytes"), rows))
    if report.judged is not None:
        console.print(plain_table(("kept between operators", "dtype", "tensors", "which"), _census(report.judged)))
    for note in report.notes:
        echo(f"note: {note}")
    echo(coverage_line(report))


def _census(judged: Judged) -> list[tuple[str, ...]]:
    """Return a row for each kind and dtype; what is in another dtype than it should be is named."""
    rows = list[tuple[str, ...]]()
    for kind, dtypes in judged.by_kind().items():
        for dtype, held in dtypes.items():
            asked = [one for one in held if one.asked]
            low = f"fp32 in a run that is fp32 throughout: {held[0].name}" if held[0].twin else held[0].name
            named = f"{asked[0].name}: {asked[0].asked}" if asked else low
            more = f" and {len(held) - 1:,} more" if len(held) > 1 else ""
            rows.append((kind, dtype, f"{len(held):,}", named + more))
    return rows


def _step(words: tuple[str, ...], policy: Path | None) -> tuple[GraphReport, list[OperatorTimes]]:
    """Return one recorded step, and of a script's the times of its operators: as written, then under a policy.

    Raises:
        UsageError: a policy is asked for what cannot be run.
    """
    with Phases() as phases:
        if is_description(words[0]):
            if policy is not None:
                raise UsageError(f"--policy needs a script to run: {words[0]} is a description", fix="leave it out")
            return step_of(words, phases)[0], []
        with running(words, phases, tunes=False) as (runner, host, label):
            report = record(runner, label, phases)
            found = [times_of(runner, phases)]
            if policy is not None:
                found.append(times_of(runner, phases, bound(policy, lambda: report).stages[0].to_dict()))
    times = [one for one in found if not isinstance(one, str)]
    notes = dict.fromkeys((*host.notes, *report.notes, *(one for one in found if isinstance(one, str))))
    return replace(report, notes=tuple(notes)), times if len(times) == len(found) else times[:1]


def _print_times(report: GraphReport, times: OperatorTimes, under: OperatorTimes | None) -> None:
    """Print where a step's time goes; with a policy also what each class takes under it, and what that saves."""
    shares = {one.name: one for one in time_shares(times, report)}
    choices = {name: one.choice for name, one in shares.items()}
    headings = [f"a step: {times.step_ms:.4g} ms", "ms", "share"]
    digits = 2 if times.step_ms >= 1 else 4
    rows = [[one.name, f"{one.ms:.{digits}f}", f"{one.share:.1%}"] for one in shares.values()]
    if under is not None:
        headings += [f"under the policy: {under.step_ms:.4g} ms", "saves"]
        changed = time_shares(under, report)
        then = {one.name: one.ms for one in changed}
        choices |= {one.name: one.choice for one in changed}
        rows += [[name, "-", "-"] for name in then if name not in shares]
        for row in rows:
            before = shares[row[0]].ms if row[0] in shares else 0.0
            after = then.get(row[0], 0.0)
            row += [f"{after:.{digits}f}", f"{before - after:+.{digits}f}"]
    cells = [(*row, choices[row[0]]) for row in rows]
    stdout_console().print(plain_table((*headings, "what a policy can choose"), cells))


def _times_json(report: GraphReport, times: OperatorTimes) -> Document:
    return {"step_ms": times.step_ms, "classes": [asdict(one) for one in time_shares(times, report)]}


def _measure(script: tuple[str, ...], target: str, space: str) -> SensitivityTable:
    from autoprec.cost import CostModel
    from autoprec.tuning.decide.problem import Problem
    from autoprec.tuning.decide.scan import SensitivityScan, scan_batches

    if target != "auto":
        resolve_target(target, "cpu")  # an unknown name is refused before the script is started
    chosen = load_space(space) if space else None
    with Phases() as phases, running(script, phases) as (runner, host, label):
        report = tunable(record(runner, label, phases))
        found, timed = resolve_target(target, host.device)
        problem = Problem.build(report, chosen or default_space(found), CostModel(report, found).can_run)
        scan = SensitivityScan(problem, batches=scan_batches(report))
        while probes := scan.next_round():
            batches = f", on up to {scan.batches} batches" if scan.batches > 1 else ""
            moments = range(WARMUP, WARMUP + scan.batches)
            total = sum(moment + 1 + len(probes) for moment in moments)
            phases.begin(f"gradient errors of {len(probes)} changes to the policy{batches}", total=total)
            backend = "auto" if timed else "emulated"
            answers = gradient_errors(runner, host, label, probes, moments, backend=backend, tell=phases.advance)
            scan.batches = len(answers)  # the script has no more of them
            scan.add(*answers)
    return scan.table()


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    share = row["noise_share"]
    text = f"{row['gradient_error']:.4f}" + (f" ({share:.3f})" if share is not None else "")
    return text if row["measured"] else f"~{text}"


def _print_table(table: SensitivityTable) -> None:
    rows = {(row["group"], row["choice"]): row for row in table.rows()}
    choices = list(dict.fromkeys(choice for _, choice in rows))
    cells = [(group, *(_cell(rows.get((group, choice))) for choice in choices)) for group in table.groups]
    stdout_console().print(plain_table(("group", *choices), cells))
    echo("relative error of the whole gradient when only this group runs so; ~ is interpolated along the depth")
    if table.noise:
        echo(f"in brackets: in units of the mini-batch gradient noise, which is {table.noise:.3f} here")
        echo("below 0.1 of the noise harmless, from 0.35 always bad in a long run")
    for name, value in table.parameters.items():
        echo(f"{name} adds {value**0.5:.4f} beyond the layers' own")
    if table.hardly_moved:
        echo(unmoved(table.hardly_moved))
    fit = table.misfit
    if fit.count:
        text = f"squares of errors add: measured / predicted {fit.ratio:.2f}, within a factor {fit.spread:.2f}"
        echo(f"{text}, over {fit.count} random mixes; {table.passes} forward and backward passes")


@script_command("inspect")
@click.option("--sensitivity", is_flag=True, help="Gradient error of each recipe in each group of layers instead.")
@options.of_search("target", help="With --sensitivity: device whose recipes are probed; default: this one.")
@options.of_search("space", help="With --sensitivity: search space whose choices are probed.")
@click.option("--policy", type=click.Path(path_type=Path), help="Also: where the time goes under this policy.")
@options.as_json("Everything")
def inspect(
    script: tuple[str, ...],
    sensitivity: bool,
    policy: Path | None,
    target: str,
    space: str,
    as_json: bool,
) -> None:
    """Record one training step: every operator, its class and precision, and what share of the step is tunable.

    Where its time goes, by class of operators, and what a policy can choose there; with --policy also what it saves.
    And the census: which parameters, buffers, states, gradients, losses and scores are in which dtype.
    In the place of SCRIPT: a model's config.json, or a file of what --json printed.
    With --sensitivity: the gradient error of every group of layers under every recipe, on the same weights and batch.
    """
    if sensitivity:
        table = _measure(script, target, space)
        if as_json:
            print_json({"rows": table.rows(), **table.to_json()})
        else:
            _print_table(table)
        return
    report, times = _step(script, policy)
    if as_json:
        names = ("times", "times_under_policy")
        print_json(report.to_json() | {name: _times_json(report, one) for name, one in zip(names, times, strict=False)})
        return
    if times:
        _print_times(report, times[0], times[1] if len(times) > 1 else None)
    _print_tables(report)
