"""The Lightning plugins convert the submodule they are told to."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.skipif(not is_available("lightning"), reason="lightning is not installed")
def test_fabrics_optimizers_are_wrapped_before_the_first_forward() -> None:
    """Fabric tells a precision nothing of a checkpoint; each of two models has the optimizer that trains it."""
    from autoprec.integrations.lightning import PolicyFabricPrecision

    recipe = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "delayed"}}
    policy = policy_from_dict(_policy().to_dict() | {"recipes": {"bf16": recipe}}, cls=Policy)

    def run(steps: int, checkpoints: list[Any]) -> tuple[list[Any], list[float]]:
        plugin, losses = PolicyFabricPrecision(policy), []
        torch.manual_seed(0)
        models = [plugin.convert_module(nn.Linear(16, 16)) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        for model, optimizer, (weights, state) in zip(models, optimizers, checkpoints, strict=False):
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        for step in range(4 - steps, 4):
            for model, optimizer in zip(models, optimizers, strict=True):
                x = plugin.convert_input(torch.ones(4, 16) * (step + 1))
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                plugin.optimizer_step(optimizer)
                losses.append(loss.item())
            if step == 1:
                made = copy.deepcopy(
                    [(m.state_dict(), o.state_dict()) for m, o in zip(models, optimizers, strict=True)]
                )
        return (made if steps == 4 else []), losses

    saved, losses = run(4, [])
    assert all(len(state["param_groups"][0]["autoprec"]) == 9 for _, state in saved)
    assert run(2, saved)[1] == losses[4:]
