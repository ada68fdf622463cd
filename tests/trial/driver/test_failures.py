"""What a person is told when a script cannot be tried: nothing that was not verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.failures import (
    first_step_failed,
    how_to_mend,
    no_host,
    nothing_trained,
    nothing_tunable,
    script_failed,
)
from autoprec.trial.protocol import TrialResult

COMMAND = ScriptCommand("script", "train.py", ("--lr", "1"), Path("/"))


def test_a_failing_script_is_shown_and_not_blamed() -> None:
    error = script_failed(COMMAND, 1, "Traceback\nValueError: broken")
    assert "exit code 1" in error.what
    assert "broken" in error.what
    assert "train.py --lr 1" in str(error.fix)
    for verdict in ("not an AutoPrec failure", "run it without AutoPrec", "its own"):
        assert verdict not in str(error)


def test_what_we_held_back_is_said() -> None:
    assert "AutoPrec's doing" in script_failed(COMMAND, 1, "mkdir: Permission denied").what
    assert "AutoPrec's doing" in first_step_failed(COMMAND, TrialResult("crashed", "x", "Permission denied")).what


def test_a_module_that_is_missing_is_answered_with_its_installation() -> None:
    error = script_failed(COMMAND, 1, "Traceback\nModuleNotFoundError: No module named 'wandb.sdk'")
    assert error.fix.endswith("-m pip install wandb")
    assert "report" not in error.fix


def test_a_script_that_asks_is_answered_with_an_argument() -> None:
    error = script_failed(COMMAND, 1, "Traceback\nEOFError: EOF when reading a line")
    assert "argument" in error.fix
    assert "report" not in error.fix


def test_a_script_that_holds_every_descriptor_is_told_the_limit() -> None:
    """Our own code in its process is what met it: that is neither our fault nor a host that was killed."""
    ours = Path(__file__).resolve().parents[3] / "autoprec" / "trial" / "inside" / "fork_server.py"
    tail = f'Traceback\n  File "{ours}", line 3, in x\nOSError: [Errno 24] Too many open files'
    assert "ulimit -n" in script_failed(COMMAND, 1, tail).fix
    assert "ulimit -n" in no_host(COMMAND, None, 1, tail, Path("x.log")).fix
    assert "ulimit -n" in first_step_failed(COMMAND, TrialResult("crashed", "the host process ended", tail=tail)).fix


def test_our_own_fault_is_ours() -> None:
    ours = Path(__file__).resolve().parents[3] / "autoprec" / "trial" / "inside" / "agent.py"
    error = script_failed(COMMAND, 1, f'Traceback\n  File "{ours}", line 3, in x\nKeyError: 1')
    assert "not the script's fault" in error.what


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({"why": "functional", "backwards": 0}, "torch.func.grad"),
        ({"why": "no_module", "backwards": 50}, "no torch.nn.Module"),
        ({"backwards": 0, "training_forwards": 7}, "7 calls in training mode"),
        ({"backwards": 4}, "no model in training mode"),
    ],
)
def test_what_was_seen_of_a_loop_is_named(seen: dict[str, object], says: str) -> None:
    assert says in nothing_trained(COMMAND, seen, "").what


def test_a_script_that_takes_no_step_gets_the_lines_that_fit() -> None:
    for error in (script_failed(COMMAND, 0, ""), first_step_failed(COMMAND, TrialResult("too_short", "0 of 1"))):
        assert "autoprec.Session(model, optimizer)" in str(error.fix)


@pytest.mark.parametrize("model", ["RecursiveScriptModule", "TopLevelTracedModule", "Wrapper"])
def test_torchscript_is_named_where_nothing_can_be_tuned_for_it(model: str) -> None:
    error = nothing_tunable(COMMAND, model, scripted=True)
    assert model in error.what
    assert "TorchScript model runs compiled code" in error.what
    assert "before torch.jit.script" in error.fix
    assert "TorchScript" not in nothing_tunable(COMMAND, model).what


def _message(run: Any) -> str:
    with pytest.raises((RuntimeError, TypeError)) as raised:
        run()
    return str(raised.value)


def _put(a: torch.Tensor, b: torch.Tensor) -> None:
    a[a[:, 0] >= 0] = b


@pytest.mark.parametrize(
    "run",
    [
        _put,
        lambda a, b: a @ b,
        lambda a, b: torch.addmm(a, a, b),
        lambda a, b: torch.nn.functional.linear(a, b),
        lambda a, b: torch.nn.functional.conv1d(a[None], b[None]),
        lambda a, b: a.index_add_(0, torch.arange(4), b),
        lambda a, b: a.scatter_(0, torch.zeros(4, 4, dtype=torch.int64), b),
        lambda a, b: torch.dot(a[0], b[0]),
        lambda a, b: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], b[None]),
        lambda a, b: torch.nn.functional.layer_norm(a, (4,), b[0], b[0]),
        lambda a, b: torch.einsum("ij,jk->ik", a, b),
    ],
)
def test_two_dtypes_that_meet_are_answered_with_a_cast(run: Any) -> None:
    """Messages of torch's own operators, of which each says it in other words."""
    said = _message(lambda: run(torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bfloat16)))
    assert "x.to(y.dtype)" in how_to_mend(said, "other"), said


@pytest.mark.parametrize(
    "said", ["CUDA out of memory", "KeyError: 'dtype'", "size mismatch, got 3 and 4", "", "assert"]
)
def test_other_failures_keep_their_advice(said: str) -> None:
    assert how_to_mend(said, "other") == "other"
