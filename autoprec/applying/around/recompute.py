"""Activation checkpointing: what the backward pass computes again runs under the modes of the first forward.

``torch.utils.checkpoint`` restores autocast and random states for the second forward, not torch-function modes. There
a softmax or norm that a policy computes in float32 would run in 16 bits: without reentrant autograd torch finds other
dtypes and raises CheckpointError, with it the gradients are those of another forward. Inside compiled graphs the second
forward is part of the graph, and nothing is to be done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as checkpointing
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


@functools.cache
def carry_into_recomputation(kind: type[TorchFunctionMode]) -> None:
    """Let modes of this kind, where one is active as a checkpointed part is called, be active when it is repeated.

    Changes ``torch.utils.checkpoint`` for the whole process, once; parts that are called under no such mode are left as
    they are.
    """
    # both are looked up when `checkpoint` is called: libraries hold on to `checkpoint` itself
    first = checkpointing._checkpoint_without_reentrant_generator
    checkpointing._checkpoint_without_reentrant_generator = _carrying(kind, first, 0)
    function = checkpointing.CheckpointFunction
    function.forward = staticmethod(_carrying(kind, function.forward, 1))  # type: ignore[method-assign]


def _carrying(kind: type[TorchFunctionMode], original: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return a function whose argument at ``index``, what is to be repeated, takes the active modes along."""

    @functools.wraps(original)
    def carrying(*args: Any, **kwargs: Any) -> Any:
        for mode in (mode for mode in _active() if isinstance(mode, kind)):
            args = (*args[:index], _under(mode, args[index]), *args[index + 1 :])
        return original(*args, **kwargs)

    return carrying


def _active() -> list[TorchFunctionMode]:
    return _get_current_function_mode_stack()  # type: ignore[no-any-return, no-untyped-call]


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called under a mode, which the first call is under already."""

    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        if any(active is mode for active in _active()):
            return function(*args, **kwargs)
        with mode:
            return function(*args, **kwargs)

    return called
