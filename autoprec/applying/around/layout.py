"""Images with their channels last: ``implementation: {layout: channels_last}``.

Convolutions and norms of a CPU (oneDNN) and of Tensor Cores (cuDNN) work on NHWC and turn NCHW around before and after
each layer. Given an input that lies in NHWC, every layer of torch hands its result on in NHWC (torch's tutorial on
channels last), so that turning the model's inputs is enough: weights, gradients and optimizer state stay as they are.
Shapes are the script's in any case; what the model returns lies as it does without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Memory format by number of dimensions: images ``[N, C, H, W]`` and volumes ``[N, C, D, H, W]``.
_LAST: dict[int, torch.memory_format] = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(value: Any, found: list[int]) -> Any:
    """Return containers of a forward's inputs with floating images and volumes turned to channels last.

    Args:
        value: any nesting of tuples, lists and dictionaries; other objects are handed on as they are.
        found: one entry is added for each tensor that was turned.
    """
    if isinstance(value, Tensor):
        layout = _LAST.get(value.ndim)
        if layout is None or not value.is_floating_point() or value.is_contiguous(memory_format=layout):
            return value
        found.append(value.ndim)
        return value.contiguous(memory_format=layout)
    if type(value) in (tuple, list):
        return type(value)(channels_last(each, found) for each in value)
    if type(value) is dict:
        return {key: channels_last(each, found) for key, each in value.items()}
    return value


def as_written(value: Tensor) -> Tensor:
    """Return a tensor of a forward's output, of any shape, as it lies where channels come first."""
    layout = _LAST.get(value.ndim)
    turned = layout is not None and value.is_contiguous(memory_format=layout) and not value.is_contiguous()
    return value.contiguous() if turned else value


def viewed(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``Tensor.view``, or a copy of that shape where ``[N, C, H, W]`` with its channels last has no view."""
    try:
        return tensor.view(*args, **kwargs)
    except RuntimeError:
        if _LAST.get(tensor.ndim) is None or tensor.is_contiguous():
            raise
        return tensor.contiguous().view(*args, **kwargs)
