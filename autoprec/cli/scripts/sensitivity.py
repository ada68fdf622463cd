"""What ``autoprec inspect --sensitivity`` prints: the gradient error of each recipe in each group of layers."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import payload_of, record, running, tunable
from autoprec.trial.protocol import TrialSpec

if TYPE_CHECKING:
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.tuning.decide.scan import SensitivityScan
    from autoprec.tuning.decide.table import SensitivityTable

#: Training steps before the scan.
WARMUP = 5


def _measure(script: tuple[str, ...], target: str, space: str, passes: int) -> SensitivityTable:
    from autoprec.cost import CostModel
    from autoprec.policy.space import default_space, load_space
    from autoprec.tuning.decide.problem import Problem
    from autoprec.tuning.decide.scan import SensitivityScan, scan_batches
    from autoprec.tuning.paired import MOST_SIDE_BY_SIDE
    from autoprec.tuning.target import resolve_target

    if target != "auto":
        resolve_target(target, "cpu")  # an unknown name is refused before the script is started
    chosen = load_space(space) if space else None
    with Phases() as phases, running(script, phases) as (runner, host, label):
        report = tunable(record(runner, label, phases))
        found, timed = resolve_target(target, host.device)
        problem = Problem.build(report, chosen or default_space(found), CostModel(report, found).can_run)
        scan = SensitivityScan(problem, max_passes=passes, batches=scan_batches(report))
        spec = TrialSpec(
            kind="sensitivity",
            steps=1,
            seed=None if host.launch == "fork" else 0,
            backend="auto" if timed else "emulated",
            side_by_side=min(MOST_SIDE_BY_SIDE, len(os.sched_getaffinity(0))),
        )
        _scan(scan, runner, replace(spec, warmup=WARMUP), label, phases)
    return scan.table()


def _scan(scan: SensitivityScan, runner: TrialRunner, spec: TrialSpec, label: str, phases: Phases) -> None:
    """Run a scan's probes, round after round, each on as many batches as the scan wants."""
    while probes := scan.next_round():
        payloads: list[dict[str, Any]] = []
        batches = f", on up to {scan.batches} batches" if scan.batches > 1 else ""
        # steps before each batch, the step that all are compared with, and the probes
        lasts = [spec.warmup + later + 1 + len(probes) for later in range(scan.batches)]
        phases.begin(f"gradient errors of {len(probes)} changes to the policy{batches}", total=sum(lasts))
        for later in range(scan.batches):
            before = sum(lasts[:later])
            asked = replace(spec, probes=tuple(probes), warmup=spec.warmup + later)
            result = runner.run(asked, lambda done, before=before: phases.advance(before + done))  # type: ignore[misc]
            if payloads and result.status == "too_short":
                scan.batches = len(payloads)  # the script has no more of them
                break
            payloads.append(payload_of(result, label))
            phases.advance(before + lasts[later])
        scan.add(*payloads)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    share = row["noise_share"]
    text = f"{row['gradient_error']:.4f}" + (f" ({share:.3f})" if share is not None else "")
    return text if row["measured"] else f"~{text}"


def _print(table: SensitivityTable) -> None:
    from autoprec.tuning.decide.sentences import unmoved

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


def print_sensitivity(script: tuple[str, ...], target: str, space: str, passes: int, *, as_json: bool) -> None:
    """Measure the gradient error of every group of layers under every recipe, on the same weights and batch."""
    table = _measure(script, target, space, passes)
    if as_json:
        print_json({"rows": table.rows(), **table.to_json()})
    else:
        _print(table)
