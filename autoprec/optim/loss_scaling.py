"""Dynamic loss scaling for FP16, put into scripts that have none.

The scale lives inside the backward pass only: gradients are multiplied where they enter the model (at its outputs)
and divided where they reach its parameters, before they are accumulated. The script therefore never sees a scaled
loss or gradient: clipping, logging and accumulation need no change. A step whose gradients overflowed is left out and
counted, and the scale halved; after ``growth_interval`` good steps it doubles (Micikevicius et al., arXiv 1710.03740;
constants of ``torch.amp.GradScaler``). A script with its own ``GradScaler`` is left alone.

Limit: a parameter that the script also uses outside the model's forward (an explicit weight penalty) gets that part of
its gradient divided although it was never multiplied; move such a term into the forward.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autoprec.optim.guard import gradient_norm

__all__ = ["LossScaler", "script_has_scaler"]

_SMALLEST, _LARGEST = 1.0, 2.0**32


def script_has_scaler() -> bool:
    """Say whether an enabled ``GradScaler`` (torch's, or a subclass) is alive in this process."""
    # type() rather than isinstance(): asking a lazy proxy for its class may import or warn.
    return any(issubclass(type(found), torch.amp.GradScaler) and found.is_enabled() for found in gc.get_objects())


@dataclass
class LossScaler:
    """Scale, count, adapt. Build it with :meth:`install`.

    ``scale`` is a power of two, so scaling and unscaling change no bit of a gradient that stays in range.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    skipped_steps: int = 0
    inactive_reason: str = ""
    _handles: list[Any] = field(default_factory=list)
    _held: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @classmethod
    def install(
        cls,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        initial_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> LossScaler:
        """Hook ``model`` and ``optimizers``; does nothing (see ``inactive_reason``) when the script scales itself."""
        made = cls(initial_scale, growth_interval)
        if script_has_scaler():
            made.inactive_reason = "the script has its own GradScaler"
            return made
        made._handles.append(model.register_forward_hook(made._scale_outputs))
        for parameter in model.parameters():
            if parameter.requires_grad:
                made._handles.append(parameter.register_hook(made._unscale))  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            made._handles.append(optimizer.register_step_pre_hook(made._before_step))
            made._handles.append(optimizer.register_step_post_hook(made._after_step))
        return made

    @property
    def active(self) -> bool:
        """False when the script has its own scaler, or after :meth:`remove`."""
        return bool(self._handles)

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _scale_outputs(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for value in _tensors(output):
            if value.requires_grad and value.grad_fn is not None:
                value.register_hook(self._multiply)  # type: ignore[no-untyped-call]

    def _multiply(self, gradient: Tensor) -> Tensor:
        return gradient * self.scale

    def _unscale(self, gradient: Tensor) -> Tensor:
        return gradient / self.scale

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if torch.isfinite(torch.tensor(gradient_norm(parameters))):
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.scale, self.good_steps = min(self.scale * 2, _LARGEST), 0
            return
        self.skipped_steps, self.good_steps = self.skipped_steps + 1, 0
        self.scale = max(self.scale / 2, _SMALLEST)
        # Without gradients every torch optimizer leaves its parameters and state alone.
        self._held[id(optimizer)] = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, gradient in self._held.pop(id(optimizer), []):
            parameter.grad = gradient


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a model output (containers, dataclasses and ModelOutput included)."""
    values = vars(output).values() if hasattr(output, "__dataclass_fields__") else tree_leaves(output)
    for value in values:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                yield leaf
