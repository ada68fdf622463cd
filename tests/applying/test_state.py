"""Save and resume under a policy: the losses of a run never interrupted, by every way a checkpoint is taken."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from autoprec import Policy
from autoprec.applying.state import models_of, without_policy
from autoprec.errors import AutoPrecWarning
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


@pytest.mark.parametrize("name", ["fp8_delayed", "stored", "phases"])
def test_flattened_checkpoints_carry_it(name: str) -> None:
    """torchtitan flattens what it saves of optimizers, and reads it by the names that a live parameter group has."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    run, resumed = Run(name), Run(name)
    run.steps(0, 5)
    run.optimizer.zero_grad()
    document = saved(get_optimizer_state_dict(run.model, run.optimizer, options=flat))
    resumed.model.load_state_dict(saved(run.model.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoPrecWarning)
        set_optimizer_state_dict(resumed.model, resumed.optimizer, document, options=flat)
    assert resumed.steps(5, 10) == run.steps(5, 10)


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
    assert any("steps, skipped" in str(each.message) for each in caught)
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


class Towers:
    """Two models under one optimizer, put together in an order of one's own."""

    def __init__(self, order: str) -> None:
        torch.manual_seed(0)
        self.policy = policy_from_dict({"schema": "autoprec.policy/1", **POLICIES["fp8_delayed"]}, cls=Policy)
        self.policy = self.policy.model_copy(
            update={"optimizer": self.policy.optimizer.model_copy(update=dict(STORED))}
        )
        self.left = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 24), nn.Linear(24, 8))
        self.right = nn.Sequential(nn.Linear(12, 24), nn.Embedding(4, 4), nn.Linear(24, 8))
        self.kept = (self.left, self.right)
        for step in order.split(", "):
            getattr(self, step)()

    def copy(self) -> None:
        self.left, self.right = copy.deepcopy((self.left, self.right))

    def left_on(self) -> None:
        self.policy.apply(self.left)

    def right_on(self) -> None:
        self.policy.apply(self.right)

    def wrap(self) -> None:
        self.optimizer = torch.optim.AdamW([*self.left.parameters(), *self.right.parameters()], lr=1e-2)
        assert self.policy.wrap_optimizer(self.optimizer) is self.optimizer

    def train(self) -> None:
        self.steps(50, 51)

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            random = torch.Generator().manual_seed(step)
            tokens, x = torch.randint(0, 8, (16,), generator=random), torch.randn(16, 12, generator=random)
            seen = self.right[2](self.right[0](x)) + self.right[1].weight.sum()
            loss = (self.left(tokens) - seen).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


STORED = {"weights": "e4m3_master", "exp_avg": "e4m3"}
ORDERS = [
    "left_on, right_on, wrap",
    "wrap, left_on, right_on",
    "right_on, wrap, left_on",
    "left_on, right_on, copy, wrap",
    "left_on, copy, right_on, wrap",
    "right_on, left_on, right_on, wrap, left_on",
    "left_on, right_on, wrap, train, right_on",
]


@pytest.mark.parametrize("order", ORDERS)
def test_an_optimizer_carries_all_models_that_it_trains_in_whatever_order(order: str) -> None:
    run = Towers(order)
    run.steps(0, 4)
    state = saved((run.left.state_dict(), run.right.state_dict(), run.optimizer.state_dict()))
    held = [name for name in state[2]["param_groups"][0]["autoprec"] if name.startswith("model")]
    assert len(held) == len(run.policy.state_dict(run.left)) + len(run.policy.state_dict(run.right))
    assert models_of(run.optimizer) == [run.left, run.right]
    tables = {id(run.left[0].weight), id(run.right[1].weight)}
    for model in (run.left, run.right):
        for parameter in model.parameters():
            stored = parameter.dim() == 2 and id(parameter) not in tables
            assert (type(parameter).__name__ == "StoredTensor") is stored
    expected = run.steps(4, 7)
    for other in (order, ORDERS[0]):  # checkpoints do not depend on the order
        again = Towers(other)
        again.left.load_state_dict(state[0])
        again.right.load_state_dict(state[1])
        again.optimizer.load_state_dict(copy.deepcopy(state[2]))
        assert again.steps(4, 7) == expected


