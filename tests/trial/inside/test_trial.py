"""The pieces a trial is made of in its own process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import PolicyError, PolicyMismatchError, UnsupportedError
from autoprec.trial.inside import trial
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.trial import _is_running, is_out_of_memory, round_weights, status_of, write_result
from autoprec.trial.protocol import TrialResult, TrialSpec
from tests.trial.conftest import uniform


@pytest.mark.parametrize(
    ("error", "oom"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_out_of_memory(error: BaseException, oom: bool) -> None:
    assert is_out_of_memory(error) is oom


@pytest.mark.parametrize(("execution", "told"), [("keep", {"by_block": 4}), ("eager", {})])
def test_a_policy_that_compiles_nothing_is_not_said_to_have_compiled_blocks(
    monkeypatch: pytest.MonkeyPatch, execution: str, told: dict[str, int]
) -> None:
    made: Any = object.__new__(trial.Trial)
    made.spec, made.found, made._payload = TrialSpec(by_block=True), SimpleNamespace(root=nn.Linear(2, 2)), {}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards
    monkeypatch.setattr(trial, "compile_by_block", lambda: None)
    monkeypatch.setattr(trial, "compile_whole_by_block", lambda _root: 4)
    monkeypatch.setattr(trial, "apply_document", lambda *_, **__: SimpleNamespace(execution=execution))
    monkeypatch.setattr(trial, "is_compiled", lambda _root: 1 / 0)  # far enough
    with pytest.raises(ZeroDivisionError):
        made.begin(made.found.root, (), {})
    assert made._payload == told


def test_statuses() -> None:
    assert status_of(PolicyMismatchError("x")) == "mismatch"
    assert status_of(PolicyError("x")) == "mismatch"
    assert status_of(UnsupportedError("x")) == "unsupported"
    assert status_of(KeyError("x")) == "crashed"


def test_results_survive_what_json_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = TrialResult("diverged", losses=(1.0, float("nan")), payload={"x": float("inf"), "y": (1, {"z": 2.0})})
    write_result(path, result)
    document = json.loads(path.read_text())
    assert document["losses"] == [1.0, None]
    assert document["payload"] == {"x": None, "y": [1, {"z": 2.0}]}
    assert TrialResult.from_json(document).status == "diverged"
    assert list(tmp_path.iterdir()) == [path]


def test_perturbation_is_one_bf16_rounding() -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    round_weights(Found([model], [], list(model.parameters())))
    assert torch.equal(model.weight, before.bfloat16().float())
    gap = (model.weight.detach() - before).abs() / before.abs()
    assert 0 < float(gap.max()) <= 2**-8


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


def test_a_seeded_perturbation_rounds_up_or_down_at_random_and_leaves_the_streams_alone() -> None:
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    nearest, state = before.to(torch.bfloat16).float(), torch.get_rng_state()
    rounded = {}
    for perturb in ("bf16", "bf16:1", "bf16:2", "bf16:1"):
        with torch.no_grad():
            model.weight.copy_(before)
        round_weights(Found([model], [], list(model.parameters())), perturb)
        after = model.weight.detach().clone()
        assert torch.equal(after, after.to(torch.bfloat16).float())
        assert ((after - before).abs() <= before.abs() * 2**-7).all()  # a neighbour in bfloat16, on either side
        assert torch.equal(rounded.setdefault(perturb, after), after)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(rounded["bf16"], nearest)
    assert not torch.equal(rounded["bf16:1"], rounded["bf16:2"])
    assert abs(float((rounded["bf16:1"] - before).mean())) < 2e-5  # without bias: 64 x 64 errors of some 1e-4


def test_a_trial_that_is_off_near_zero_is_not_ended_early() -> None:
    from autoprec.trial.inside.observe.loop import early_stop

    reference = [1.0, 0.3, 0.05, *[1e-6] * 13]
    assert not early_stop([1.0, 0.3, 0.05, *[3e-6] * 13], reference, 0.05, 16)
    assert early_stop([1.0, 0.3, 0.05, *[0.05] * 13], reference, 0.05, 16)


def test_a_models_forward_is_on_the_stack_only_while_it_runs() -> None:
    """``agent.actor(x)`` calls a part: what surrounds the agent's own forward must not be taken to run."""
    seen: list[bool] = []

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = nn.Linear(4, 2)
            self.actor.register_forward_pre_hook(lambda *_: seen.append(_is_running(self)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x)

        def act(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.actor(x)
            return out

    agent = Agent()
    agent(torch.randn(2, 4))
    agent.act(torch.randn(2, 4))
    assert seen == [True, False]
