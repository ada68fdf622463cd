"""The pieces a trial is made of in its own process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.errors import PolicyError, PolicyMismatchError, UnsupportedError
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.trial import is_out_of_memory, round_weights, status_of, write_result
from autoprec.trial.protocol import TrialResult
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
