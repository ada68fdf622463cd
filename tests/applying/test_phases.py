"""Phases on a live model: when they change, what they keep, and what is refused before the first step."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from autoprec import Policy
from autoprec.applying.phases import phases_of
from autoprec.applying.swap import execution_of
from autoprec.errors import AutoPrecWarning, PolicyMismatchError, UnsupportedError, UsageError
from autoprec.optim.optimizer import loss_scaler_of, runtime_of
from autoprec.optim.tensor import StoredTensor
from autoprec.policy import policy_from_dict

RECIPES = {
    "fp8": {"format": "fp8"},
    "delayed": {"format": "fp8", "scaling": {"scale": "delayed"}},
    "bf16": {"format": "bf16"},
}


def made(*phases: dict[str, Any], **rest: Any) -> Policy:
    document = {"schema": "autoprec.policy/1", "recipes": RECIPES, "default": "fp8", **rest}
    return policy_from_dict({**document, "phases": list(phases)}, cls=Policy)


class Training:
    def __init__(self, policy: Policy | None, *, kind: Any = torch.optim.AdamW, **given: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.done = 0
        if policy is not None:
            policy.apply(self.model, backend="emulated", **given)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(self.done))
            loss = (self.model(x).float() - x.roll(1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            self.done += 1
        return losses

    def ran(self) -> str:
        """Return what the first layer's last step really ran."""
        execution = execution_of(self.model[0])
        return "keep" if execution is None else str(execution.executed["wgrad"]).split()[0]


def test_every_step_runs_the_policy_of_its_phase() -> None:
    policy = made({"from": 2, "default": "bf16"}, {"from": 0.5, "default": "keep"})
    said: list[str] = []
    run = Training(policy, run_steps=8, on_change=said.append)
    ran = []
    for _ in range(8):
        run.steps(1)
        ran.append(run.ran() if run.done not in (2, 4) else "exchanged")
    assert ran == ["fp8", "exchanged", "bf16", "exchanged", *["keep"] * 4]
    assert said == [
        "step 2 of 8: the policy's phase from step 2 begins",
        "step 4 of 8: the policy's phase from 50 % of the run begins",
    ]
    assert policy.audit(run.model).ok


def test_the_losses_are_those_of_policies_exchanged_by_hand() -> None:
    policy = made({"from": 3, "default": "bf16", "optimizer": {"exp_avg": "e4m3"}}, {"from": 6, "optimizer": {}})
    run = Training(policy)
    policy.wrap_optimizer(run.optimizer, run.model)
    by_hand = Training(None)
    expected = []
    for stage in policy.stages:
        stage.apply(by_hand.model, backend="emulated")
        stage.wrap_optimizer(by_hand.optimizer, by_hand.model)
        expected += by_hand.steps(3)
    assert run.steps(9) == expected


def test_a_layer_whose_plan_stays_keeps_its_delayed_scales() -> None:
    rules = [{"match": "0", "recipe": "delayed"}, {"match": "2", "recipe": "fp8"}]
    policy = made({"from": 2, "layers": [rules[0]], "default": "bf16"}, layers=rules)
    run = Training(policy)
    run.steps(1)
    before = [execution_of(run.model[i]) for i in (0, 2)]
    run.steps(2)
    assert execution_of(run.model[0]) is before[0]
    assert execution_of(run.model[2]) is not before[1]
    assert any(float(value) > 0 for name, value in policy.state_dict(run.model).items() if name.endswith("scale"))


def test_state_is_converted_and_goes_back() -> None:
    policy = made(
        {"from": 2, "optimizer": {"exp_avg": "e4m3", "weights": "bf16_stochastic"}}, {"from": 4, "optimizer": {}}
    )
    run = Training(policy)
    run.steps(3)
    assert isinstance(run.optimizer.state[run.model[0].weight]["exp_avg"], StoredTensor)
    runtime = runtime_of(run.optimizer)
    assert runtime is not None
    assert run.model[0].weight in runtime.weights
    run.steps(1)
    assert runtime_of(run.optimizer) is None
    assert type(run.model[0].weight) is nn.Parameter
    assert run.optimizer.state[run.model[0].weight]["step"] == 4


def test_the_loss_scale_goes_on_over_a_boundary() -> None:
    policy = made(
        {"from": 2, "optimizer": {"exp_avg": "bf16"}}, activations="fp16", loss_scaling="dynamic", default="keep"
    )
    run = Training(policy)
    policy.wrap_optimizer(run.optimizer, run.model)
    scaler = loss_scaler_of(run.optimizer)
    assert scaler is not None
    scaler.scale = 1024.0
    run.steps(3)
    following = loss_scaler_of(run.optimizer)
    assert following is not None
    assert (following.scale, following.good_steps) == (1024.0, 3)


@pytest.mark.parametrize("way", ["wrapped", "plain", "told"])
def test_a_resumed_run_continues_in_its_phase(way: str) -> None:
    policy = made({"from": 3, "default": "bf16"})
    run = Training(policy)
    if way == "wrapped":
        policy.wrap_optimizer(run.optimizer, run.model)
    run.steps(5)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    resumed = Training(policy if way != "told" else None)
    if way == "told":
        policy.apply(resumed.model, backend="emulated", step=5)
    elif way == "wrapped":
        policy.wrap_optimizer(resumed.optimizer, resumed.model)
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.done = 5
    if way != "plain":  # Adam's own count is looked at with its first step, which then ran as the policy begins
        assert resumed.steps(3) == run.steps(3)
    else:
        resumed.steps(2)
        assert resumed.ran() == "bf16"
    found = phases_of(resumed.model)
    assert found is not None
    assert found.step == resumed.done


OPTIMIZER_PHASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "moments begin low": ({"exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"}, {}),
    "moments end low": ({}, {"exp_avg": "e4m3", "exp_avg_sq": "int8_block"}),
    "other moments": ({"exp_avg": "e4m3"}, {"exp_avg": "bf16", "exp_avg_sq": "int8_block"}),
    "weights end low": ({}, {"weights": "bf16_kahan"}),
    "weights begin low": ({"weights": "fp16_scaled"}, {}),
    "other weights": ({"weights": "fp16_scaled", "exp_avg": "e4m3"}, {"weights": "bf16_kahan"}),
    "noise": ({"weights": "bf16_stochastic"}, {"weights": "bf16_stochastic", "exp_avg": "e4m3"}),
}


@pytest.mark.parametrize("how", ["optimizer first", "model first", "wrapped last", "gone back"])
@pytest.mark.parametrize("name", OPTIMIZER_PHASES)
def test_what_is_stored_otherwise_in_a_later_phase_is_loaded_as_it_was_saved(name: str, how: str) -> None:
    first, second = OPTIMIZER_PHASES[name]
    policy = made({"from": 3, "optimizer": second}, optimizer=first, default="delayed")

    def wrapped() -> Training:
        run = Training(policy)
        policy.wrap_optimizer(run.optimizer, run.model)
        return run

    run = wrapped()
    run.steps(5)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    expected = run.steps(4)
    resumed = Training(policy) if how == "wrapped last" else wrapped()
    told = "weights" in first and name != "noise" and how != "wrapped last"
    resumed.steps(1 if how == "gone back" else 0)
    with pytest.warns(AutoPrecWarning, match="load the optimizer first") if told else nullcontext():
        loads = [(resumed.model, saved[0]), (resumed.optimizer, saved[1])]
        for part, held in loads if how in ("model first", "wrapped last") else reversed(loads):
            part.load_state_dict(held)
    if how == "wrapped last":
        policy.wrap_optimizer(resumed.optimizer, resumed.model)
    resumed.done = 5
    assert (resumed.steps(4) == expected) is not (told and how == "model first")


def test_other_optimizers_are_not_counted() -> None:
    policy = made({"from": 3, "default": "bf16"})
    run = Training(policy)
    other = Training(None)
    second = torch.optim.SGD([run.model[2].bias], lr=0.1)
    for _ in range(2):
        run.steps(1)
        second.step()
        other.steps(5)
    found = phases_of(run.model)
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("before", [0, 2])
def test_an_optimizer_that_takes_the_place_of_another_counts(wrapped: bool, before: int) -> None:
    """Gradual unfreezing makes one for each stage, and a schedule may hold those before."""
    policy = made({"from": 5, "default": "bf16"})
    run = Training(policy)
    if wrapped:
        policy.wrap_optimizer(run.optimizer)
    held = run.optimizer
    run.steps(before)
    run.optimizer = torch.optim.AdamW([*run.model[0].parameters()], lr=0.01)
    if wrapped:
        policy.wrap_optimizer(run.optimizer)
    run.steps(4 - before)
    assert run.ran() == "fp8"
    run.steps(2)
    assert run.ran() == "bf16"
    run.optimizer = held  # and back again
    run.steps(2)
    phases = phases_of(run.model)
    assert phases is not None
    assert phases.step == 8


