"""What the recorded graph is compared with: the FLOPs of every Linear and convolution, counted by hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import nn

from benchmarks.graph.zoo import MODELS as PLAIN


def zoo() -> dict[str, Callable[[], Any]]:
    """Every architecture: name -> build."""
    from benchmarks.graph.zoo_hf import MODELS as HUGGING_FACE

    return {**HUGGING_FACE, **PLAIN}


def built(build: Callable[[], Any]) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = build()
    return model, inputs


def loss_of(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
    return loss


def _once(module: nn.Module, x: torch.Tensor, out: torch.Tensor) -> int:
    """FLOPs of one product of a module, from the closed form."""
    weight: Any = module.weight
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return 2 * prod(x.shape[:-1]) * int(weight.numel())
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    positions = x if transposed else out
    return 2 * x.shape[0] * prod(positions.shape[2:]) * int(weight.numel())


def _counted(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D"


@contextlib.contextmanager
def truth(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """Count forward and backward FLOPs of every Linear and convolution by hooks: name -> [forward, backward]."""
    found: dict[str, list[int]] = {}
    deferred: dict[str, int] = {}
    hooks = []

    def watch(name: str, module: nn.Module) -> None:
        def after(_module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
            row, once = found.setdefault(name, [0, 0]), _once(module, args[0], out)
            again = torch._C._current_graph_task_id() != -1
            if not again:
                row[0] += once
                if not torch.is_grad_enabled():  # reentrant checkpointing: differentiated when it runs again
                    deferred[name] = deferred.get(name, 0) + 1
            if torch.is_grad_enabled() and (not again or deferred.get(name)):
                weight: Any = module.weight
                row[1] += once * (int(args[0].requires_grad) + int(weight.requires_grad))
                if again:
                    deferred[name] -= 1

        hooks.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        if _counted(module):
            watch(name, module)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
