"""Whether a comparison with the script as written says anything: a reference that does not train proves nothing.

It looks at what is there anyway: the recorded step (:mod:`autoprec.graph.census`) and the losses of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autoprec.errors import NothingAcceptableError
from autoprec.graph.report import GraphReport
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.decide.decision import Decision
from autoprec.tuning.decide.sentences import Reason, fault_text
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import Finding, findings
from autoprec.tuning.lint.source import settings_of

#: Faults under which weights hardly move, whatever the learning rate and the number of steps.
_STANDING = frozenset(("updates-lost", "rate-below-half-ulp", "stale-casts", "fp16-unscaled"))
#: Steps from which on losses that are one number mean that nothing is learnt.
_FEWEST = 3


def faults(graph: GraphReport, command: ScriptCommand) -> list[Finding]:
    """Return what is wrong with the precision of the reference, of severity error or warning.

    Args:
        graph: the recorded step of the reference: an FP32 one has what FP32 recipes do not reach (casts and sums that
            the script writes itself, how it stores weights).
        command: the script's.
    """
    if graph.judged is None:
        return []
    folder = str(command.cwd.absolute())
    known = replace(graph, judged=graph.judged.within(folder))
    settings = settings_of([command.target, *command.args], command.cwd)
    found = findings(Facts(report=known, settings=settings))
    return [one for one in found if one.severity in ("error", "warning")]


def is_still(losses: Sequence[float]) -> bool:
    """Say whether a run's losses are one number, step after step."""
    return len(losses) >= _FEWEST and len(set(losses)) == 1


def why_flat(found: Sequence[Finding]) -> str:
    """Return why a reference with these faults does not learn; empty where they do not keep it from that."""
    known = [row for row in _rows(found, "error") if row["code"] in _STANDING]
    return fault_text(known[0]) if known else ""


def told(found: Sequence[Finding], losses: Sequence[float], reference: str) -> Reason | None:
    """Return why comparisons with the reference are not evidence; None where nothing speaks against them.

    Args:
        found: its faults; a warning speaks against nothing.
        losses: of its run, as far as it has run.
        reference: what it is: ``script``, ``fp32`` or ``bf16``.
    """
    rows, still = _rows(found, "error"), is_still(losses)
    return (
        Reason("unsound_reference", {"faults": rows, "still": still, "reference": reference}) if rows or still else None
    )


def with_soundness(answer: Decision, found: Sequence[Finding], losses: Sequence[float], reference: str) -> Decision:
    """Return a decision that says first that its reference is at fault, where it is, and last what is doubtful in it.

    Args:
        answer: of the search.
        found: faults of its reference.
        losses: of the reference's run.
        reference: what it is: ``script``, ``fp32`` or ``bf16``.
    """
    why, doubts = told(found, losses, reference), _rows(found, "warning")
    if doubts:
        answer = answer.with_reasons(Reason("doubtful_reference", {"faults": doubts}))
    return answer if why is None else replace(answer, reasons=(why, *answer.reasons))


@contextmanager
def naming_faults(found: Sequence[Finding]) -> Iterator[None]:
    """Let a reference that cannot be measured end with what was seen of its precision: that may be why.

    Raises:
        NothingAcceptableError: as it was raised inside, with its faults of severity error and their cures.
    """
    try:
        yield
    except NothingAcceptableError as error:
        if rows := _rows(found, "error"):
            error.what += f". {Reason('doubtful_reference', {'faults': rows})}"
            error.fix += f"; as for its precision: {'; '.join(dict.fromkeys(row['fix'] for row in rows[:2]))}"
        raise


def _rows(found: Sequence[Finding], severity: str) -> list[dict[str, str]]:
    return [
        {"code": one.code, "place": one.place, "message": one.message, "fix": one.fix}
        for one in found
        if one.severity == severity
    ]
