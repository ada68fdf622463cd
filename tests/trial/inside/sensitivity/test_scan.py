"""Gradient errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.sensitivity.scan import _Watch, hardly_moved
from autoprec.trial.probe_log import read_rounds, read_rows
from autoprec.trial.protocol import DuelRounds, DuelSpec, GradientErrors, Probe, ScanSpec
from tests.trial.conftest import uniform


@pytest.mark.parametrize("unscaled", [False, True], ids=["at its step", "before"])
def test_gradients_of_two_optimizers_under_one_scaler_are_in_one_unit(unscaled: bool) -> None:
    """Those of the second were as the scaled loss left them, 65536 times larger: nothing else was seen."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    hooks = Hooks()
    hooks.install()
    try:
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model)
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**16), []
        found = Found([model], [first, second], list(model.parameters()))
        hooks.events = _Watch(
            found, hooks, lambda watch: seen.append([watch.unclip.get(id(p), 1.0) for p in model[1].parameters()])
        )
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if unscaled:
            scaler.unscale_(second)
        scaler.step(first)
        scaler.step(second)
    finally:
        hooks.remove()
    assert seen == [[1.0 if unscaled else 2.0**-16] * 2]


def test_layers_behind_a_projection_that_begins_at_zero_have_no_gradient_to_judge_by() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    found = Found([model], [], list(model.parameters()))
    assert hardly_moved(found, [1.0, 0.1, 1.0, 0.1, 0.5, 0.5]) == []
    assert hardly_moved(found, [1e-5, 0.1, 1.0, 0.1, 0.5, 0.5]) == ["0"]
    assert hardly_moved(found, [0.0, 0.0, 0.0, 0.1, 0.5, 0.5]) == ["0", "1"]
    model[0].weight.requires_grad_(False)  # frozen: nothing of it is ever to be judged
    found = Found([model], [], [p for p in model.parameters() if p.requires_grad])
    assert hardly_moved(found, [0.1, 0.0, 0.1, 0.5, 0.5]) == ["1"]


@pytest.mark.parametrize("launch", ["fork", "process"])
def test_each_answer_is_in_the_log_that_the_scan_was_given(host: Any, tmp_path: Path, launch: str) -> None:
    """In forks of the step, and where it is played again; a probe that failed is not."""
    probes = (
        Probe("one", uniform("bf16")),
        Probe("none", uniform("bf16", "no_such_layer")),
        Probe("two", uniform("fp8")),
    )
    with host("plain.py", launch=launch) as runner:
        result = runner.run(ScanSpec(warmup=1, probes=probes, log="scan.jsonl"))
    assert isinstance(result.answer, GradientErrors), result
    assert [bool(row.failed) for row in result.answer.probes] == [False, True, False]
    told = {row.id: row for row in result.answer.probes if not row.failed}
    assert read_rows([tmp_path / "run" / "scan.jsonl"]) == told


@pytest.mark.parametrize("forks", [2, 1])
def test_each_round_is_in_the_log_that_a_duel_was_given(host: Any, tmp_path: Path, forks: int) -> None:
    """Where contenders have processes of their own, and where they take turns in one."""
    with host("plain.py") as runner:
        probes = (Probe("bf16", uniform("bf16")),)
        result = runner.run(DuelSpec(probes=probes, within_s=0.5, side_by_side=forks, log="duel.jsonl"))
    assert isinstance(result.answer, DuelRounds), result
    rounds, seconds = read_rounds([tmp_path / "run" / "duel.jsonl"])
    assert rounds == list(result.answer.rounds)
    assert bool(rounds) == (seconds > 0)
    assert rounds
