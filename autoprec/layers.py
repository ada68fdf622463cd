"""Which layers of a model a policy can decide about, and what they are called.

Names are those of ``named_modules()`` of the innermost user model: what DDP, FSDP, ``torch.compile`` and activation
checkpointing wrap around it does not show in them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autoprec.swap import swapped_base

__all__ = ["clean_name", "kind_of", "tunable_layers", "unwrap"]

_TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model inside DDP, DataParallel, FSDP, DeepSpeed and ``torch.compile`` wrappers."""
    while True:
        names = {cls.__name__ for cls in type(model).__mro__}
        inner: Any = None
        if "OptimizedModule" in names:
            inner = model._modules.get("_orig_mod")
        elif names & set(_WRAPPERS):
            inner = model._modules.get("module") or model._modules.get("_fsdp_wrapped_module")
        elif "CheckpointWrapper" in names:
            inner = model._modules.get("_checkpoint_wrapped_module")
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """Return a module name without the components that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def kind_of(module: nn.Module) -> str:
    """Return ``linear``, ``conv1d`` (transformers), ``conv``, or an empty string for what cannot be tuned."""
    base = swapped_base(module)
    weight = module._parameters.get("weight")
    if weight is None and isinstance(module, nn.Linear):
        weight = getattr(module, "weight", None)  # parametrised: the weight is computed
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return ""  # lazy, or held by a quantised-storage library
    if isinstance(module, nn.Linear):
        return "linear" if base.forward is nn.Linear.forward and "forward" not in module.__dict__ else ""
    if isinstance(module, _CONVOLUTIONS):
        own = next(c.forward for c in base.__mro__ if c in _CONVOLUTIONS)
        return "conv" if base.forward is own and "forward" not in module.__dict__ else ""
    if base.__name__ == "Conv1D" and hasattr(module, "nf") and weight.ndim == 2:
        return "conv1d"
    return ""


def tunable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers a policy can decide about, by name, in model order; a shared module appears once."""
    root = unwrap(model)
    skipped = {id(m.out_proj) for m in root.modules() if isinstance(m, nn.MultiheadAttention)}
    return {
        clean_name(name): module
        for name, module in root.named_modules()
        if id(module) not in skipped and kind_of(module)
    }
