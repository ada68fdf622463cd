"""The next step of an optimizer, taken by a copy of it on samples of what it trains: what would reach the weights?

An update that treats each element by itself is the same on a sample as on the whole tensor, so what a gradient makes
of the weights is known at no cost of their size, and nothing is written into them. Other optimizers step on copies of
whole tensors, where those are small.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoprec.graph.analysis.memory import step_of_twin
from autoprec.trial.inside.judging.samples import SAMPLE, sampled

#: Steps of optimizers whose update of an element depends on that element alone.
_ELEMENTWISE = frozenset(
    inspect.unwrap(cls.step)
    for cls in (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop),
        torch.optim.ASGD,
    )
)
#: Elements of all parameters up to which another optimizer steps on whole tensors.
_WHOLE = 1 << 22


def is_elementwise(optimizer: Optimizer) -> bool:
    """Say whether an optimizer is known to update each element by itself."""
    return inspect.unwrap(type(optimizer).step) in _ELEMENTWISE


def next_step(
    optimizer: Optimizer,
    gradient: Callable[[Tensor], Tensor | None],
    most: int,
    *,
    wide: torch.dtype | None = None,
    factor: float = 1.0,
) -> dict[int, Tensor] | None:
    """Return what the next step makes of samples of each parameter; None where that cannot be known.

    Args:
        optimizer: whose copy steps, with its state of now; it is not changed.
        gradient: returns the gradient of a parameter, of its shape, or None for one that is not stepped.
        most: elements of each parameter that are looked at.
        wide: the dtype in which weights, gradients and state are held; None for their own.
        factor: by which gradients are multiplied.

    Returns:
        By the parameter's ``id`` a tensor of shape ``[count]``, elements as of :func:`samples.sampled`.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if gradient(p) is not None]
    whole = not is_elementwise(optimizer)
    if whole and sum(p.numel() for p in trained) > _WHOLE:
        return None
    if any(type(p.data) is not Tensor or p.layout is not torch.strided or p.is_meta for p in trained):
        return None

    def taken(value: Any, like: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        part = sampled(value, most) if not whole and value.shape == like.shape else value.detach()
        wider = wide if wide is not None and part.is_floating_point() else part.dtype
        return part.to(wider, copy=True)

    groups, state, shadows = [], {}, dict[int, nn.Parameter]()
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # of a fused step
        factor /= float(scale)
    for group in optimizer.param_groups:
        several = []
        for p in group["params"]:
            grad = gradient(p)
            if grad is None or grad.layout is not torch.strided:
                continue
            shadow = shadows[id(p)] = nn.Parameter(taken(p, p))
            shadow.grad = taken(grad, p)
            if factor != 1.0:
                shadow.grad.mul_(factor)
            state[shadow] = {name: taken(value, p) for name, value in optimizer.state.get(p, {}).items()}
            several.append(shadow)
        groups.append((group, several))
    try:
        step_of_twin(optimizer, groups, state)
    except Exception:  # someone else's optimizer may need anything at all
        return None
    return {key: sampled(shadow, most) if whole else shadow.detach() for key, shadow in shadows.items()}


class Updates:
    """What reaches the weights of a step, and how far that is from what reaches them under other gradients.

    Args:
        optimizers: whose next step it is; gradients are those of now, as the script has clipped and unscaled them.
        most: elements of each parameter that are looked at.
    """

    def __init__(self, optimizers: Iterable[Optimizer], most: int = SAMPLE) -> None:
        self._optimizers, self._most = list(optimizers), most
        self._own = [self._size(optimizer) for optimizer in self._optimizers]
        self._factors = [1.0] * len(self._optimizers)
        self._update: dict[int, Tensor] | None = None

    def hold(self) -> None:
        """Take the step that others are compared with, by the gradients of now: the script's own step played again."""
        for at, optimizer in enumerate(self._optimizers):
            size, own = self._size(optimizer), self._own[at]
            factor = own / size if size else 1.0
            # a sum of squares differs in its last digits
            self._factors[at] = factor if math.isfinite(factor) and abs(factor - 1.0) > 1e-3 else 1.0
        self._update = self._taken()

    def change(self) -> float | None:
        """Return the relative change of what reaches the weights by the gradients of now; None where it is unknown."""
        return self._apart(self._taken())

    def in_more_bits(self, wide: torch.dtype) -> float | None:
        """Return the relative change of what reaches the weights of the step held where the step itself is lifted.

        Args:
            wide: the dtype of weights, gradients and state in it.
        """
        return self._apart(self._taken(wide))

    def _taken(self, wide: torch.dtype | None = None) -> dict[int, Tensor] | None:
        """Return the update of each sampled element, float64 of shape ``[count]``, by the parameter's ``id``."""
        found: dict[int, Tensor] = {}
        for optimizer, factor in zip(self._optimizers, self._factors, strict=True):
            after = next_step(optimizer, lambda p: p.grad, self._most, wide=wide, factor=factor)
            if after is None:
                return None
            for p in _trained(optimizer):
                if id(p) in after:
                    step = after[id(p)].double() - sampled(p, self._most).double()
                    found[id(p)] = step * math.sqrt(p.numel() / max(step.numel(), 1))
        return found

    def _apart(self, other: dict[int, Tensor] | None) -> float | None:
        if self._update is None or other is None or other.keys() != self._update.keys():
            return None
        error = sum(float((other[key] - one).square().sum()) for key, one in self._update.items())
        size = sum(float(one.square().sum()) for one in self._update.values())
        return math.sqrt(error / size) if 0.0 < size < math.inf and error < math.inf else None

    def _size(self, optimizer: Optimizer) -> float:
        grads = (p.grad for p in _trained(optimizer) if p.grad is not None and p.grad.layout is torch.strided)
        return math.sqrt(sum(float(sampled(grad, self._most).double().square().sum()) for grad in grads))


def _trained(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
