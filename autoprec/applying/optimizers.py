"""Which optimizers train a model that a policy is on: found through the parameters.

A loop applies the policy to the model and wraps the optimizer in either order, and need not name one to the other.
What a policy remembers on the model travels in the optimizer's checkpoints, its storage formats lie in the optimizer,
and the audit of the model asks for both.

A script that makes another optimizer for its next stage may forget to have it wrapped: it keeps its state as torch
does, rounds the weights that are stored in fewer bits to nearest, which loses small updates, and takes the steps that
loss scaling leaves out. It is told of at its first step.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoprec.applying.units import unwrap
from autoprec.errors import AutoPrecWarning
from autoprec.optim.checkpoint import parameters_of
from autoprec.optim.optimizer import inner_optimizer, loss_scaler_of, runtime_of
from autoprec.optim.tensor import StoredTensor

#: Optimizers that a policy has wrapped.
WRAPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_SEEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: Those among the seen that were not wrapped, and train what a wrapped one stores.
_UNWRAPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _is_more_than_plain(optimizer: torch.optim.Optimizer) -> bool:
    scaler = loss_scaler_of(optimizer)
    return runtime_of(optimizer) is not None or (scaler is not None and scaler.active)


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    return optimizer in WRAPPED or runtime_of(optimizer) is not None


def _after_first_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if optimizer in _SEEN:
        return
    _SEEN.add(optimizer)
    if _is_wrapped(optimizer) or inner_optimizer(optimizer):
        return
    kept = {id(p) for other in list(WRAPPED) if _is_more_than_plain(other) for p in parameters_of(other)}
    if any(isinstance(p, StoredTensor) or id(p) in kept for p in parameters_of(optimizer)):
        _UNWRAPPED.add(optimizer)
        warnings.warn(
            f"this {type(optimizer).__name__} trains what a policy has an optimizer store in fewer bits or scale, and "
            "is not wrapped: its state stays as torch keeps it, stored weights are rounded to nearest, and steps whose "
            "gradients overflow are taken; policy.wrap_optimizer(optimizer)",
            AutoPrecWarning,
            stacklevel=3,
        )


register_optimizer_step_post_hook(_after_first_step)


def unwrapped_of(model: nn.Module) -> list[str]:
    """Return the classes of optimizers that have stepped and were not wrapped, though one was that trains the same."""
    found = (one for one in list(_UNWRAPPED) if not _is_wrapped(one) and shared(one, unwrap(model)))
    return list(dict.fromkeys(type(one).__name__ for one in found))


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
