"""Activation checkpointing and what a layer remembers: a repeated forward uses the scales of the one it repeats.

The backward pass may come after delayed scales have moved on (a second optimizer has stepped, the next micro-batches
are under way), and a layer may run several times in what is repeated. So each checkpointed part writes down the scales
of its first forward, by layer and in order, and reads them each time it is repeated; Transformer Engine keeps a queue
per layer for that, which needs all forwards to be repeated, in their order. What is repeated by other means than
``torch.utils.checkpoint`` takes the scale of now, which is the same one until an optimizer steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Used:
    """A delayed scale that a forward used, and whether it noted the amax as well."""

    scale: Tensor
    noted: bool


@dataclass(slots=True, eq=False)
class Part:
    """One call of a checkpointed part: the scales of its first forward, by layer and operand, in order."""

    used: dict[Hashable, list[Used]] = field(default_factory=dict)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write down what is used meanwhile."""
        with _active(_Run(self, None)):
            yield

    def repeating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is called to repeat this part."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with _active(_Run(self, {})):
                return function(*args, **kwargs)

        return called

    def beginning(self, function: Callable[..., Any], *, learns: bool) -> Callable[..., Any]:
        """Return a function whose first call is what later ones repeat.

        ``learns``: the first one has gradients off and is a training forward nevertheless (reentrant checkpointing).
        """
        learns = learns or learning()
        begun = False

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            run, begun = _Run(self, {}) if begun else _Run(self, None, learns), True
            with _active(run):
                return function(*args, **kwargs)

        return called


@dataclass(slots=True, eq=False)
class _Run:
    """One run of a part: ``read`` counts, by layer and operand, what a repetition has read; None in its first one."""

    part: Part
    read: dict[Hashable, int] | None
    learns: bool = False


class _Threads(threading.local):
    """The runs of now, outermost first: autograd runs backward passes in a thread per device."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []


_THREADS = _Threads()


@contextmanager
def _active(run: _Run) -> Iterator[None]:
    runs = _THREADS.runs
    runs.append(run)
    try:
        yield
    finally:
        runs.remove(run)


def learning() -> bool:
    """Say whether a forward without gradients is one that a backward pass will repeat with them."""
    return any(run.learns for run in _THREADS.runs)


def repeated(key: Hashable) -> Used | None:
    """Return what the forward that is being repeated used at this place; None where nothing is repeated."""
    for run in reversed(_THREADS.runs):
        if run.read is not None:
            index = run.read[key] = run.read.get(key, -1) + 1
            used = run.part.used.get(key, ())
            return used[index] if index < len(used) else None
    return None


def remember(key: Hashable, used: Used) -> None:
    """Write down what a forward uses, for all checkpointed parts in which it runs first."""
    for run in _THREADS.runs:
        if run.read is None:
            run.part.used.setdefault(key, []).append(used)
