"""The Trainer callback applies the policy, guards the run and takes the policy off."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.swap import execution_of
from autoprec.errors import UsageError
from autoprec.policy import policy_from_dict
from autoprec.support.optional import is_available


def _policy() -> Policy:
    document = {"schema": "autoprec.policy/1", "recipes": {"bf16": {"format": "bf16"}}, "default": "bf16"}
    return policy_from_dict(document, cls=Policy)


@pytest.mark.skipif(not is_available("transformers"), reason="transformers is not installed")
def test_the_trainer_callback() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from autoprec.integrations.transformers import PolicyCallback
    callback = PolicyCallback(_policy())
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped: Any = SimpleNamespace(optimizer=optimizer)
    callback.on_train_begin(None, None, None, model=model, optimizer=wrapped)
    assert execution_of(model[0]) is not None
    logs = {"loss": 1.0, "grad_norm": 0.5}
    callback.on_log(None, None, None, logs=logs)
    assert logs["guard/loss_gap"] == 0.0
    callback.on_train_end(None, None, None, model=model)
    assert type(model[0]) is nn.Linear


@pytest.mark.skipif(not is_available("transformers"), reason="transformers is not installed")
def test_training_arguments_leave_to_the_policy_what_it_decides(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from autoprec.integrations.transformers import PolicyCallback, training_arguments

        document = {"schema": "autoprec.policy/1", "activations": "bf16", "execution": "eager"}
        policy = policy_from_dict(document, cls=Policy)
        shared = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
        decided = training_arguments(policy, bf16=True, torch_compile=True, **shared)
        assert (decided.bf16, decided.fp16, decided.torch_compile) == (False, False, False)
        assert training_arguments(Policy(), bf16=True, **shared).bf16, "keep is what the script says"
    scaled = policy_from_dict({**document, "activations": "fp16", "loss_scaling": "dynamic"}, cls=Policy)
    with pytest.raises(UsageError, match="scales the loss"):
        training_arguments(scaled, fp16=True, **shared)
    with pytest.raises(UsageError, match="scales the loss"):
        PolicyCallback(scaled).on_train_begin(SimpleNamespace(fp16=True), None, None, model=nn.Linear(4, 4))


@pytest.mark.skipif(not is_available("transformers"), reason="transformers is not installed")
def test_phases_follow_the_trainers_own_count() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from autoprec.integrations.transformers import PolicyCallback
    document = _policy().to_dict() | {"phases": [{"from": 0.5, "default": "keep"}]}
    callback = PolicyCallback(policy_from_dict(document, cls=Policy), guard=False)
    for step, plain in ((0, False), (60, True)):
        model = nn.Sequential(nn.Linear(4, 4))
        state = SimpleNamespace(max_steps=100, global_step=step, stateful_callbacks={})
        callback.on_train_begin(None, state, None, model=model)
        assert (type(model[0]) is nn.Linear) is plain
        callback.on_train_end(None, None, None, model=model)


@pytest.mark.skipif(not is_available("transformers"), reason="transformers is not installed")
def test_a_resumed_trainer_goes_on_under_what_its_guard_had_fallen_back_to() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from autoprec.integrations.transformers import PolicyCallback
    recipe = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "delayed"}}
    policy = policy_from_dict(_policy().to_dict() | {"recipes": {"bf16": recipe}}, cls=Policy)

    def begun(callback: Any, step: int, saved: dict[str, Any]) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16))
        held = saved.get("optimizer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if held is not None:
            optimizer.load_state_dict(held)
        state = SimpleNamespace(global_step=step, max_steps=8, stateful_callbacks={"PolicyCallback": saved.get("own")})
        callback.on_train_begin(None, state, None, model=model, optimizer=optimizer)
        saved["optimizer"] = optimizer.state_dict
        return model

    saved: dict[str, Any] = {}
    first = PolicyCallback(policy)
    model = begun(first, 0, saved)
    for loss in (1.0, *[float("nan")] * 4):
        first.on_log(None, None, None, logs={"loss": loss})
    assert first.guard is not None
    assert [breach.action for breach in first.guard.breaches] == ["wgrad_bf16"]
    model(torch.ones(4, 16)).sum().backward()
    saved = {"own": json.loads(json.dumps(first.state())), "optimizer": saved["optimizer"]()}
    for step, made in (
        (4, PolicyCallback(policy)),
        (4, PolicyCallback(**saved["own"]["args"])),
        (0, PolicyCallback(policy)),
    ):
        resumed = begun(made, step, dict(saved))
        resumed(torch.ones(4, 16)).sum().backward()
        assert made.guard is not None
        assert made.guard.breaches == (first.guard.breaches if step else [])
        assert execution_of(resumed[0]).executed["wgrad"] == ("bf16" if step else "fp8 delayed e4m3/e4m3/e4m3")
