"""The pieces a trial is made of in its own process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import AutoPrecWarning
from autoprec.trial.inside import trial
from autoprec.trial.inside.applying import apply_document, by_block
from autoprec.trial.inside.observe import hooks
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.observe.loop import Loop
from autoprec.trial.protocol import TrainSpec, TrialResult
from tests.trial.conftest import uniform


@pytest.mark.parametrize(
    ("compiled", "asked", "ran"),
    [
        (True, None, "compile"),
        (True, "keep", "compile"),
        (True, "eager", "eager"),
        (True, "compile_whole", "compile"),
        (False, "keep", "keep"),
        (False, "compile", "compile"),
        (False, "compile_whole", "compile"),
    ],
)
def test_by_block_whole_models_are_not_compiled_and_eager_ones_stay_so(
    compiled: bool, asked: str | None, ran: str
) -> None:
    model: Any = nn.Linear(2, 2)
    call = torch.compile(model, backend="eager") if compiled else None
    document = None if asked is None else {"schema": "autoprec.policy/1", "execution": asked}
    found = by_block(document, model)
    assert (found or {"execution": "keep"})["execution"] == ran
    assert call is None or by_block(None, nn.Linear(2, 2)) is None


def test_apply_document() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    found = Found([model], [], list(model.parameters()))
    assert apply_document(None, found, "auto") is None
    x = torch.randn(2, 8)
    plain = model(x)
    policy = apply_document(uniform("bf16"), found, "auto")
    assert not torch.equal(model(x), plain)
    policy.remove(model)
    assert torch.equal(model(x), plain)


def test_a_trial_that_is_off_near_zero_is_not_ended_early() -> None:
    from autoprec.trial.inside.observe.loop import early_stop

    reference = [1.0, 0.3, 0.05, *[1e-6] * 13]
    assert not early_stop([1.0, 0.3, 0.05, *[3e-6] * 13], reference, 0.05, 16)
    assert early_stop([1.0, 0.3, 0.05, *[0.05] * 13], reference, 0.05, 16)


def made_trial(tmp_path: Path, ended: list[TrialResult], monkeypatch: pytest.MonkeyPatch) -> trial.Trial:
    model = nn.Linear(4, 4)
    found = Found([model], [torch.optim.SGD(model.parameters())], list(model.parameters()))

    def finish(_code: int) -> None:
        raise SystemExit

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(trial, "write_result", lambda path, result: ended.append(result))
    monkeypatch.setattr(trial.os, "_exit", finish)
    watched = Hooks()
    watched.install()
    spec = TrainSpec(steps=3, warmup=0, policy=uniform("bf16"))
    return trial.Trial(spec, found, watched, result=tmp_path / "r", asked=0)


def test_a_step_that_goes_into_a_cuda_graph_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[TrialResult] = []
    made = made_trial(tmp_path, ended, monkeypatch)
    model, (optimizer,) = made.found.root, made.found.optimizers
    try:
        made.begin(model, (), {})
        for capturing in (False, True):  # a warm-up step, as torch's documentation has it, and the capture
            monkeypatch.setattr(hooks, "is_capturing", lambda _device, now=capturing: now)
            loss = model(torch.randn(2, 4)).sum()
            if capturing:
                with pytest.raises(SystemExit):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
    finally:
        made.hooks.remove()
    assert [(result.status, result.reason) for result in ended] == [("unsupported", trial.CAPTURED)]


def test_a_trial_that_ends_well_notes_what_autoprec_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[TrialResult] = []
    made = made_trial(tmp_path, ended, monkeypatch)
    model, (optimizer,) = made.found.root, made.found.optimizers

    def work() -> None:
        warnings.showwarning = lambda *_where: None
        warnings.simplefilter("always")
        made.begin(model, (), {})
        for _ in range(3):
            warnings.warn("fused FP8 casts do not run here", AutoPrecWarning, stacklevel=1)
            warnings.warn("something of the script's", UserWarning, stacklevel=1)
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    try:
        with warnings.catch_warnings(), pytest.raises(SystemExit):
            work()
    finally:
        made.hooks.remove()
    assert ended[0].ok
    assert ended[0].audit is not None
    assert [note for note in ended[0].audit["notes"] if "fused" in note] == ["fused FP8 casts do not run here"]
    assert "something" not in str(ended[0].audit["notes"])


@pytest.mark.parametrize(("graphs", "ends"), [([0, 1, 1], True), ([0, 0, 2], False)], ids=["first step", "second step"])
def test_a_step_in_which_something_compiles_is_not_how_long_steps_take(
    graphs: list[int], ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a compiled function calls the model, the first step is eager code and the second one compiles."""
    ended = list[TrialResult]()
    made = made_trial(tmp_path, ended, monkeypatch)
    made.hooks.remove()
    clock, late = iter((1.0, 9.0, 9.1)), list[str]()
    made._asked = 0.0
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(made, "finish", lambda status, _reason: late.append(status))
    spec = TrainSpec(steps=20, warmup=0, within_s=60.0)
    for steps in (1, 2, 3):
        loop = object.__new__(Loop)
        loop.steps, loop.total, loop.graphs = steps, 20, graphs[: steps + 1]
        made._look_at_the_time(spec, loop)
    assert late == ["out_of_time"] * ends
