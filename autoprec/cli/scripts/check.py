"""``autoprec check``: run a few steps under a policy and compare what was asked with what was executed."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoprec.cli import options
from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.policies.published import policy_of
from autoprec.cli.recording import record, running
from autoprec.cli.script import script_command
from autoprec.cli.scripts.sound import judge
from autoprec.cli.scripts.spot import ask, print_spot, settle
from autoprec.errors import (
    FIX,
    AuditError,
    AutoPrecError,
    NothingAcceptableError,
    PolicyMismatchError,
    UnsupportedError,
    UsageError,
)
from autoprec.graph.audit import executed_precisions, protection_rows, uncovered_rows
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, policy_from_dict
from autoprec.precision.hardware import cpu_instructions
from autoprec.precision.recipes import GEMMS, KEEP, by_recipe
from autoprec.support.units import counted
from autoprec.trial.driver.failures import how_to_mend
from autoprec.trial.protocol import Answer, GemmFindings, HostInfo, NumericsSpec, TrainSpec, TrialResult
from autoprec.tuning.phases.record import answer_of

if TYPE_CHECKING:
    from autoprec.tuning.transfer.spot import SpotCheck

_REFUSALS: dict[str, type[AutoPrecError]] = {"mismatch": PolicyMismatchError, "unsupported": UnsupportedError}


def _audited(
    script: tuple[str, ...], policy: Policy, backend: str, steps: int, passes: int = 0, numerics: bool = False
) -> tuple[dict[str, Any], tuple[SpotCheck, GraphReport] | None]:
    """Run ``steps`` steps under a policy; return its audit document, and where ``passes`` are asked for a spot check.

    Of a policy with phases ``steps`` are run under each: the document is that of the policy as it begins, ``phases``
    holds one for each phase, and ``ok`` is about all. The spot check and ``numerics``, what was found by comparing each
    GEMM with its exact product, are of the policy as it begins.

    Raises:
        PolicyMismatchError, UnsupportedError: the policy could not be applied; the message says why.
        ScriptError: the script failed before its first training step.
        AutoPrecError: it failed after that, under the policy.
        NothingAcceptableError: it has fewer steps.
    """
    spot, audits = None, []
    with Phases() as phases, running(script, phases) as (runner, host, label):
        for stage, name in zip(
            policy.stages, ["", *(f" from {phase.label} on" for phase in policy.phases)], strict=True
        ):
            phases.begin(f"{steps} training steps under the policy{name}, the last one recorded")
            document = stage.to_dict()
            spec = TrainSpec(policy=document, steps=steps, warmup=0, backend=backend, record_graph=True)
            result = runner.run(spec)
            if result.audit is None:
                raise _refusal(result, label + name)
            audits.append(_with_recording(result.audit, result.answer, document))
        if numerics:
            phases.begin(f"{steps} training steps, each GEMM beside the exact product of its operands")
            numeric = NumericsSpec(policy=policy.stages[0].to_dict(), steps=steps, backend=backend)
            found = answer_of(runner.run(numeric), GemmFindings, label)
            audits[0]["numerics"] = asdict(found) | {"uncompiled": host.compiled}
        if passes:
            report = record(runner, label, phases)
            phases.begin(f"{passes} forward and backward passes on the model itself")
            spot = ask(runner, host, label, policy.stages[0], report, passes, backend), report
    audit, *later = audits
    audit["notes"] = [*audit.get("notes", ()), *_differences(policy, host, audit["layers"])]
    if later:
        audit["phases"] = [{"from": phase.start, **row} for phase, row in zip(policy.phases, later, strict=True)]
        audit["ok"] = all(row["ok"] for row in audits)
    audit["ok"] = audit["ok"] and audit.get("numerics", audit)["ok"]
    return audit, spot


def _refusal(result: TrialResult, where: str) -> AutoPrecError:
    """Return why the audit is missing, with one fix: that of the error itself, if it came with one."""
    what, _, fix = (result.reason or result.status).partition(FIX)
    if result.status == "too_short" and result.losses:
        return NothingAcceptableError(what, where=where, fix=f"ask for less: --steps {len(result.losses)}")
    kind = _REFUSALS.get(result.status)
    if kind is None:
        after = counted(len(result.losses), "training step")
        run = "it reached its first step as written: run it under the policy with `autoprec run`"
        shown = f"the policy could not be checked: the script failed under it, after {after}: {what}\n{result.tail}"
        return AutoPrecError(shown.rstrip(), where=where, fix=how_to_mend(what + result.tail, run))
    fix = fix or "run the script under it with `autoprec run` to see more"
    return kind(f"the policy could not be checked: {what}\n{result.tail}".rstrip(), where=where, fix=fix)


def _differences(policy: Policy, host: HostInfo, rows: list[dict[str, Any]]) -> list[str]:
    """Return notes on how model and machine differ from those that were searched, for which the evidence holds."""
    from autoprec.tuning.lint.rules import new_layers, other_instructions, other_model

    decided = [row["name"] for row in rows if set(row["requested"].values()) != {"keep"}]
    found = [*other_model(policy, host.model), *new_layers(policy, decided)]
    found += other_instructions(policy, cpu_instructions()) if host.device == "cpu" else []
    return [finding.message for finding in found]


def _with_recording(audit: dict[str, Any], report: Answer | None, document: dict[str, Any]) -> dict[str, Any]:
    """Hold protections, and weights that no policy reaches, against what a recorded step ran: seen, not believed.

    A step that could not be recorded (custom kernels, several processes) leaves the audit as the executing code
    reported it.
    """
    if not isinstance(report, GraphReport):
        return audit
    from autoprec.tuning.lint.facts import Facts
    from autoprec.tuning.lint.rules import SENSITIVE, findings

    policy: Policy = policy_from_dict(document)
    operators = policy.operators.model_dump()
    uncovered = uncovered_rows(report, {row["name"] for row in audit["layers"]}, policy)
    audit["layers"] += uncovered
    audit["ok"] = audit["ok"] and all(row["ok"] for row in uncovered)
    used = {layer.name: layer.reason for layer in report.layers if "fprop" in layer.roles()}
    for row in audit["layers"]:
        if row["reason"] == "never called":
            row["reason"] = used.get(row["name"], row["reason"])  # its weight is used, but not through it
    _fill_in_products(audit, executed_precisions(report)["layers"], policy.activations)
    seen_by_rules = findings(Facts(policy, report=report))
    audit["notes"] = [*audit.get("notes", ()), *(one.message for one in seen_by_rules if one.code in SENSITIVE)]
    for name, row in protection_rows(report, operators).items():
        if row["requested"] == "fp32" and row["executed"]:
            seen = ", ".join(sorted(row["executed"]))
            audit["operators"][name] = {**row, "executed": seen if row["ok"] else f"{seen} (recorded)"}
            audit["ok"] = audit["ok"] and row["ok"]
    return audit


def _fill_in_products(audit: dict[str, Any], recorded: dict[str, dict[str, str]], activations: str) -> None:
    """Write down what the products of layers that the policy leaves alone ran in, as they were recorded."""
    around = audit["operators"].get("activations", {"ok": False, "reason": ""})
    if around["reason"].startswith("emulated"):
        return  # what is recorded is the arithmetic that stands for it
    for row in audit["layers"]:
        ran = {gemm: dtype for gemm in GEMMS if (dtype := recorded.get(row["name"], {}).get(gemm))}
        if row["ok"] and set(row["requested"].values()) == {KEEP} and ran:
            row["executed"] = ran
            if activations not in (KEEP, ran.get("fprop", activations)) and row["reason"].endswith(" autocast"):
                row["reason"] = f"as the script wrote it: {activations} autocast does not reach its product"
    products = {dtype for ran in recorded.values() for dtype in ran.values()}
    if around["ok"] and activations != KEEP and products and activations not in products:
        why = "autocast changes nothing: no recorded product of a layer ran in it"
        around |= {"executed": ", ".join(sorted(products)), "ok": False, "reason": why}
        audit["ok"] = False


def _print_table(audit: dict[str, Any]) -> None:
    """Print every layer, and the operators that a policy or the script says something about."""
    told = {
        name: row for name, row in audit["operators"].items() if not row["ok"] or row["executed"] not in ("keep", "-")
    }
    rows = [
        (
            name or "(root)",
            *map(_spelled, (row["requested"], row["executed"])),
            "yes" if row["ok"] else "NO",
            row["reason"],
        )
        for name, row in (*((row["name"], row) for row in audit["layers"]), *told.items())
    ]
    stdout_console().print(plain_table(("layer or operator", "requested", "executed", "ok", "reason"), rows))


def _spelled(value: Any) -> str:
    return by_recipe(value) if isinstance(value, dict) else str(value)


@script_command("check")
@click.option("--policy", type=click.Path(path_type=Path), help="Policy file, or published:NAME; without: see below.")
@options.backend
@click.option("--steps", default=2, show_default=True, type=click.IntRange(min=1), help="Training steps to run.")
@click.option("--sensitivity", default=0, metavar="N", type=click.IntRange(min=0), help="Also: spot check, N passes.")
@click.option("--numerics", is_flag=True, help="Also: hold every GEMM against its exact product.")
@click.option("--strict", is_flag=True, help="Notes count as mismatches: exit 1.")
@options.as_json("The audit")
def check(
    script: tuple[str, ...],
    policy: Path | None,
    backend: str,
    steps: int,
    sensitivity: int,
    numerics: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Audit, layer by layer, what a training script really executes under a policy; exit 1 on a mismatch.

    Without --policy: is the script's own precision sound? What loses digits is named by source line, with its effect in
    this run and how to mend it; exit 1 on an error. The step is played again with lines lifted to more bits: how much
    does the gradient change, and the step that reaches the weights? Where all lines together change no more than a
    few last bits do, none is lifted alone.

    With --sensitivity N, N forward and backward passes also hold the policy's gradient error on this model against the
    limit; beyond it a corrected policy is written, and the exit code is 1.

    With --numerics every GEMM of the steps (fprop, dgrad, wgrad) is held against the exact product of its quantised
    operands: the first layer and GEMM beyond the bound of its recipe is named, and the exit code is 1.
    """
    if policy is None:
        if sensitivity or numerics:
            raise UsageError("--sensitivity and --numerics are about a policy, and none is named", fix="--policy FILE")
        judge(script, strict=strict, as_json=as_json)
        return
    loaded = policy_of(policy, script)
    audit, spot = _audited(script, loaded, backend, steps, sensitivity, numerics)
    if as_json:
        print_json(audit | ({"sensitivity": spot[0].to_json()} if spot else {}))
    later = zip(loaded.phases, audit.get("phases", ()), strict=False)
    parts = {"": audit} | {f"from {phase.label}: ": row for phase, row in later}
    for title, part in [] if as_json else [*parts.items()]:
        if title:
            echo(f"\n{title.removesuffix(': ')}")
        _print_table(part)
    if numerics:
        _print_numerics(audit["numerics"], policy, quiet=as_json)
    _conclude(parts, policy, quiet=as_json, strict=strict)
    if not as_json:
        echo(f"the script's own precision was not judged: `autoprec check {shlex.join(script)}` does that")
    if spot is not None:
        if not as_json:
            print_spot(spot[0])
        settle(spot[0], loaded, spot[1], policy)


