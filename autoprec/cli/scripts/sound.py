"""``autoprec check`` without a policy: is the script's own precision sound?"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import record, running
from autoprec.errors import AuditError
from autoprec.reports.findings import TEXTS, counts, sound
from autoprec.support.units import counted
from autoprec.trial.lifted import LiftedLines, least_change
from autoprec.trial.protocol import LiftSpec, TrialResult
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import findings
from autoprec.tuning.lint.source import settings_of

#: Seconds in which lines are lifted one at a time.
_WITHIN_S = 40.0
#: Relative change of the whole gradient, all lines lifted, beyond which a step is not called sound: lines that round to
#: bfloat16 as they should change it by a few hundredths. How much more than a few last bits change it that has to be.
_MOVED, _BEYOND_NOISE = 0.1, 5.0


def judge(script: tuple[str, ...], *, strict: bool, as_json: bool) -> None:
    """Print what is wrong with a script's own precision, by source line, the worst first.

    Args:
        script: its command line.
        strict: a warning fails as well.
        as_json: the findings, the census and what was looked at as JSON on stdout.

    Raises:
        AuditError: something of severity error was found; where that is to be ``strict``, a warning.
        ScriptError: the script failed before or in its first training step.
    """
    with Phases() as phases, running(script, phases, tunes=False) as (runner, host, label):
        report = record(runner, label, phases)
        if host.world_size == 1:  # else it only says why not
            phases.begin("the step again, with lines lifted to more bits, one at a time and all at once")
        lifted = runner.run(LiftSpec(within_s=_WITHIN_S))
    here = Path.cwd()
    judged = report.judged.within(str(here)) if report.judged is not None else None
    found = findings(Facts(report=replace(report, judged=judged), settings=settings_of(script, here)))
    failing = {severity: counts(found)[severity] for severity in ("error", *(("warning",) if strict else ()))}
    looked_at = judged is not None and bool(judged.looked_at)
    doubt = _doubt(lifted)
    if as_json:
        rows = [one.to_json() for one in found]
        document = {
            "ok": not any(failing.values()),
            "sound": looked_at and not counts(found)["error"] and not doubt,
            "findings": rows,
        }
        lines = asdict(lifted.answer) if isinstance(lifted.answer, LiftedLines) else {"failed": lifted.reason}
        print_json(document | {"lifted": lines, "judged": judged.to_json() if judged is not None else None})
    else:
        if found:
            echo(TEXTS["text"](found))
        if judged is not None and looked_at and not failing["error"]:
            echo(doubt or sound(judged, found))
        _print_lines(lifted, str(here))
        for text in judged.unseen if judged is not None else ():
            echo(f"note: {text}", err=True)
    if any(failing.values()):
        raise AuditError(
            ", ".join(counted(count, severity) for severity, count in failing.items() if count),
            where=" ".join(script),
            fix="each finding says how; a search whose reference has such a fault says what a policy can mend of it",
        )


def _doubt(lifted: TrialResult) -> str:
    """Return why a step without an error is not called sound by what lifting its lines changes; empty where it is."""
    answer = lifted.answer
    if not isinstance(answer, LiftedLines) or not (answer.rows or answer.left or answer.alike):
        return ""
    if answer.every is None:
        return "no error was found, but the gradient is not finite: this step cannot show that the precision is sound"
    if answer.every <= max(_MOVED, _BEYOND_NOISE * (answer.noise or 0.0)):
        return ""
    lines = "begin with the first lines below" if answer.rows else "no line of them was lifted alone"
    return (
        f"no error was found, but that does not make the precision sound: with all lines lifted to {answer.wide} the "
        f"gradient changes by {_change(answer.every)}; {lines}"
    )


def _print_lines(lifted: TrialResult, here: str) -> None:
    """Print the lines of the script by what lifting each of them changes, or why that is not known."""
    answer = lifted.answer
    if not isinstance(answer, LiftedLines):
        echo(f"note: no line was lifted: {lifted.reason or lifted.status}", err=True)
        return
    if not (answer.rows or answer.left or answer.alike):
        echo("no line was lifted: nothing in this step is computed in 32 or 16 bits")
        return
    least = least_change(answer.noise)
    rows = [
        (
            _place(row["where"], here),
            row["operator"].rpartition("::")[2],
            row["module"],
            ", ".join(row["dtypes"]),
            f"{row['error']:.2%}",
            *map(_change, (row["gradient"], row["update"])),
        )
        for row in answer.rows
        if (row["gradient"] or row["update"] or 0.0) > least
    ]
    heads = ("line", "operator", "module", "dtypes", "its error", f"gradient, lifted to {answer.wide}", "update")
    if rows:
        stdout_console().print(plain_table(heads, rows))
    update = f", what reaches the weights by {_change(answer.every_update)}" if answer.every_update is not None else ""
    every = f"changes by {_change(answer.every)}{update}" if answer.every is not None else "is not finite"
    left = f"; {counted(answer.left, 'line')} not lifted alone" if answer.left else ""
    alike = f"; {counted(answer.alike, 'line')} the same when lifted" if answer.alike else ""
    noise = f" (a few last bits change it by {_change(answer.noise)})" if answer.noise is not None else ""
    echo(f"all lines lifted to {answer.wide} at once: the gradient {every}{noise}{left}{alike}")


def _place(where: str, here: str) -> str:
    """Return a place as a table has room for it: from the folder of work on, or from the name of its package on."""
    return where.removeprefix(f"{here}/").rpartition("site-packages/")[2]


def _change(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"
