"""Activation checkpointing: what the backward pass computes again runs under the modes of the first forward.

``torch.utils.checkpoint`` restores autocast and random states for the second forward, not torch-function modes. There
a softmax or norm that a policy computes in float32 would run in 16 bits: without reentrant autograd torch finds other
dtypes and raises CheckpointError, with it the gradients are those of another forward. Delayed scales, too, are those of
the first forward (:mod:`autoprec.numerics.delayed.repeated`). Inside compiled graphs the second forward is part of the
graph, and nothing is to be done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from autoprec.numerics.delayed.repeated import Part


@functools.cache
def carry_into_recomputation(kind: type[TorchFunctionMode]) -> None:
    """Let modes of this kind, where one is active as a checkpointed part is called, be active when it is repeated.

    Changes ``torch.utils.checkpoint`` for the whole process, once; parts in which no layer has a policy are repeated as
    they were.
    """
    # both are looked up when `checkpoint` is called: libraries hold on to `checkpoint` itself
    generator = checkpointing._checkpoint_without_reentrant_generator
    function: Any = checkpointing.CheckpointFunction
    apply = function.apply

    @functools.wraps(generator)
    def generating(repeat: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        part = Part()
        with part.recorded():  # the caller runs the first forward where the generator yields
            yield from generator(_under_modes(kind, part.repeating(repeat)), *args, **kwargs)

    @functools.wraps(apply)
    def applying(run: Callable[..., Any], *args: Any) -> Any:
        return apply(_under_modes(kind, Part().beginning(run, learns=torch.is_grad_enabled())), *args)

    checkpointing._checkpoint_without_reentrant_generator = generating  # type: ignore[assignment]
    function.apply = applying


def _under_modes(kind: type[TorchFunctionMode], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called under the modes that are active now."""
    for mode in (mode for mode in _active() if isinstance(mode, kind)):
        function = _under(mode, function)
    return function


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
