from __future__ import annotations

import math
import os
import re
import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import NothingAcceptableError, ScriptError, UnknownNameError, UsageError
from autoprec.trial.command import ScriptCommand
from autoprec.trial.losses import Series
from autoprec.trial.protocol import STILL, HostInfo, TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from tests.simulated import SimulatedRunner, SimulatedScript
from tests.tuning.test_engine import engine, here, options, plain_search, script, search  # noqa: F401


def searching(result: dict[str, object], simulated: SimulatedScript | None = None, **asks: Any) -> Search:
    class Other(SimulatedRunner):
        def run(self, spec: TrialSpec) -> TrialResult:
            ran = super().run(spec)
            return replace(ran, **result) if spec.kind == "train" else ran  # type: ignore[arg-type]

    asked, runs = options(**asks), simulated or script()
    command = ScriptCommand.parse(asked.command)
    return Search(asked, command, Listeners(), lambda seed, _folder: Other(runs, seed))


@pytest.mark.parametrize(
    ("result", "error", "says"),
    [
        ({"status": "too_short", "losses": (1.0,) * 6}, NothingAcceptableError, "after 6 of 11 training steps"),
        (
            {"status": "too_short", "losses": (1.0,) * 6, "passed_over": "A was trained for 6 steps only"},
            NothingAcceptableError,
            r"(?s)A was trained for 6 steps only.*autoprec\.register",
        ),
        ({"status": "diverged", "reason": "loss is nan"}, NothingAcceptableError, "own loss is not finite"),
        ({"status": "crashed", "reason": "KeyError: 'x'"}, ScriptError, "failed while training as written"),
        ({"status": "unsupported", "reason": "it is one CUDA graph"}, ScriptError, ": it is one CUDA graph"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_reference_that_cannot_be_run_ends_the_search_with_the_cause(
    result: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        searching(result).run()
    assert "was not changed by AutoPrec" not in str(caught.value)  # its files were another's


@pytest.mark.usefixtures("here")
def test_a_script_of_too_few_steps_is_known_after_one_run() -> None:
    """One of 30 steps ended the search after 4:40 minutes."""
    simulated = script()
    with pytest.raises(NothingAcceptableError, match="6 of 11"):
        searching({"status": "too_short", "losses": (1.0,) * 6}, simulated).run()
    assert sum(spec.kind == "train" for _, spec in simulated.calls) <= 1


@pytest.mark.usefixtures("here")
def test_the_budget_that_is_named_where_one_is_too_short_is_enough() -> None:
    """It left out the gradient errors and the answer: ``--budget 119s`` after 113 s, when the reference began."""
    late = {"status": "out_of_time", "reason": "a step takes 1 s", "needed_s": 20.0}
    made = searching(late)
    made.options = replace(made.options, budget_s=60.0)
    with pytest.raises(NothingAcceptableError, match=r"a time budget of 60 s is too short") as caught:
        made.run()
    assert "--resume --" in caught.value.fix
    assert "--budget 240s" in caught.value.fix, "7 runs of 20 s, and half as much again"
    assert f"--study {made.options.study}" in caught.value.fix


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("budget_s", [0.1, 0.5])
def test_a_script_that_starts_slowly_is_not_waited_for_beyond_the_budget(budget_s: float) -> None:
    """A script took 86 s to its first step, of a budget of 60 s."""
    may = threading.Event()

    class Slow(SimulatedRunner):
        def start(self) -> HostInfo:
            may.wait(30)
            return super().start()

    asked = options(budget_s=budget_s)
    made = Search(asked, ScriptCommand.parse(asked.command), Listeners(), lambda seed, _: Slow(SimulatedScript(), seed))
    threading.Timer(10.0 * budget_s, may.set).start()
    with pytest.raises(NothingAcceptableError, match="was not at its first training step when") as caught:
        made.run()
    assert not may.is_set()
    assert "--budget 60s" in caught.value.fix


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("load", "told"), [(16.6, True), (3.5, True), (2.0, False), (1.0, False), (0.0, False)])
def test_where_a_budget_is_too_short_beside_a_load_that_is_said(
    monkeypatch: pytest.MonkeyPatch, load: float, told: bool
) -> None:
    """A step of 0.15 s took 1.79 s, and nothing said why."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    made = searching({"status": "out_of_time", "reason": "a step takes 1.79 s", "needed_s": 20.0})
    made.options = replace(made.options, budget_s=60.0)
    with pytest.raises(NothingAcceptableError) as caught:
        made.run()
    assert ("busy with other work" in caught.value.what) is told


def test_a_study_that_ended_before_its_first_run_can_be_gone_on_with(here: Path) -> None:  # noqa: F811
    made = searching({"status": "out_of_time", "reason": "1 of 23 steps were done", "needed_s": 20.0})
    made.options = replace(made.options, budget_s=60.0)
    with pytest.raises(NothingAcceptableError) as caught:
        made.run()
    words = shlex.split(caught.value.fix.splitlines()[-1])
    budget = float(words[words.index("--budget") + 1].rstrip("s"))
    study = words[words.index("--study") + 1]
    _, result = search(script(), options(study=study, resume=True, budget_s=budget))
    assert result.study_name == study
    assert result.verdict == "adopt"


@pytest.mark.parametrize(
    ("launch", "setup_s", "compiled", "began_before_s", "ran"),
    [
        ("process", 40.0, False, 40.0, []),  # one start for the recorded step, one for the reference
        ("process", 10.0, False, 60.0, []),
        ("fork", 1.0, False, 80.0, ["record", "train"]),  # which costs a step
        ("fork", -59.0, True, 20.0, []),  # 59 s to compile, as the next trial may
        ("process", 10.0, False, 40.0, ["record", "train"]),
        ("fork", 40.0, False, 40.0, ["record", "train"]),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_budget_that_the_start_alone_uses_up_ends_the_search_then(
    launch: str, setup_s: float, compiled: bool, began_before_s: float, ran: list[str]
) -> None:
    """DDP and torch.compile scripts were given 60 s, and ended without an answer after 140 and 193 s."""
    simulated = script()

    class Slow(SimulatedRunner):
        def start(self) -> HostInfo:
            return replace(super().start(), launch=launch, setup_s=setup_s, compiled=compiled)

        def run(self, spec: TrialSpec) -> TrialResult:
            late = {"status": "out_of_time", "needed_s": 80.0} if spec.kind == "train" else {}
            return replace(super().run(spec), **late)

    asked = replace(options(), budget_s=60.0)
    made = Search(
        asked,
        ScriptCommand.parse(asked.command),
        Listeners(),
        lambda seed, _folder: Slow(simulated, seed),
        started=time.monotonic() - began_before_s,
    )
    with pytest.raises(NothingAcceptableError, match=r"a time budget of 60 s is too short") as caught:
        made.run()
    assert [spec.kind for _, spec in simulated.calls] == ran
    assert "--budget" in caught.value.fix


def test_the_noise_floor_is_what_one_rounding_of_the_weights_does() -> None:
    made = plain_search().made
    kinds = {record.kind: record for record in made.records}
    assert kinds["reference"]["divergence"] == 0.0
    assert made.state is not None
    assert made.state.reference.noise_floor == kinds["noise"]["divergence"] > 0.0
    assert made.state.reference.deterministic


class Unsteady(SimulatedRunner):
    """Every run of the script as written ends a little higher than the one before."""

    runs = 0

    def run(self, spec: TrialSpec) -> TrialResult:
        ran = super().run(spec)
        if spec.kind != "train" or spec.policy is not None:
            return ran
        Unsteady.runs += 1
        return replace(ran, losses=tuple(loss * (1 + 1e-4 * Unsteady.runs) for loss in ran.losses))


@pytest.mark.usefixtures("here")
def test_two_trials_that_differ_are_told_without_blaming_the_script() -> None:
    asked, simulated = options(trials=1, seeds=1, sampler="random"), script()
    command = ScriptCommand.parse(asked.command)
    made = Search(asked, command, Listeners(), lambda seed, _folder: Unsteady(simulated, seed))
    made.run()
    assert made.state is not None
    assert not made.state.reference.deterministic
    (note,) = [note for note in made.state.notes if "two trials of the unchanged script differ by 0.010%" in note]
    assert "not deterministic" not in note
    assert "was not tried" in note


def test_samples_are_those_of_the_scaled_step(here: Path) -> None:  # noqa: F811
    """A step of 32 times the tokens holds 32 times the samples, unless they are longer sequences."""
    for scale, grown in (("tokens=32", 32), ("tokens=32,seq=4", 8)):
        asked = options(trials=1, seeds=1, sampler="random", target="h100", cost_scale=scale)
        made, result = search(script(device="cpu"), replace(asked, study=scale.replace(",", "-")))
        assert made.state is not None
        assert made.state.reference.samples == 8 * grown
        assert result.reference["samples_per_s"] == pytest.approx(8 * grown * result.reference["throughput"])


class Notes:
    """A listener that keeps what a person is told."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def note(self, text: str) -> None:
        self.kept.append(text)

    def phase(self, *_: object) -> None: ...
    def started(self, *_: object) -> None: ...
    def trial(self, *_: object) -> None: ...
    def finished(self, *_: object) -> None: ...


def test_what_follows_the_last_run_is_expected_too(here: Path) -> None:  # noqa: F811
    """A search said 48 s, and took 4 more to write the policy, the reports and MLflow."""
    made, notes = engine(script(), options(trials=2)), Notes()
    made.listener = Listeners(notes)
    made.run()
    (told,) = (text for text in notes.kept if text.startswith("expected from here on"))
    assert ", the answer " in told
    assert made.state is not None
    assert made.state.needed_s > 4


def test_passes_for_gradient_errors_of_a_rehearsal_do_not_compile(here: Path) -> None:  # noqa: F811
    """They were expected to take 21 min, and took 11 s: each was given its share of a run's compilation."""
    seconds = []
    for compile_s in (0.0, 600.0):
        asked = options(trials=1, seeds=1, sampler="random", target="b200", study=f"{compile_s:g}")
        made, notes = engine(script(compile_s=compile_s), asked), Notes()
        made.listener = Listeners(notes)
        made.run()
        (told,) = (text for text in notes.kept if text.startswith("expected from here on"))
        scan = re.search(r"gradient errors (\d+) s,", told)
        assert scan, told
        seconds.append(int(scan[1]))
    assert seconds[1] <= seconds[0] + 2


#: A loss that scatters more than it falls, and the same batches of a script that does not train.
FALLING = (4.2, 4.5, 4.5, 3.2, 5.2, 3.8, 3.4, 4.6, 4.1, 3.5, 3.2)
UNTRAINED = (4.2, 4.6, 4.7, 3.5, 5.6, 4.3, 4.0, 5.3, 4.9, 4.4, 4.2)


@pytest.mark.parametrize(
    ("losses", "still", "learnt", "asked"),
    [
        (FALLING, {"losses": UNTRAINED}, True, 1),
        (FALLING, {"losses": FALLING}, False, 1),
        (FALLING, {"losses": tuple(1.002 * loss for loss in FALLING)}, False, 1),
        (FALLING, {"losses": (math.nan,) * 11, "status": "diverged"}, False, 1),
        (FALLING, {"losses": (*FALLING[:-1], math.inf)}, False, 1),
        (tuple(4.0 / (1 + step) for step in range(11)), {"losses": UNTRAINED}, True, 0),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_the_order_of_losses_does_not_show_a_run_shows_that_does_not_train(
    losses: tuple[float, ...], still: dict[str, object], learnt: bool, asked: int
) -> None:
    simulated, options_ = script(), options(trials=1, seeds=1)

    class Scattering(SimulatedRunner):
        def run(self, spec: TrialSpec) -> TrialResult:
            ran = super().run(spec)
            if not isinstance(spec, TrainSpec) or len(ran.losses) != len(losses):
                return ran
            return replace(ran, **({"losses": losses} | (still if spec.perturb == STILL else {})))  # type: ignore[arg-type]

    command = ScriptCommand.parse(options_.command)
    made = Search(options_, command, Listeners(), lambda seed, _folder: Scattering(simulated, seed))
    made.run()
    assert made.state is not None
    assert made.state.reference.baseline.learnt is learnt
    assert sum(isinstance(spec, TrainSpec) and spec.perturb == STILL for _, spec in simulated.calls) == asked


def series(name: str = "eval_loss", *names: str, values: tuple[float, ...] = ()) -> Series:
    return Series(name, steps=tuple(range(len(values))), values=values, names=names)


@pytest.mark.parametrize(
    ("result", "error", "says"),
    [
        (
            {"metric": series("eval_loss", "eval/loss", "lr")},
            UnknownNameError,
            "unknown metric 'eval_loss'\n  fix: did you mean 'eval/loss'",
        ),
        ({"metric": series("eval_loss")}, UsageError, r"nor anything else\n  fix: autoprec.report\(eval_loss=value\)"),
        ({"metric": series("eval_loss", "eval_loss")}, UsageError, "though at other times\n  fix: more --steps"),
        (
            {"status": "ok", "metric": series(values=(1.0, math.nan))},
            NothingAcceptableError,
            "the script's own eval_loss is not finite",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_metric_that_is_not_reported_is_told_with_those_that_are(
    result: dict[str, object], error: type[Exception], says: str
) -> None:
    reason = "the script did not report eval_loss within 22 steps"
    asked = {"status": "unreported", "reason": reason} | result
    with pytest.raises(error, match=says) as caught:
        searching(asked, metric="eval_loss").run()
    told = error is not UnknownNameError and asked["status"] == "unreported"
    assert (reason in str(caught.value)) is told


@pytest.mark.usefixtures("here")
def test_what_trials_measure_themselves_no_script_is_told_to_report() -> None:
    reason = "the script did not report rollout_kl within 22 steps: it names no copy of the model that generates"
    with pytest.raises(UsageError, match="no copy of the model that generates\n  fix: more --steps") as caught:
        searching({"status": "unreported", "reason": reason, "metric": series("eval")}, metric="rollout_kl").run()
    assert "autoprec.report" not in str(caught.value)
