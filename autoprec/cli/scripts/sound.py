"""``autoprec check`` without a policy: is the script's own precision sound?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import record, running
from autoprec.errors import AuditError
from autoprec.report.findings import TEXTS, counts, sound
from autoprec.support.units import counted
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import findings
from autoprec.tuning.lint.source import settings_of


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
    with Phases() as phases, running(script, phases) as (runner, _, label):
        report = record(runner, label, phases)
    here = Path.cwd()
    judged = report.judged.within(str(here)) if report.judged is not None else None
    found = findings(Facts(report=replace(report, judged=judged), settings=settings_of(script, here)))
    failing = {severity: counts(found)[severity] for severity in ("error", *(("warning",) if strict else ()))}
    if as_json:
        rows = [one.to_json() for one in found]
        document = {"ok": not any(failing.values()), "sound": not counts(found)["error"], "findings": rows}
        print_json(document | {"judged": judged.to_json() if judged is not None else None})
    else:
        if found:
            echo(TEXTS["text"](found))
        if judged is not None and not counts(found)["error"]:
            echo(sound(judged))
        for text in judged.unseen if judged is not None else ():
            echo(f"note: {text}", err=True)
    if any(failing.values()):
        raise AuditError(
            ", ".join(counted(count, severity) for severity, count in failing.items() if count),
            where=" ".join(script),
            fix="each finding says how; `autoprec search --reference fp32` compares with a run in fp32 meanwhile",
        )
