"""Which optimizers train a model that a policy is on: found through the parameters.

A loop applies the policy to the model and wraps the optimizer in either order, and need not name one to the other.
What a policy remembers on the model travels in the optimizer's checkpoints, its storage formats lie in the optimizer,
and the audit of the model asks for both.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from autoprec.applying.units import unwrap

#: Optimizers that a policy has wrapped.
WRAPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that takes the steps: inside the wrappers of accelerate, DeepSpeed and others."""
    inner = getattr(optimizer, "optimizer", None)
    return own_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the living optimizers that a policy has wrapped and that train parameters of this model."""
    return [optimizer for optimizer in list(WRAPPED) if shared(optimizer, unwrap(model))]


def shared(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Return how many parameters of a model an optimizer trains."""
    own = {id(parameter) for parameter in model.parameters()}
    return sum(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
