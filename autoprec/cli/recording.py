"""One training step of a script, recorded: what ``inspect``, ``estimate``, ``check`` and ``lint`` begin with.

The script is started under hooks, stopped at its first training step, that step is recorded operator by operator, and
the script is ended again. Nothing it would write is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.cli.phases import Phases
from autoprec.errors import UsageError
from autoprec.graph.report import MAX_GRAPH_BYTES, GraphReport, OperatorTimes, load_report
from autoprec.precision.hardware import cores
from autoprec.support.files import read_document
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import PATIENCE_S, GradientErrors, HostInfo, Probe, ScanSpec, TimesSpec
from autoprec.tuning.phases import record as recorded
from autoprec.tuning.phases.record import answer_of

if TYPE_CHECKING:
    from autoprec.trial.driver.runner import TrialRunner

#: Sequences on a device and tokens in each, where a configuration is given and they are not.
SIZE = (1, 8192)


@contextmanager
def running(
    script: Sequence[str], phases: Phases, *, timeout_s: float = PATIENCE_S, weights: str = "", tunes: bool = True
) -> Iterator[tuple[TrialRunner, HostInfo, str]]:
    """Start a script and hold it at its first training step; yield its runner, what it is, and its label.

    With ``weights="fake"`` its parameters hold no data (:mod:`autoprec.graph.fake`): it can be recorded, and no more.

    Args:
        script: its command line, a launcher behind ``--``.
        phases: is told what goes on.
        timeout_s: seconds until the first training step.
        weights: empty, or ``fake``.
        tunes: refuse a model without a layer that a policy could decide about; where a step is only judged it need
            not have one.

    Raises:
        NothingAcceptableError: it has no such layer.
        ScriptError: it failed before its first training step.
        UsageError: the script was not found.
    """
    from autoprec.trial.driver.runner import TrialRunner

    command = ScriptCommand.parse(list(script))
    with TrialRunner(command, setup_timeout_s=timeout_s, weights=weights, tunes=tunes) as runner:
        phases.begin(f"running {command.label} to its first training step")
        yield runner, runner.start(), command.label


def record_step(
    script: Sequence[str], phases: Phases, *, timeout_s: float = PATIENCE_S, weights: str = "", tunes: bool = True
) -> tuple[GraphReport, HostInfo]:
    """Record one step of a script; return it and what the script was found to be.

    Args:
        script: its command line, a launcher behind ``--``.
        phases: is told what goes on.
        timeout_s: seconds until the first training step.
        weights: empty, or ``fake``, see :func:`running`, as is ``tunes``.
        tunes: refuse a model without a layer that a policy could decide about.

    Raises:
        ScriptError: the script failed before or in its first step.
    """
    with running(script, phases, timeout_s=timeout_s, weights=weights, tunes=tunes) as (runner, host, label):
        return record(runner, label, phases, timeout_s=timeout_s), host


def is_description(text: str) -> bool:
    """Say whether a word names a model that is described: a configuration, or a saved step.

    Args:
        text: the first word in the place of a script.
    """
    return text.endswith(".json")


def step_of(
    words: Sequence[str],
    phases: Phases,
    *,
    batch: int = SIZE[0],
    seq: int = SIZE[1],
    recompute: str = "",
    weights: str = "",
    timeout_s: float = PATIENCE_S,
    tunes: bool = True,
) -> tuple[GraphReport, HostInfo | None]:
    """Return one step of what a command line ends with; what its script was found to be, where it is one.

    Args:
        words: a script with its arguments, or else one word: a ``config.json``, a saved step.
        batch, seq, recompute: of a configuration, see :func:`autoprec.cost.configuration.config_report`.
        weights, timeout_s, tunes: of a script, see :func:`running`.

    Raises:
        ScriptError: the script failed before or in its first step.
        UsageError: arguments follow what is not a script, or a size or recomputation is asked of a saved step.
        FileError, MissingDependencyError: see :func:`autoprec.cost.configuration.config_report`.
    """
    if not is_description(words[0]):
        return record_step(words, phases, timeout_s=timeout_s, weights=weights, tunes=tunes)
    if len(words) > 1:
        raise UsageError(f"{words[0]} takes no arguments: found {words[1]}", fix="options come before it")
    if is_saved_step(words[0]):
        if (batch, seq, recompute) != (*SIZE, ""):
            what = "--batch, --seq and --recompute have no effect on a saved step"
            raise UsageError(what, where=words[0], fix="leave them out")
        return load_report(words[0]), None
    from autoprec.cost.configuration import config_report

    phases.begin("building the configuration's model without weights, and recording one step of it")
    return config_report(words[0], batch=batch, seq=seq, recompute=recompute), None


def is_saved_step(text: str) -> bool:
    """Say whether a word is a file of ``autoprec inspect --json``, and not a configuration.

    Raises:
        FileError: it is not a file of JSON.
    """
    if not text.endswith(".json"):
        return False
    found = read_document(text, most_bytes=MAX_GRAPH_BYTES, may_be_infinite=True)
    return "operators" in found and "schema" not in found  # a policy has both


def record(runner: TrialRunner, label: str, phases: Phases, *, timeout_s: float = PATIENCE_S) -> GraphReport:
    """Record one step of a script that is held at it.

    Args:
        runner: holds the script.
        label: what the script is called in messages.
        phases: is told what goes on.
        timeout_s: seconds for the step.
    """
    phases.begin("recording one training step, operator by operator")
    return recorded.record_step(runner.run, label, timeout_s=timeout_s)


def times_of(runner: TrialRunner, phases: Phases, policy: Document | None = None) -> OperatorTimes | str:
    """Return how long the operators of a held script's steps take; else why that could not be measured.

    Args:
        runner: holds the script.
        phases: is told what goes on.
        policy: a policy document under which it runs; None for the script as written.
    """
    under = " under the policy" if policy is not None else ""
    phases.begin(f"timing a few training steps{under}, and their operators")
    result = runner.run(TimesSpec(policy=policy))
    if result.ok and isinstance(result.answer, OperatorTimes):
        return result.answer
    return f"where its time goes{under} was not measured: {result.reason or result.status}"


def gradient_errors(
    runner: TrialRunner,
    host: HostInfo,
    label: str,
    probes: Sequence[Probe],
    moments: Sequence[int],
    *,
    backend: str,
    tell: Callable[[int], None] = lambda _: None,
) -> list[GradientErrors]:
    """Return how far each probe moves the gradient of a script that is held, at each of several of its steps.

    Args:
        moments: training steps before each; where the script has not as many, the later ones are left out.
        tell: receives how many steps and passes are done, of all moments.

    Raises:
        ScriptError: they could not be run at the first.
    """
    from autoprec.tuning.paired import MOST_SIDE_BY_SIDE  # with Optuna, a second

    spec = ScanSpec(
        seed=None if host.launch == "fork" else 0,
        backend=backend,
        probes=tuple(probes),
        side_by_side=min(MOST_SIDE_BY_SIDE, cores()),
    )
    answers: list[GradientErrors] = []
    before = 0
    for moment in moments:
        result = runner.run(replace(spec, warmup=moment), lambda done, before=before: tell(before + done))  # type: ignore[misc]
        if answers and result.status == "too_short":
            break
        answers.append(answer_of(result, GradientErrors, label))
        before += moment + 1 + len(probes)
        tell(before)
    return answers
