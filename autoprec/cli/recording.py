"""One training step of a script, recorded: what ``inspect``, ``estimate``, ``sensitivity`` and a dry run begin with.

The script is started under hooks, stopped at its first training step, that step is recorded operator by operator, and
the script is ended again. Nothing it would write is kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.cli.phases import Phases
from autoprec.errors import FIX, AutoPrecError, NothingAcceptableError, ScriptError
from autoprec.support.units import counted

if TYPE_CHECKING:
    from autoprec.graph.report import GraphReport
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.trial.protocol import HostInfo, TrialResult


@contextmanager
def running(
    script: Sequence[str], phases: Phases, *, timeout_s: float = 600.0, weights: str = ""
) -> Iterator[tuple[TrialRunner, HostInfo, str]]:
    """Start a script and hold it at its first training step; yield its runner, what it is, and its label.

    With ``weights="fake"`` its parameters hold no data (:mod:`autoprec.graph.fake`): it can be recorded, and no more.

    Raises:
        ScriptError: it failed before its first training step.
        UsageError: the script was not found.
    """
    from autoprec.trial.command import ScriptCommand
    from autoprec.trial.driver.runner import TrialRunner

    command = ScriptCommand.parse(list(script))
    with (
        tempfile.TemporaryDirectory(prefix="autoprec-") as directory,
        TrialRunner(command, run_dir=Path(directory), setup_timeout_s=timeout_s, weights=weights) as runner,
    ):
        phases.begin(f"running {command.label} to its first training step")
        yield runner, runner.start(), command.label


def record_step(
    script: Sequence[str], phases: Phases, *, timeout_s: float = 600.0, weights: str = ""
) -> tuple[GraphReport, HostInfo]:
    """Record one step of a script; return it and what the script was found to be.

    Raises:
        ScriptError: the script failed before or in its first step.
    """
    with running(script, phases, timeout_s=timeout_s, weights=weights) as (runner, host, label):
        return record(runner, label, phases, timeout_s=timeout_s), host


def configured_step(config: str, phases: Phases, *, batch: int, seq: int) -> GraphReport:
    """Return one step of the model of a preset or a ``config.json``.

    Raises:
        UnknownNameError, FileError, MissingDependencyError: see :func:`autoprec.cost.transformer.config_report`.
    """
    from autoprec.cost.transformer import config_report, is_mixture

    if is_mixture(config):
        phases.begin("building the mixture of experts without weights, and recording one step of it")
    return config_report(config, batch=batch, seq=seq)


def record(runner: TrialRunner, label: str, phases: Phases, *, timeout_s: float = 600.0) -> GraphReport:
    """Record one step of a script that is held at it."""
    from autoprec.graph.report import GraphReport
    from autoprec.trial.protocol import TrialSpec

    phases.begin("recording one training step, operator by operator")
    result = runner.run(TrialSpec(kind="record", warmup=0, steps=1, timeout_s=timeout_s))
    return GraphReport.from_json(payload_of(result, label, "recorded")["graph"])


def payload_of(result: TrialResult, label: str, done: str = "measured") -> dict[str, Any]:
    """Return what a trial was asked for.

    Raises:
        ScriptError: it failed; the message carries the script's own output.
    """
    if result.ok and result.payload:
        return result.payload
    short = result.status == "too_short"
    raise ScriptError(
        f"the step could not be {done}: {result.reason or result.status}",
        where=label,
        fix=result.tail or ("use a smaller --warmup" if short else "run the script by itself first"),
    )


def run_failed(result: TrialResult, label: str, doing: str, *, policy: str = "") -> AutoPrecError:
    """Return the error of a run that failed after its script had reached a training step: whose fault, and when.

    Args:
        result: the run.
        label: the script.
        doing: what the run was for.
        policy: what it ran under; empty where the script ran as it is written.
    """
    after, tail = f"after {counted(len(result.losses), 'training step')}", result.tail
    why = result.reason.partition(FIX)[0] or result.status
    if result.status == "too_short":
        fix = f"ask for less: --steps {len(result.losses)}, or make it train longer"
        return NothingAcceptableError(f"{doing}: the script ended {after}", where=label, fix=fix)
    if policy:
        fix = tail or "it reached its first training step as written: run it under the policy with `autoprec run`"
        return AutoPrecError(f"{doing}: the script failed under {policy}, {after}: {why}", where=label, fix=fix)
    fix = tail or "run the script by itself first"
    return ScriptError(f"{doing}: the script failed as it is written, {after}: {why}", where=label, fix=fix)


def tunable(report: GraphReport) -> GraphReport:
    """Return the report of a step that has something to tune.

    Raises:
        NothingAcceptableError: no trained linear layer or convolution ran in it.
    """
    if not report.tunable:
        raise NothingAcceptableError(
            "this script has no trainable GEMM to tune", fix="`autoprec inspect` lists every operator and why"
        )
    return report
