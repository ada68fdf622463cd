"""The Lightning plugins convert the submodule they are told to."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.phases import phases_of
from autoprec.applying.swap import execution_of
from autoprec.optim.optimizer import runtime_of
from autoprec.policy import policy_from_dict
from autoprec.support.optional import is_available


def _policy() -> Policy:
    document = {"schema": "autoprec.policy/1", "recipes": {"bf16": {"format": "bf16"}}, "default": "bf16"}
    return policy_from_dict(document, cls=Policy)


@pytest.mark.skipif(not is_available("lightning"), reason="lightning is not installed")
@pytest.mark.parametrize("name", ["PolicyFabricPrecision", "PolicyTrainerPrecision"])
def test_the_lightning_plugins(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from autoprec.integrations import lightning

        plugin = getattr(lightning, name)(_policy(), prefix="model")
    module = nn.Module()
    module.model = nn.Sequential(nn.Linear(4, 4))
    module.other = nn.Linear(4, 4)
    assert plugin.convert_module(module) is module
    assert execution_of(module.model[0]) is not None
    assert execution_of(module.other) is None
    plugin.load_state_dict(plugin.state_dict())
    phased = policy_from_dict(_policy().to_dict() | {"phases": [{"from": 0.5, "default": "keep"}]}, cls=Policy)
    module._trainer = SimpleNamespace(max_steps=10)  # as a LightningModule has one
    getattr(lightning, name)(phased, prefix="model").convert_module(module)
    found = phases_of(module.model)
    assert found is not None
    assert found.starts == (0, 5)


@pytest.mark.skipif(not is_available("lightning"), reason="lightning is not installed")
def test_a_trainers_optimizers_are_wrapped_before_a_checkpoint_is_read() -> None:
    """At its first step the second of two optimizers, or one that accumulates gradients, would read it too late."""
    from autoprec.integrations.lightning import PolicyTrainerPrecision

    policy = policy_from_dict(_policy().to_dict() | {"optimizer": {"exp_avg": "bf16"}}, cls=Policy)
    plugin = PolicyTrainerPrecision(policy)
    module = plugin.convert_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizers = [torch.optim.AdamW(part.parameters()) for part in module]
    plugin.connect(module, optimizers, [])
    assert all(runtime_of(optimizer) is not None for optimizer in optimizers)