def _conclude(parts: dict[str, dict[str, Any]], policy: Path, *, quiet: bool, strict: bool) -> None:
    """Say that everything executed what was asked, in each phase; ``parts`` holds the audits by what begins a name.

    Raises:
        AuditError: something did not; or, where that is to be ``strict``, there is a note.
    """
    notes = list(dict.fromkeys(note for part in parts.values() for note in part.get("notes", ())))
    for note in () if quiet else notes:
        echo(f"note: {note}")
    wrong = [title + row["name"] for title, audit in parts.items() for row in audit["layers"] if not row["ok"]]
    wrong += [
        title + name for title, audit in parts.items() for name, row in audit["operators"].items() if not row["ok"]
    ]
    if wrong:
        listed = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise AuditError(
            f"executed differs from requested in {len(wrong)} places: {listed}",
            where=str(policy),
            fix="the reason column says why; `autoprec doctor` lists what this machine can run",
        )
    if not quiet:
        audit = parts[""]
        silent = {row["name"] for row in audit["layers"] if not row["executed"]} | set(audit.get("did_not_run", ()))
        alone = {row["name"] for row in audit["layers"] if row["reason"].startswith("a complex weight")} - silent
        where = f", in each of {len(parts)} phases" if len(parts) > 1 else ""
        echo(f"every one of {len(audit['layers']) - len(silent) - len(alone)} layers executed what was asked{where}")
        if alone:
            echo(f"{len(alone)} more are not tunable and ran as the script wrote them: {', '.join(sorted(alone))}")
        if silent:
            echo(f"{len(silent)} more did not run in these steps, wholly or in part: {', '.join(sorted(silent))}")
    if strict and notes:
        raise AuditError(
            f"{len(notes)} note{'s' if len(notes) > 1 else ''}: {notes[0]}",
            where=str(policy),
            fix="without --strict notes are only printed",
        )