def test_optimizers_in_turns_are_counted_once() -> None:
    policy = made({"from": 5, "default": "bf16"})
    run = Training(policy)
    other = torch.optim.SGD(run.model.parameters(), lr=0.01)
    for _ in range(4):
        run.steps(1)
        other.step()
    phases = phases_of(run.model)
    assert phases is not None
    assert phases.step == 4


def test_a_step_that_only_makes_state_is_not_counted() -> None:
    """``torch.distributed.checkpoint`` takes one before it saves or loads an optimizer without state."""
    run = Training(made({"from": 3, "default": "bf16"}), kind=torch.optim.SGD)
    run.steps(2)
    run.optimizer.zero_grad()
    get_optimizer_state_dict(run.model, run.optimizer)
    found = phases_of(run.model)
    assert found is not None
    assert found.step == 2


def test_what_cannot_run_is_refused_before_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UsageError, match="how many steps"):
        made({"from": 0.5, "default": "bf16"}).apply(model)
    with pytest.raises(PolicyMismatchError):
        made({"from": 5, "layers": [{"match": "nothing", "recipe": "bf16"}]}).apply(model)
    assert execution_of(model[0]) is None
    assert phases_of(model) is None
    policy = made({"from": 5, "optimizer": {"exp_avg_sq": "int8_block"}})
    policy.apply(model)
    with pytest.raises(UnsupportedError):
        policy.wrap_optimizer(torch.optim.RMSprop(model.parameters()), model)


def test_it_ends_with_the_policy_and_with_the_model() -> None:
    policy = made({"from": 2, "default": "bf16"})
    run = Training(policy)
    first = phases_of(run.model)
    hooks = len(_global_optimizer_post_hooks)
    policy.apply(run.model, backend="emulated")  # again: the first count is dropped
    last = phases_of(run.model)
    run.steps(1)
    assert first is not None
    assert last is not None
    assert (first.step, last.step) == (0, 1)
    policy.remove(run.model)
    assert phases_of(run.model) is None
    run.steps(3)
    assert last.step == 1
    assert type(run.model[0]) is nn.Linear
    policy.apply(run.model, backend="emulated")
    gone = weakref.ref(run.model)
    del run
    gc.collect()
    assert gone() is None
    assert len(_global_optimizer_post_hooks) == hooks


def test_a_model_that_goes_while_another_one_steps_does_not_end_the_training() -> None:
    policy = made({"from": 2, "default": "bf16"})
    runs: list[Training] = []
    steps: list[int] = []

    def forget(*_: Any) -> None:
        steps.append(1)
        del runs[1:]
        gc.collect()

    hook = register_optimizer_step_post_hook(forget)  # as a collection in the middle of torch's loop over its hooks
    try:
        runs += [Training(policy) for _ in range(3)]
        runs[0].steps(3)
    finally:
        hook.remove()
    assert len(steps) == 3


def test_a_phase_that_cannot_begin_any_more_is_told_and_does_not_end_the_training() -> None:
    run = Training(made({"from": 2, "layers": [{"match": "2", "recipe": "bf16"}]}))
    run.steps(1)
    run.model[2] = nn.Identity()  # the script changes its model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.steps(1)
    assert "could not begin" in str(caught[0].message)


def test_a_copy_that_follows_no_phases_is_told_of() -> None:
    policy = made({"from": 2, "default": "bf16"}, optimizer={"exp_avg": "bf16"})
    run = Training(policy)
    policy.wrap_optimizer(run.optimizer, run.model)
    run.steps(1)
    with pytest.warns(AutoPrecWarning, match="follows no phases"):
        copied = copy.deepcopy((run.model, run.optimizer))
    assert runtime_of(copied[1]) is not None
