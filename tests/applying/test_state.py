"""Save and resume under a policy: the losses of a run never interrupted, by every way a checkpoint is taken."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from autoprec import Policy
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import is_available

DELAYED = {"scale": "delayed", "amax_history_len": 4, "granularity": "tensor"}
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"recipes": {"r": BUILTIN_RECIPES[name].to_dict()}, "default": "r"} for name in ("fp8_delayed", "nvfp4")},
    "most_recent": {
        "recipes": {"r": {"format": "fp8", "scaling": {**DELAYED, "amax_compute_algo": "most_recent", "margin": 1}}},
        "default": "r",
    },
    "one_gemm": {
        "recipes": {"r": {"format": "fp8", "scaling": DELAYED}, "b": {"format": "bf16"}},
        "layers": [{"match": "*", "recipe": "b", "gemms": {"wgrad": "r"}}],
    },
    "dynamic": {"activations": "fp16", "loss_scaling": "dynamic"},
    "stored": {
        "recipes": {"r": BUILTIN_RECIPES["fp8_delayed"].to_dict()},
        "default": "r",
        "optimizer": {"weights": "bf16_stochastic", "exp_avg": "e4m3", "exp_avg_sq": "int8_block"},
    },
    "phases": {
        "recipes": {"r": BUILTIN_RECIPES["fp8_delayed"].to_dict(), "b": {"format": "bf16"}},
        "default": "r",
        "phases": [{"from": 3, "layers": [{"match": "0", "recipe": "r"}], "default": "b"}, {"from": 7, "default": "r"}],
    },
}


class Run:
    """A small training; ``steps`` returns its losses."""

    def __init__(self, name: str, kind: str = "adamw", *, apply: bool = True) -> None:
        torch.manual_seed(0)
        self.policy = policy_from_dict({"schema": "autoprec.policy/1", **POLICIES[name]}, cls=Policy)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
        self.optimizer = make(self.model.parameters(), **({"momentum": 0.9} if kind == "sgd" else {}), lr=0.01)
        if apply:
            self.apply()

    def apply(self, how: str = "named") -> None:
        if how == "wrapped first":
            self.policy.wrap_optimizer(self.optimizer)
        self.policy.apply(self.model)
        if how != "wrapped first":
            self.policy.wrap_optimizer(self.optimizer, self.model if how == "named" else None)

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
            loss = (self.model(x).float() - x.roll(1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def saved(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("early", [False, True], ids=["policy first", "checkpoint first"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_resumed_run_repeats_the_uninterrupted_one(name: str, early: bool) -> None:
    kinds = ("adamw", "sgd") if name == "dynamic" else ("adamw",)
    for kind in kinds:
        run = Run(name, kind)
        run.steps(0, 5)
        model, optimizer = saved(run.model.state_dict()), saved(run.optimizer.state_dict())
        expected = run.steps(5, 10)
        resumed = Run(name, kind, apply=not early)
        resumed.model.load_state_dict(model)
        resumed.optimizer.load_state_dict(optimizer)
        if early:
            resumed.apply()
        assert resumed.steps(5, 10) == expected


@pytest.mark.parametrize("how", ["found", "wrapped first"])
@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "stored", "phases"])
def test_a_wrapped_optimizer_finds_the_model_by_its_parameters(name: str, how: str) -> None:
    if (name, how) == ("phases", "wrapped first"):
        pytest.skip("a later phase of an optimizer that was wrapped before is taken up by its first step")
    run, resumed = Run(name, apply=False), Run(name, apply=False)
    run.apply(how)
    run.steps(0, 5)
    model, optimizer = saved(run.model.state_dict()), saved(run.optimizer.state_dict())
    resumed.apply(how)
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    assert resumed.steps(5, 10) == run.steps(5, 10)


@pytest.mark.skipif(not is_available("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("name", ["fp8_delayed", "stored"])
def test_accelerates_own_checkpoints_carry_it(name: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def prepared() -> tuple[Run, Any]:
        run = Run(name, apply=False)
        accelerator = accelerate.Accelerator(mixed_precision="no", cpu=True)
        run.model, run.optimizer = accelerator.prepare(run.model, run.optimizer)
        run.policy.apply(run.model)
        assert run.policy.wrap_optimizer(run.optimizer) is run.optimizer
        return run, accelerator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and accelerate about each other
        run, accelerator = prepared()
        run.steps(0, 5)
        accelerator.save_state(str(tmp_path))
        resumed, loader = prepared()
        loader.load_state(str(tmp_path))
        assert resumed.steps(5, 10) == run.steps(5, 10)


def test_distributed_checkpoints_and_the_policy_itself_carry_it(tmp_path: Path) -> None:
    run = Run("fp8_delayed")
    run.steps(0, 5)
    document = {"model": run.model.state_dict(), "optimizer": get_optimizer_state_dict(run.model, run.optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process, no group
        dcp.save(document, checkpoint_id=tmp_path / "dcp", no_dist=True)
    plain, own = saved(run.model.state_dict()), saved(run.policy.state_dict(run.model))
    adam = saved(run.optimizer.state_dict()["state"])
    expected = run.steps(5, 10)

    resumed = Run("fp8_delayed")
    document = {
        "model": resumed.model.state_dict(),
        "optimizer": get_optimizer_state_dict(resumed.model, resumed.optimizer),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(document, checkpoint_id=tmp_path / "dcp", no_dist=True)
    resumed.model.load_state_dict(document["model"])
    set_optimizer_state_dict(resumed.model, resumed.optimizer, document["optimizer"])
    assert resumed.steps(5, 10) == expected

    alone = Run("fp8_delayed", apply=False)
    alone.policy.apply(alone.model)
    alone.model.load_state_dict(plain)
    alone.optimizer.load_state_dict({"state": adam, "param_groups": alone.optimizer.state_dict()["param_groups"]})
    alone.policy.load_state_dict(alone.model, own)
    assert alone.steps(5, 10) == expected


def test_an_old_checkpoint_loads_with_a_note_and_a_plain_optimizer_keeps_the_entry_unread() -> None:
    run = Run("fp8_delayed")
    run.steps(0, 3)
    new = run.optimizer.state_dict()
    old = {
        **new,
        "param_groups": [{k: v for k, v in group.items() if k != "autoprec"} for group in new["param_groups"]],
    }
    with pytest.warns(UserWarning, match="no delayed scales .* 2 layers"):
        run.optimizer.load_state_dict(old)
    stored = Run("stored")
    with pytest.warns(UserWarning, match="begin") as caught:
        stored.optimizer.load_state_dict(old)
    assert any("steps, guard" in str(each.message) for each in caught)
    plain = Run("fp8_delayed", apply=False)
    plain.optimizer.load_state_dict(new)
    plain.steps(0, 1)
    assert "autoprec" in plain.optimizer.state_dict()["param_groups"][0]


def test_a_policy_that_remembers_nothing_leaves_checkpoints_alone() -> None:
    POLICIES["bf16"] = {"recipes": {"r": {"format": "bf16"}}, "default": "r"}
    run = Run("bf16")
    run.steps(0, 1)
    assert "autoprec" not in run.optimizer.state_dict()["param_groups"][0]
    assert run.policy.state_dict(run.model) == {}
