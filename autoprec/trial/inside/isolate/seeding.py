"""Random streams: reseed a trial, and shift a script's own seeding calls so that a host stands for another seed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["offset_seeds", "reseed"]


def reseed(seed: int) -> None:
    """Seed Python, torch (every device) and, where it is loaded, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _shift(seed: Any, offset: int) -> Any:
    return seed + offset if isinstance(seed, int) and not isinstance(seed, bool) else seed


def _wrap_first(original: Callable[..., Any], offset: int, name: str) -> Callable[..., Any]:
    """Wrap a function whose first argument (or keyword ``name``) is a seed."""

    def shifted(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_shift(args[0], offset), *args[1:])
        elif name in kwargs:
            kwargs[name] = _shift(kwargs[name], offset)
        return original(*args, **kwargs)

    shifted.__name__ = getattr(original, "__name__", name)
    return shifted


def _generator_class(base: type, offset: int) -> type:
    class Shaped(type(base)):  # type: ignore[misc] # torch.Generator has a metaclass of its own
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    def manual_seed(self: Any, seed: int) -> Any:
        return base.manual_seed(self, _shift(seed, offset))  # type: ignore[attr-defined]

    return Shaped("Generator", (base,), {"manual_seed": manual_seed, "__module__": "torch"})


def _random_state_class(base: type, offset: int) -> type:
    def __init__(self: Any, seed: Any = None) -> None:  # noqa: N807
        base.__init__(self, _shift(seed, offset))  # type: ignore[misc]

    return type("RandomState", (base,), {"__init__": __init__, "__module__": "numpy.random"})


def offset_seeds(offset: int) -> None:
    """Add ``offset`` to every seed the script sets from here on, and to the default torch seed it never sets.

    Reached: ``random.seed``, ``random.Random``'s module functions, ``torch.manual_seed``, ``torch.cuda.manual_seed``
    and ``_all``, ``torch.Generator().manual_seed``, ``numpy.random.seed``, ``default_rng`` and ``RandomState``. Call
    it before the script's own seeding; it is meant for the life of a process and cannot be undone.
    """
    if not offset:
        return
    torch.manual_seed(torch.initial_seed() + offset)
    random.seed = _wrap_first(random.seed, offset, "a")
    shifted = _wrap_first(torch.manual_seed, offset, "seed")
    torch.manual_seed = torch.random.manual_seed = shifted
    torch.Generator = _generator_class(torch.Generator, offset)  # type: ignore[assignment, misc]
    for name in ("manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, _wrap_first(getattr(torch.cuda, name), offset, "seed"))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed = _wrap_first(numpy.random.seed, offset, "seed")
        numpy.random.default_rng = _wrap_first(numpy.random.default_rng, offset, "seed")
        numpy.random.RandomState = _random_state_class(numpy.random.RandomState, offset)
