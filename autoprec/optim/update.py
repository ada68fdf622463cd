"""The update rules of AdamW, Adam, SGD with momentum and Muon, on FP32 values of one parameter.

They follow ``torch.optim``'s single-tensor functions operation for operation, so that with lossless storage the
result is bit-identical to the optimizer that was wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import muon


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def adam_update(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float, group: Mapping[str, Any]
) -> None:
    """Update ``weight``, ``exp_avg`` and ``exp_avg_sq`` in place.

    Args:
        weight, gradient, exp_avg, exp_avg_sq: FP32 of one shape; ``gradient`` is not changed.
        step: counts from 1 and includes this step.
        group: lr, betas, eps, weight_decay, maximize and decoupled_weight_decay (AdamW), as ``torch.optim.Adam`` names
            them.
    """
    beta1, beta2 = (_number(beta) for beta in group["betas"])
    lr, decay = _number(group["lr"]), _number(group["weight_decay"])
    if group.get("maximize"):
        gradient = -gradient
    if decay != 0:
        if group.get("decoupled_weight_decay"):
            weight.mul_(1 - lr * decay)
        else:
            gradient = gradient.add(weight, alpha=decay)
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    correction2 = (1 - beta2**step) ** 0.5
    denominator = exp_avg_sq.sqrt().div_(correction2).add_(_number(group["eps"]))
    weight.addcdiv_(exp_avg, denominator, value=-(lr / (1 - beta1**step)))


def sgd_update(weight: Tensor, gradient: Tensor, momentum: Tensor | None, group: Mapping[str, Any]) -> Tensor | None:
    """Update ``weight`` in place and return the new momentum buffer (None without momentum).

    Args:
        weight, gradient: FP32 of one shape; ``gradient`` is not changed.
        momentum: the buffer so far, of the same shape, changed in place; None before the first step.
        group: as in ``torch.optim.SGD``.
    """
    lr, decay, factor = _number(group["lr"]), _number(group["weight_decay"]), _number(group["momentum"])
    if group.get("maximize"):
        gradient = -gradient
    if decay != 0:
        gradient = gradient.add(weight, alpha=decay)
    if factor != 0:
        if momentum is None:
            momentum = torch.clone(gradient).detach()
        else:
            momentum.mul_(factor).add_(gradient, alpha=1 - _number(group["dampening"]))
        gradient = gradient.add(momentum, alpha=factor) if group["nesterov"] else momentum
    weight.add_(gradient, alpha=-lr)
    return momentum


def muon_update(weight: Tensor, gradient: Tensor, momentum: Tensor, group: Mapping[str, Any]) -> None:
    """Update ``weight`` and ``momentum`` in place, by torch's own function.

    Its Newton-Schulz iterations multiply in bf16 by themselves (Jordan, kellerjordan.github.io/posts/muon), or in the
    dtype that ``optimizer.products`` says.

    Args:
        weight, gradient, momentum: one matrix each, FP32 ``[rows, columns]``.
        group: as in ``torch.optim.Muon``.
    """
    names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
    muon([weight], [gradient], [momentum], has_complex=False, **{name: group[name] for name in names})
