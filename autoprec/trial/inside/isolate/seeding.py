"""The seeds a script sets: shifted, so that one host stands for another paired seed, and taken from no clock."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

#: Who was given the time as a seed in this process, by the name of the function.
clock_seeds: dict[str, None] = {}
#: What such a seed is replaced by: the time is another one in every trial.
_FIXED_SEED = 20_231_117
#: How far from now, in seconds, a number may be and still be taken for the time.
_NEAR_S = 5.0
#: The same of its last 32 bits, and the least that these are taken for: they begin anew every 72 minutes, and come by
#: what people write (0, 1234, a date). A clock that is not recognised shows as noise, which is told.
_NEAR_BITS_S, _LEAST_BITS = 2.0, 10**8


def reseed(seed: int) -> None:
    """Seed Python, torch (every device) and, where it is loaded, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def seeded_by_clock(seed: Any) -> bool:
    """Say whether a seed is the time of now, in seconds, milli-, micro- or nanoseconds, or its last 32 bits."""
    if not isinstance(seed, (int, float)) or isinstance(seed, bool):
        return False
    now = time.time()
    if any(abs(seed - now * unit) < _NEAR_S * unit for unit in (1, 1e3, 1e6, 1e9)):
        return True
    near = (abs(now * unit % 2**32 - seed) < _NEAR_BITS_S * unit for unit in (1e3, 1e6))
    return _LEAST_BITS <= seed < 2**32 and any(near)


class _Shift:
    """The offset of this process, and which generators the script has seeded itself."""

    def __init__(self) -> None:
        self.offset = 0
        self.installed = False
        self.shaped = False
        self.seeded: set[str] = set()

    def __call__(self, seed: Any, who: str) -> Any:
        if seeded_by_clock(seed):
            clock_seeds[who] = None
            seed = _FIXED_SEED
        return seed + self.offset if isinstance(seed, int) and not isinstance(seed, bool) else seed


_shift = _Shift()


def _wrap(original: Callable[..., Any], name: str, who: str, at: int = 0) -> Callable[..., Any]:
    """Wrap a function whose argument ``at`` (or keyword ``name``) is a seed."""

    def shifted(*args: Any, **kwargs: Any) -> Any:
        _shift.seeded.add(who)
        if len(args) > at:
            args = (*args[:at], _shift(args[at], who), *args[at + 1 :])
        elif name in kwargs:
            kwargs[name] = _shift(kwargs[name], who)
        return original(*args, **kwargs)

    shifted.__name__ = getattr(original, "__name__", name)
    return shifted


def _stand_in(base: Any, module: str, method: str) -> Any:
    """Return a class like ``base`` whose ``method`` is given a seed; generators made before are instances of it."""

    class Shaped(type(base)):  # type: ignore[misc] # torch.Generator has a metaclass of its own
        def __instancecheck__(cls, instance: object) -> bool:  # numpy's own global generator is one too
            return isinstance(instance, base)

    seeded = _wrap(getattr(base, method), "seed", f"{module}.{base.__name__}", at=1)
    return Shaped(base.__name__, (base,), {method: seeded, "__module__": module})


def offset_seeds(offset: int) -> None:
    """Add ``offset`` to every seed the script sets from here on, and to those it never sets.

    Reached: ``random.seed``, ``torch.manual_seed``, ``torch.cuda.manual_seed`` and ``_all``,
    ``torch.Generator().manual_seed``, ``numpy.random.seed``, ``default_rng`` and ``RandomState``. A seed taken from the
    clock is replaced by a fixed one and named in :data:`clock_seeds`; ``torch.seed()`` draws from ``os.urandom``. Call
    it before the script's own seeding; a later call (in a fork of the zygote) exchanges the offset.
    """
    change, _shift.offset = offset - _shift.offset, offset
    if not _shift.installed:
        _shift.installed = True
        _install()
    if not change:
        return
    if not _shift.shaped:
        _shift.shaped = True
        torch.Generator = _stand_in(torch.Generator, "torch", "manual_seed")  # type: ignore[misc]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.RandomState = _stand_in(numpy.random.RandomState, "numpy.random", "__init__")
    _shift_unseeded(change)


def _shift_unseeded(change: int) -> None:
    """Other numbers for the module-level generators that the script has not seeded (yet)."""
    numpy = sys.modules.get("numpy")
    if "torch.manual_seed" not in _shift.seeded:
        _originals["torch.manual_seed"](torch.initial_seed() + change)
    if "random.seed" not in _shift.seeded:
        _originals["random.seed"](_FIXED_SEED + _shift.offset)
    if numpy is not None and "numpy.random.seed" not in _shift.seeded:
        _originals["numpy.random.seed"](_FIXED_SEED + _shift.offset)


_originals: dict[str, Callable[..., Any]] = {}


def _install() -> None:
    """Put the shift under every function that takes a seed."""

    def wrap(owner: Any, attribute: str, name: str, who: str) -> Callable[..., Any]:
        _originals[who] = getattr(owner, attribute)
        wrapped = _wrap(_originals[who], name, who)
        setattr(owner, attribute, wrapped)
        return wrapped

    wrap(random, "seed", "a", "random.seed")
    torch.random.manual_seed = wrap(torch, "manual_seed", "seed", "torch.manual_seed")
    for name in ("manual_seed", "manual_seed_all"):
        wrap(torch.cuda, name, "seed", f"torch.cuda.{name}")

    def fresh_seed() -> int:
        seed = random.SystemRandom().getrandbits(63)
        _originals["torch.manual_seed"](seed)
        return seed

    torch.seed = torch.random.seed = fresh_seed
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        wrap(numpy.random, "seed", "seed", "numpy.random.seed")
        wrap(numpy.random, "default_rng", "seed", "numpy.random.default_rng")
