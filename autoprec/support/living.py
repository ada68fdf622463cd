"""The objects of a class that are alive in this process, found through the garbage collector."""

from __future__ import annotations

import gc
from typing import TypeVar

__all__ = ["living"]

T = TypeVar("T")


def living(base: type[T]) -> list[T]:
    """Return every living instance of ``base`` and its subclasses.

    A process that has torch has a million objects, so the classes are collected first and each object costs one look-up
    by identity. ``type()`` rather than ``isinstance()``: asking a lazy proxy for its class may import or warn.
    """
    classes = {id(base): base}
    found = [base]
    while found:
        new = [each for each in found.pop().__subclasses__() if id(each) not in classes]
        classes.update((id(each), each) for each in new)
        found.extend(new)
    frozen = gc.get_freeze_count() > 0  # before a fork: the collector does not list what it was told to leave alone
    if frozen:
        gc.unfreeze()
    every = gc.get_objects()
    if frozen:
        gc.freeze()
    return [each for each in every if id(type(each)) in classes]