def _print_numerics(found: dict[str, Any], policy: Path, *, quiet: bool) -> None:
    """Print the GEMMs that are beyond their bound, first first; ``--json`` has their operands' scales as well.

    Raises:
        AuditError: there is one.
    """
    findings, gemms = found["findings"], found["gemms"]
    if findings and not quiet:
        heads = ("what", "layer", "GEMM", "M x N x K", "errors: native, emulated, bf16")
        rows = [
            (
                row["code"],
                row["layer"],
                row["gemm"],
                " x ".join(str(row.get(key, "-")) for key in ("m", "n", "k")),
                ", ".join(f"{row['error'][key]:.2g}" for key in ("native", "emulated", "bf16") if "error" in row),
            )
            for row in findings
        ]
        stdout_console().print(plain_table(heads, rows))
    for name in () if quiet else found["not_compared"]:
        echo(f"not compared: {name}")
    if findings:
        first = findings[0]
        raise AuditError(
            f"{len(findings)} of {len(gemms)} GEMMs are wrong, the first is {first['gemm']} of {first['layer']} "
            f"({first['code']})",
            where=str(policy),
            fix="both had the same input, weight and gradient: its casts or its kernel are at fault; keep it in bf16",
        )
    if not quiet:
        compiled = "; the script compiles its model: its layers ran uncompiled here" if found["uncompiled"] else ""
        worst = max((row["worst"] for row in gemms), default=0.0)
        echo(f"{len(gemms)} GEMMs are within the bounds of their recipes (at most {worst:.0%} of the bound){compiled}")
