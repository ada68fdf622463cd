"""The garbage collector asked for the objects of a class that are alive, or told to wait while many are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
#: For so many classes asking what refers to them is quicker than looking at every object.
_FEW = 32


def living(base: type[T]) -> list[T]:
    """Return every living instance of ``base`` and its subclasses.

    An instance refers to its class, so for a few classes the collector is asked for what refers to them. That only
    reads. A list of all objects (torch alone has 300,000) writes a reference count into each, and so copies 80 MB in
    every process that was forked; it is made where there are more classes than the collector can compare with.
    ``type()`` rather than ``isinstance()``: asking a lazy proxy for its class may import or warn.
    """
    classes = {id(base): base}
    found = [base]
    while found:
        new = [each for each in found.pop().__subclasses__() if id(each) not in classes]
        classes.update((id(each), each) for each in new)
        found.extend(new)
    every = referrers(classes.values()) if len(classes) <= _FEW else _thawed(gc.get_objects)
    return [each for each in every if id(type(each)) in classes]


@contextlib.contextmanager
def uncollected(within: int = 0) -> Iterator[None]:
    """Keep the collector from walking, over and over, a million objects that are made here and all stay.

    Args:
        within: it does run when so many more objects were made than went: a script's own code runs as well, and may
            leave cycles that hold tensors; 0 for never.
    """
    before = gc.get_threshold()
    gc.set_threshold(within, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def referrers(objects: Iterable[Any]) -> list[Any]:
    """Return everything that refers to any of these objects (instances, dictionaries, tuples, frames, ...)."""
    return _thawed(gc.get_referrers, *objects)


def _thawed(ask: Callable[..., list[Any]], *objects: Any) -> list[Any]:
    """Ask the collector also about what it was told to leave alone, as everything is before a fork."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    found = ask(*objects)
    if frozen:
        gc.freeze()
    return found
