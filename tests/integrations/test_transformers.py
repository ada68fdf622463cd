"""The Trainer callback applies the policy, guards the run and takes the policy off."""

from __future__ import annotations

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
        callback.on_train_begin(None, SimpleNamespace(max_steps=100, global_step=step), None, model=model)
        assert (type(model[0]) is nn.Linear) is plain
        callback.on_train_end(None, None, None, model=model)
