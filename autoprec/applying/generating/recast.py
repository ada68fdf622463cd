"""The dtype that the copy of a model that generates is held in, changed in place and back.

A rollout engine loads the weights in the dtype that it computes in. Parameters stay the same objects, so the script
goes on writing into them, and what it writes is rounded; so are buffers, as by ``module.to(dtype)``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoprec.applying.generating.pairs import in_step, weights_of


@dataclass(frozen=True, slots=True)
class AsWritten:
    """What a copy had before its weights were cast: the dtype of each parameter, and its buffers, by name."""

    dtypes: dict[str, torch.dtype]
    buffers: dict[str, Tensor]


_CAST: weakref.WeakKeyDictionary[nn.Module, AsWritten] = weakref.WeakKeyDictionary()


def cast(model: nn.Module, rollout: nn.Module, dtype: torch.dtype) -> None:
    """Hold a copy's weights, and what else it computes with, in a dtype; anew from the model's where it has those.

    Args:
        model: what trains.
        rollout: the copy that generates.
        dtype: a floating-point dtype.
    """
    exact = weights_of(model) if in_step(model, rollout) else {}
    own = weights_of(rollout)
    buffers = {name: one for name, one in rollout.named_buffers() if one.is_floating_point()}
    _CAST[rollout] = AsWritten({name: one.dtype for name, one in own.items()}, buffers)
    for name, one in own.items():
        if one.is_floating_point():
            one.data = exact.get(name, one).data.to(dtype, copy=True)
    for name, value in buffers.items():
        _set_buffer(rollout, name, value.to(dtype))


def dtypes_of(rollout: nn.Module) -> AsWritten | None:
    """Return what is held of a copy as it is now, for :func:`put_dtypes`; None where it is as the script wrote it."""
    if rollout not in _CAST:
        return None
    buffers = {name: one for name, one in rollout.named_buffers() if name in _CAST[rollout].buffers}
    return AsWritten({name: one.dtype for name, one in weights_of(rollout).items()}, buffers)


def put_dtypes(rollout: nn.Module, wanted: AsWritten | None) -> None:
    """Give a copy the dtypes that it had at another time; None: those that the script wrote."""
    written = _CAST.get(rollout)
    if wanted is None and written is not None:
        del _CAST[rollout]
    elif wanted is not None and written is None:
        _CAST[rollout] = AsWritten(
            {name: one.dtype for name, one in weights_of(rollout).items()},
            {name: one for name, one in rollout.named_buffers() if name in wanted.buffers},
        )
    now = wanted or written
    if now is None:
        return
    for name, one in weights_of(rollout).items():
        if one.dtype is not now.dtypes[name]:
            one.data = one.data.to(now.dtypes[name])
    for name, value in now.buffers.items():
        _set_buffer(rollout, name, value)


def _set_buffer(rollout: nn.Module, name: str, value: Tensor) -> None:
    path, _, own = name.rpartition(".")
    rollout.get_submodule(path)._buffers[own] = value
