"""The recorded training step: which operators ran, on which shapes, and what of them can be tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.graph.report import GraphReport
from autoprec.support.plain import Document
from autoprec.trial.protocol import PATIENCE_S, Answer, RecordSpec, TrialResult, TrialSpec

A = TypeVar("A", bound=Answer)


def record_step(
    run: Callable[[TrialSpec], TrialResult],
    label: str,
    *,
    timeout_s: float = PATIENCE_S,
    policy: Document | None = None,
) -> GraphReport:
    """Record one training step of a script that is held at its first.

    Args:
        run: runs a trial of the script.
        label: what the script is called in messages.
        timeout_s: seconds for the step.
        policy: a policy document under which it runs; None for the script as written.

    Raises:
        ScriptError: the step could not be recorded.
    """
    return answer_of(run(RecordSpec(timeout_s=timeout_s, policy=policy)), GraphReport, label, "recorded")


def answer_of(result: TrialResult, kind: type[A], label: str, done: str = "measured") -> A:
    """Return what a trial was asked for.

    Args:
        result: the trial's result.
        kind: type of its answer.
        label: what the script is called in messages.
        done: what was to be done with the step, in the message.

    Raises:
        ScriptError: it failed; the message carries the script's own output.
    """
    if result.ok and isinstance(result.answer, kind):
        return result.answer
    short = result.status == "too_short"
    raise ScriptError(
        f"the step could not be {done}: {result.reason or result.status}\n{result.tail}".rstrip(),
        where=label,
        fix="use a smaller --warmup" if short else "run the script by itself first",
    )


def tunable(report: GraphReport, label: str = "") -> GraphReport:
    """Return the report of a step that has something to tune.

    Raises:
        NothingAcceptableError: no trained linear layer or convolution ran in it.
    """
    if not report.tunable:
        reasons = "; ".join(sorted({layer.reason for layer in report.layers})[:3]) or "no linear or conv layer ran"
        raise NothingAcceptableError(
            f"this script has no trainable GEMM to tune: {reasons}",
            where=label,
            fix="`autoprec inspect` lists every operator and why it is not tunable",
        )
    return report