@pytest.mark.parametrize("when", ["step", "save", "load"])
@pytest.mark.parametrize("order", ["left_on, wrap", "wrap, right_on", "wrap"])
def test_models_that_no_policy_is_on_are_told_of_once(order: str, when: str) -> None:
    run = Towers(order)
    document = torch.optim.AdamW([*run.left.parameters(), *run.right.parameters()]).state_dict()
    ask: Any = {
        "step": lambda: run.steps(0, 1),
        "save": lambda: run.optimizer.state_dict(),
        "load": lambda: run.optimizer.load_state_dict(document),
    }[when]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask()
        ask()
    told = [str(one.message) for one in caught if "no policy is on" in str(one.message)]
    assert len(told) == 1
    assert told[0].count("Sequential") == (2 if order == "wrap" else 1)
    assert "policy.apply(model)" in told[0]
    if order != "wrap":
        model = run.left if order.startswith("left") else run.right
        notes = run.policy.audit(model).notes
        assert notes == ["its optimizer also trains Sequential, which no policy is on"]


def test_what_is_meant_is_not_told_of() -> None:
    whole = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2))
    policy = policy_from_dict({"schema": "autoprec.policy/1", **POLICIES["fp8_delayed"]}, cls=Policy)
    policy.apply(whole[0])  # a part alone
    optimizer = policy.wrap_optimizer(torch.optim.SGD(whole.parameters(), lr=0.1))
    assert without_policy(optimizer) == []
    other, scale = nn.Sequential(nn.Linear(8, 8)), nn.PReLU(4)
    named = policy.wrap_optimizer(torch.optim.SGD([*whole.parameters(), *other.parameters()], lr=0.1), whole[0])
    with_loss = policy.wrap_optimizer(torch.optim.SGD([*whole.parameters(), *scale.parameters()], lr=0.1))
    for made in (optimizer, named, with_loss):
        made.state_dict()
    assert without_policy(named) == ["Sequential"]


def test_parameters_that_an_optimizer_trains_for_nothing_are_told_of() -> None:
    """``load_state_dict(assign=True)`` gives a model other Parameters than an optimizer was given before."""
    run = Run("fp8_delayed")
    run.steps(0, 1)
    run.model.load_state_dict(Run("fp8_delayed").model.state_dict(), assign=True)
    with pytest.warns(AutoPrecWarning, match="not the weight of its Linear any more"):
        run.steps(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.steps(2, 3)
        other = Run("fp8_delayed")
        other.model[2].weight = nn.Parameter(torch.ones(32, 32))
        other.optimizer.add_param_group({"params": [other.model[2].weight]})
        other.steps(0, 2)


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "stored"])
def test_a_pickled_run_goes_on_once_the_policy_is_there_again(name: str) -> None:
    """Scripts that save whole objects: ``torch.save({"model": model, "optimizer": optimizer}, path)``."""
    run, resumed, buffer = Run(name), Run(name, apply=False), io.BytesIO()
    run.steps(0, 5)
    with pytest.warns(UserWarning, match="is pickled") as told:
        torch.save((run.model, run.optimizer), buffer)
    assert ["pickled" in str(one.message) for one in told] == [True, True]
    buffer.seek(0)
    resumed.model, resumed.optimizer = torch.load(buffer, weights_only=False)
    assert type(resumed.optimizer.state[resumed.model[0].weight]["exp_avg"]) is torch.Tensor
    resumed.apply()
    assert resumed.steps(5, 10) == run.steps(5, 10)


def test_a_model_on_meta_gets_its_weights_after_its_policy() -> None:
    for name in ("fp8_delayed", "nvfp4"):
        plain = Run(name)
        weights = saved(plain.model.state_dict())
        expected = plain.steps(0, 3)
        run = Run(name, apply=False)
        with torch.device("meta"):
            run.model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        run.policy.apply(run.model)
        run.model.load_state_dict(weights, assign=True)
        run.optimizer = run.policy.wrap_optimizer(torch.optim.AdamW(run.model.parameters(), lr=0.01))
        assert run.steps(0, 3) == expected


def test_a_checkpoint_of_a_run_in_16_bits_is_told_of() -> None:
    run, resumed = Run("fp8_delayed"), Run("fp8_delayed")
    run.steps(0, 2)
    document = saved(run.optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.optimizer.load_state_dict(document)
    for held in document["state"].values():
        held["exp_avg"] = held["exp_avg"].bfloat16()
    with pytest.warns(AutoPrecWarning, match="exp_avg in bfloat16, and the weights of this run are in float32"):
        resumed.optimizer.load_state_dict(document)
