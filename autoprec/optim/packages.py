"""Eight-bit optimizers of torchao and bitsandbytes in the place of the script's own.

AutoPrec's storage is patched into the optimizer the script already has and is the faster one on a CPU (docs/state.md:
0.45 of torchao's AdamWFp8, 0.6 of bitsandbytes' AdamW8bit). On a GPU the packages bring fused kernels, and DTensor
support under FSDP2; there they can be the better piece. They are optimizers of their own classes, so this returns a
*new* object: rebuild learning-rate schedulers on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.errors import UnknownNameError, UnsupportedError
from autoprec.optim.optimizer import unwrap_optimizer
from autoprec.support.optional import require

__all__ = ["PACKAGE_OPTIMIZERS", "package_optimizer"]

#: name -> (module, Adam class, AdamW class, what it stores)
PACKAGE_OPTIMIZERS: dict[str, tuple[str, str, str, str]] = {
    "torchao-fp8": ("torchao.optim", "AdamFp8", "AdamWFp8", "both moments E4M3, exact scale per 256"),
    "torchao-8bit": ("torchao.optim", "Adam8bit", "AdamW8bit", "both moments in an 8-bit dynamic map per 256"),
    "torchao-4bit": ("torchao.optim", "Adam4bit", "AdamW4bit", "both moments in 4 bits per 128"),
    "bitsandbytes-8bit": ("bitsandbytes.optim", "Adam8bit", "AdamW8bit", "both moments in an 8-bit dynamic map"),
}
_SHARED = ("lr", "betas", "eps", "weight_decay")


def package_optimizer(optimizer: torch.optim.Optimizer, name: str) -> torch.optim.Optimizer:
    """Return a new optimizer of a package, with the parameter groups and options of ``optimizer``.

    Args:
        optimizer: ``torch.optim`` Adam or AdamW before its first step (the packages cannot take over FP32 moments).
        name: a key of :data:`PACKAGE_OPTIMIZERS`.

    Raises:
        UnknownNameError: no such optimizer.
        MissingDependencyError: the package is not installed; carries the pip line.
        UnsupportedError: another kind of optimizer, one that has stepped, or options the package does not have.
    """
    if name not in PACKAGE_OPTIMIZERS:
        raise UnknownNameError("package optimizer", name, PACKAGE_OPTIMIZERS)
    if not isinstance(optimizer, torch.optim.Adam):
        raise UnsupportedError(
            f"{name} replaces Adam and AdamW, not {type(optimizer).__name__}", fix="use torch.optim.AdamW"
        )
    if optimizer.state:
        raise UnsupportedError(
            f"{name} cannot take over the state of an optimizer that has stepped",
            fix="replace it before the first step",
        )
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise UnsupportedError(f"{name} has no {option}=True", fix=f"set {option}=False")
    unwrap_optimizer(optimizer)
    module, adam, adamw, _ = PACKAGE_OPTIMIZERS[name]
    decoupled = bool(optimizer.param_groups[0].get("decoupled_weight_decay"))
    cls = getattr(require(module, purpose=f"optimizer '{name}'"), adamw if decoupled else adam)
    groups = [{"params": group["params"], **{key: group[key] for key in _SHARED}} for group in optimizer.param_groups]
    made: torch.optim.Optimizer = cls(groups, lr=optimizer.defaults["lr"])
    if module.startswith("torchao"):
        _adapt_torchao(made)
    return made


def _adapt_torchao(optimizer: torch.optim.Optimizer) -> None:
    """Accept plain numbers as learning rate, and do not compile on a CPU (the first step would take a minute)."""
    on_cpu = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    original: Any = optimizer.step

    def step(closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):  # scripts assign group["lr"] = 1e-3; torchao wants a tensor
                group["lr"] = torch.tensor(float(group["lr"]))
        if not on_cpu:
            return original(closure)
        with torch.compiler.set_stance("force_eager"):
            return original(closure)

    optimizer.step = step  # type: ignore[method-assign]
