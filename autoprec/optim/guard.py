"""Skip a step whose gradients are not finite, and count it.

Low-precision state cannot take a non-finite value back out: the amax of its block would stay infinite. Large-scale
FP8 runs (GLM, DeepSeek) skip such steps as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoprec.optim.tensor import decoded


def before_update(check: Callable[[torch.optim.Optimizer], None]) -> Callable[..., Any]:
    """Return a step pre-hook that runs ``check`` on the gradients of this step.

    They are there, or the closure that ``step`` is given makes them (as Lightning's does).
    """

    def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            check(optimizer)
            return None

        @functools.wraps(closure)
        def checked() -> Any:
            loss = closure()
            check(optimizer)
            return loss

        return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked), kwargs)

    return hook


def _whole(norm: Any) -> Tensor:
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def gradient_norm(parameters: list[Tensor]) -> float:
    """Return the L2 norm of all gradients (FP32 accumulation at least); infinity or NaN when any value is.

    Args:
        parameters: of any shapes; those without a dense gradient do not count.
    """
    found = [decoded(p.grad) for p in parameters if p.grad is not None and not p.grad.is_sparse]
    norms = [
        _whole(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)))
        for gradient in found
    ]
    if not norms:
        return 0.0
    device = norms[0].device
    return float(torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])))


def only_makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a step is none of the run: ``torch.distributed.checkpoint`` takes it so that there is state to fill.

    It sets all rates and gradients to zero for it, each time that an optimizer without state (plain SGD) is saved.
    """
    rates = (group.get("lr", 1.0) for group in optimizer.param_groups)
    # it sets a rate that is a tensor to one on the CPU; another is not asked for its value, which waits for the device
    if any(rate.device.type != "cpu" or bool(rate) if isinstance(rate, Tensor) else rate for rate in rates):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and not any(bool(decoded(gradient).any()) for gradient in gradients)


@dataclass
class StepGuard:
    """Leaves out steps of an optimizer by taking their gradients away: any torch optimizer then changes nothing.

    Ranks decide alike, since they hold the same gradients.
    """

    skipped: int = 0
    nonfinite: int = 0
    _handles: list[Any] = field(default_factory=list)
    _held: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def install(cls, optimizer: torch.optim.Optimizer) -> StepGuard:
        """Hook an optimizer."""
        made = cls()
        made._handles.append(optimizer.register_step_pre_hook(before_update(made._before)))
        made._handles.append(optimizer.register_step_post_hook(made._after))
        return made

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def admits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return False, and count, when this step must be skipped."""
        if getattr(optimizer, "found_inf", None) is not None and float(optimizer.found_inf) > 0:  # type: ignore[attr-defined]
            self.skipped += 1
            return False
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer's gradients are still multiplied by it
        norm = gradient_norm([p for group in optimizer.param_groups for p in group["params"]])
        norm /= 1.0 if scale is None else float(scale)
        if not math.isfinite(norm):
            self.skipped, self.nonfinite = self.skipped + 1, self.nonfinite + 1
            return False
        return True

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if found and not self.admits(optimizer):  # without gradients a loss scaler has left the step out already
            self._held = [(parameter, parameter.grad) for parameter in found]
            for parameter in found:
                parameter.grad = None

    def _after(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []
