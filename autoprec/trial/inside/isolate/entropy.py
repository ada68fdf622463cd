"""Randomness that repeats: every trial of one seed draws the same numbers, also from sources a script never seeds.

A trial is compared with the reference draw by draw, so it must start from the same random state. Two things stand in
the way. CPython gives the child of every ``os.fork`` a new seed for the module-level generator of ``random``
(``os.register_at_fork`` in Lib/random.py): :func:`fork` puts the state back. And what is seeded by the operating system
(``random.Random()``, ``numpy.random.default_rng()``, ``uuid.uuid4``, ``secrets``) differs from process to process:
:func:`repeat_entropy` replaces ``os.urandom`` by a stream of SHAKE-256 with a counter, which a fork inherits as it
stands. Nothing but the standard library is used here: it runs before the script's first line.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from typing import Any

_real_urandom = os.urandom
_real_seed = random.Random.seed


class _Stream:
    """Bytes that depend on the key and on how often they were asked for."""

    def __init__(self) -> None:
        self.key = 0
        self._count = 0

    def __call__(self, size: int) -> bytes:
        self._count += 1
        return hashlib.shake_256(f"autoprec {self.key} {self._count}".encode()).digest(size)


_stream = _Stream()


class _NameRandom(random.Random):
    """Names of temporary files stay random: trials that run side by side must not meet in one directory."""

    def seed(self, a: Any = None, version: int = 2) -> None:
        _real_seed(self, int.from_bytes(_real_urandom(16), "big") if a is None else a, version)


def fork() -> int:
    """``os.fork``, after which the child goes on with the random state of its parent."""
    state = random.getstate()
    pid = os.fork()
    if pid == 0:
        random.setstate(state)
    return pid


def repeat_entropy(key: int) -> None:
    """Let the operating system's entropy, as Python sees it, be a stream that depends on ``key`` alone.

    The first call also seeds ``random``, which had been seeded at import. For the life of the process.
    """
    _stream.key = key
    if os.urandom is _stream:
        return
    os.urandom = random._urandom = _stream  # type: ignore[attr-defined]

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        _real_seed(self, int.from_bytes(_stream(32), "big") if a is None else a, version)

    random.Random.seed = seed  # type: ignore[method-assign]
    random.seed = random._inst.seed
    random.seed()
    tempfile._Random = _NameRandom  # type: ignore[attr-defined]
