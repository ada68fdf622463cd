"""``autoprec sensitivity``: the gradient error that each recipe would cause in each group of layers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoprec.cli.script import script_command
from autoprec.errors import NothingAcceptableError, ScriptError

if TYPE_CHECKING:
    from autoprec.trial.protocol import TrialResult
    from autoprec.tuning.decide.table import SensitivityTable

__all__ = ["sensitivity"]


def _payload(result: TrialResult, script: str) -> dict[str, Any]:
    """Return the payload of a trial.

    Raises:
        ScriptError: the trial failed; the message carries the script's own output.
    """
    if not result.ok:
        short = result.status == "too_short"
        raise ScriptError(
            f"the step could not be measured: {result.reason or result.status}",
            where=script,
            fix=result.tail or ("use a smaller --warmup" if short else "run the script by itself first"),
        )
    return result.payload


def _measure(script: tuple[str, ...], target: str, space: str, warmup: int, passes: int) -> SensitivityTable:
    from autoprec.cost import CostModel
    from autoprec.graph.report import GraphReport
    from autoprec.policy.space import default_space, load_space
    from autoprec.trial.command import ScriptCommand
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.trial.protocol import TrialSpec
    from autoprec.tuning.decide.problem import Problem
    from autoprec.tuning.decide.scan import SensitivityScan, scan_batches
    from autoprec.tuning.target import resolve_target

    if target != "auto":
        resolve_target(target, "cpu")  # an unknown name is refused before the script is started
    chosen = load_space(space) if space else None
    command = ScriptCommand.parse(script)
    with (
        tempfile.TemporaryDirectory(prefix="autoprec-sensitivity-") as directory,
        TrialRunner(command, run_dir=Path(directory)) as runner,
    ):
        host = runner.start()
        recorded = _payload(runner.run(TrialSpec(kind="record", steps=1, warmup=0)), command.label)
        report = GraphReport.from_json(recorded["graph"])
        if not report.tunable:
            raise NothingAcceptableError("there is no trainable GEMM to tune", fix="`autoprec inspect` says why")
        found, timed = resolve_target(target, host.device)
        problem = Problem.build(report, chosen or default_space(found), CostModel(report, found).can_run)
        scan = SensitivityScan(problem, max_passes=passes, batches=scan_batches(report))
        seed = None if host.launch == "fork" else 0

        while probes := scan.next_round():
            payloads: list[dict[str, Any]] = []
            for later in range(scan.batches):
                spec = TrialSpec(
                    kind="sensitivity",
                    steps=1,
                    warmup=warmup + later,
                    probes=tuple(probes),
                    batches=2,
                    seed=seed,
                    backend="auto" if timed else "emulated",
                )
                result = runner.run(spec)
                if payloads and result.status == "too_short":
                    scan.batches = len(payloads)  # the script has no more of them
                    break
                payloads.append(_payload(result, command.label))
            scan.add(*payloads)
    return scan.table()


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    share = row["noise_share"]
    text = f"{row['gradient_error']:.4f}" + (f" ({share:.3f})" if share is not None else "")
    return text if row["measured"] else f"~{text}"


def _print(table: SensitivityTable) -> None:
    from autoprec.cli.tables import plain_table, stdout_console

    rows = {(row["group"], row["choice"]): row for row in table.rows()}
    choices = list(dict.fromkeys(choice for _, choice in rows))
    cells = [(group, *(_cell(rows.get((group, choice))) for choice in choices)) for group in table.groups]
    stdout_console().print(plain_table(("group", *choices), cells))
    click.echo("relative error of the whole gradient when only this group runs so; ~ is interpolated along the depth")
    if table.noise:
        click.echo(f"in brackets: in units of the mini-batch gradient noise, which is {table.noise:.3f} here")
        click.echo("below 0.1 of the noise harmless, from 0.35 always bad in a long run")
    for name, value in table.parameters.items():
        click.echo(f"{name} adds {value**0.5:.4f} beyond the layers' own")
    if table.lost_updates is not None:
        click.echo(f"weights kept in bf16 would not take {table.lost_updates:.0%} of a step's update (by magnitude)")
    for name, share in table.lost_state.items():
        click.echo(f"{name} kept in bf16, rounded to nearest, would not take {share:.0%} of a step's change")
    fit = table.misfit
    if fit.count:
        text = f"squares of errors add: measured / predicted {fit.ratio:.2f}, within a factor {fit.spread:.2f}"
        click.echo(f"{text}, over {fit.count} random mixes; {table.passes} forward and backward passes")


@script_command("sensitivity")
@click.option("--target", default="auto", metavar="NAME", help="Whose recipes are asked about; default: this device.")
@click.option("--space", default="", metavar="NAME|FILE", help="Search space whose choices are asked about.")
@click.option("--warmup", default=5, show_default=True, type=click.IntRange(min=1), help="Steps before the scan.")
@click.option("--passes", default=60, show_default=True, type=click.IntRange(min=2), help="Gradients to spend.")
@click.option("--json", "as_json", is_flag=True, help="The table as JSON on stdout.")
def sensitivity(script: tuple[str, ...], target: str, space: str, warmup: int, passes: int, as_json: bool) -> None:
    """Measure the gradient error of every group of layers under every recipe, on the same weights and batch."""
    table = _measure(script, target, space, warmup, passes)
    if as_json:
        click.echo(json.dumps({"rows": table.rows(), **table.to_json()}, allow_nan=False))
    else:
        _print(table)
