"""Which layers of a model a policy can decide about, and what they are called.

Names are those of ``named_modules()`` of the innermost user model: what DDP, FSDP, ``torch.compile`` and activation
checkpointing wrap around it does not show in them. A weight that is not called ``weight`` (``nn.MultiheadAttention``'s
``in_proj_weight``, the 3-D weights of experts, a raw Parameter given to ``F.linear``) goes by its parameter name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from autoprec.applying.swap import swapped_base

_TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: Layers with one weight that a policy decides about.
LAYERS = (nn.Linear, *_CONVOLUTIONS)
#: Raw parameters that look like tables or gains, not like GEMM weights.
_NO_WEIGHT = re.compile(r"emb|pos|token|query_tokens|prompt|bias|norm|scale|gamma|beta|codebook|mask|A_log|lora_|table")
#: The least side of a weight: 8 values are the shortest side of a tensor core's 16-bit product (PTX: m16n8k8).
_SMALLEST = 8
_COMPLEX = "a complex weight: not tunable, no policy changes what it runs in"


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing a policy decides about: a module of a ``kind``, or a raw ``parameter`` of a module.

    ``kind`` is linear, conv1d (transformers), conv, recurrent (an LSTM, GRU or RNN, whose weights one kernel runs, or a
    cell of one), attention (a projection of ``nn.MultiheadAttention``) or functional (a weight seen only when a
    function multiplies by it).
    """

    module: nn.Module
    kind: str
    parameter: str = "weight"

    @property
    def weight(self) -> Tensor:
        """The weight that the layer multiplies by: ``[N, K]``, or of the shape that its kind of layer has."""
        found: Any = _attribute(self.module, self.parameter)
        held: Any = found.weight if isinstance(found, nn.Module) else found
        weight: Tensor = held
        return weight


def _attribute(module: nn.Module, name: str) -> Any:
    """Return an attribute; a parametrised weight is computed without a trace (spectral norm iterates in training)."""
    if not is_parametrized(module, name):
        return getattr(module, name, None)
    held: Any = module.parametrizations
    how: nn.Module = held[name]
    training = [part for part in how.modules() if part.training]
    how.eval()
    try:
        return getattr(module, name)
    finally:
        for part in training:
            part.training = True


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model inside DDP, DataParallel, FSDP, DeepSpeed and ``torch.compile`` wrappers."""
    while True:
        names = {cls.__name__ for cls in type(model).__mro__}
        inner: Any = None
        if "OptimizedModule" in names:
            inner = model._modules.get("_orig_mod")
        elif names & set(_WRAPPERS):
            # asked whether it is true, a module says how long it is
            inner = model._modules.get("module", model._modules.get("_fsdp_wrapped_module"))
        elif "CheckpointWrapper" in names:
            inner = model._modules.get("_checkpoint_wrapped_module")
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """Return a module name without the components that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def kind_of(module: nn.Module) -> str:
    """Return ``linear``, ``conv1d`` (transformers), ``conv``, ``recurrent``, ``functional``, or an empty string.

    A linear layer with a forward of its own is ``functional``: its own code runs, and the GEMM in it is found when it
    multiplies by the weight.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return ""  # its code is compiled: nothing done to it from Python reaches the GEMM
    base = swapped_base(module)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        theirs = any(c in _RECURRENT and base.forward is c.forward for c in base.__mro__)
        return "recurrent" if theirs and "forward" not in module.__dict__ else ""
    weight = module._parameters.get("weight")
    weight = weight if isinstance(weight, nn.Parameter) else None
    if weight is None and isinstance(module, LAYERS):
        weight = _attribute(module, "weight")
    if (
        not isinstance(weight, Tensor)
        or not weight.is_floating_point()
        or isinstance(weight, nn.UninitializedParameter)
    ):
        return ""  # lazy, or held by a quantised-storage library
    own = "forward" in module.__dict__
    if isinstance(module, nn.Linear):
        return "functional" if own or base.forward is not nn.Linear.forward else "linear"
    if isinstance(module, _CONVOLUTIONS):
        standard = next(c.forward for c in base.__mro__ if c in _CONVOLUTIONS)
        return "conv" if base.forward is standard and not own else ""
    if base.__name__ == "Conv1D" and hasattr(module, "nf") and weight.ndim == 2:
        return "functional" if own else "conv1d"
    return ""


def _raw_weights(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's own parameters that may be GEMM weights."""
    if isinstance(module, torch.jit.ScriptModule) or swapped_base(module).__module__.startswith("torch.nn."):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and not why_not_a_weight(name, parameter):
            yield name


def why_not_a_weight(name: str, parameter: Tensor) -> str:
    """Return why a raw parameter is not offered as a GEMM weight, by its name and shape; empty when it is."""
    if isinstance(parameter, nn.UninitializedParameter):
        return "not a floating-point weight yet"
    if not parameter.is_floating_point():
        return _COMPLEX if parameter.is_complex() else f"its weight holds {parameter.dtype}, not floating-point numbers"
    if parameter.ndim not in (2, 3) or (parameter.ndim == 3 and parameter.shape[0] == 1):
        return f"a raw weight of {parameter.ndim} dimensions is not a plain matrix"
    if min(parameter.shape[-2:]) < _SMALLEST:
        sides = " x ".join(str(size) for size in parameter.shape[-2:])
        return f"a raw weight of {sides} is too narrow: no low-precision GEMM runs with a side below {_SMALLEST}"
    return "its name is that of a table or a gain, not of a GEMM weight" if _NO_WEIGHT.search(name) else ""


def tunable_units(model: nn.Module) -> dict[str, Unit]:
    """Return everything a policy can decide about, by name, in model order; what is shared appears once."""
    root = unwrap(model)
    found: dict[str, Unit] = {}
    attention_out: set[int] = set()
    for name, module in root.named_modules():
        clean = clean_name(name)
        if isinstance(module, nn.MultiheadAttention):
            attention_out.add(id(module.out_proj))
            for parameter in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if module._parameters.get(parameter) is not None:
                    found[f"{clean}.{parameter}" if clean else parameter] = Unit(module, "attention", parameter)
            found[f"{clean}.out_proj" if clean else "out_proj"] = Unit(module, "attention", "out_proj")
            continue
        if id(module) in attention_out:
            continue
        kind = kind_of(module)
        if kind:
            found[clean] = Unit(module, kind, next(iter(module._parameters)) if kind == "recurrent" else "weight")
        elif not isinstance(module, (nn.Linear, nn.Embedding)):
            for parameter in _raw_weights(module):
                path = clean if parameter == "weight" else f"{clean}.{parameter}" if clean else parameter
                found[path] = Unit(module, "functional", parameter)
    return found
