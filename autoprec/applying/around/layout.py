"""Images with their channels last: ``implementation: {layout: channels_last}``.

Convolutions and norms of a CPU (oneDNN) and of Tensor Cores (cuDNN) work on NHWC and turn NCHW around before and after
each layer. Given an input that lies in NHWC, every layer of torch hands its result on in NHWC (torch's tutorial on
channels last), so that turning the model's inputs is enough: weights, gradients and optimizer state stay as they are.
Shapes are the script's in any case; what the model returns lies as it does without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoprec.errors import UnsupportedError

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


#: Functions of a tensor that depend on how it lies.
BY_LAYOUT = frozenset({Tensor.view, Tensor.as_strided, torch.as_strided})


class Viewed:
    """What a model asks of tensors by how they lie, answered for those whose channels lie last.

    A view that such a tensor cannot give is a copy. Nothing may be written into it: the tensor would not change.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, int]] = []

    def ask(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one of :data:`BY_LAYOUT`.

        Args:
            func: the function.
            args, kwargs: what it is called with; the first is a tensor of any shape.

        Raises:
            UnsupportedError: it names strides, and the tensor's are not those that the script knows.
        """
        tensor: Any = args[0] if args else None
        if not isinstance(tensor, Tensor) or tensor.ndim not in _LAST or tensor.is_contiguous():
            return func(*args, **kwargs)
        if func is not Tensor.view:
            raise _refused("the model asks for strides (as_strided) of a tensor whose channels lie last")
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            copied: Tensor = tensor.contiguous().view(*args[1:], **kwargs)
        if not copied.is_inference():
            self._copies.append((copied, copied._version))
        return copied

    def check(self) -> None:
        """End a forward.

        Raises:
            UnsupportedError: something was written into a copy.
        """
        copies, self._copies = self._copies, []
        if any(tensor._version != version for tensor, version in copies):
            raise _refused("the model writes into a view of a tensor whose channels lie last, which is a copy there")


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(what, where="policy.implementation.layout", fix="set layout: keep")
