"""The Trainer callback applies the policy, guards the run and takes the policy off."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.applying.policy import Policy
from autoprec.applying.swap import execution_of
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
