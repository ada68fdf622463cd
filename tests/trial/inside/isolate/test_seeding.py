"""Shifting the seeds a script sets (in a fork: it cannot be undone)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy
import torch

from autoprec.trial.inside.isolate.seeding import offset_seeds, reseed


def in_fork(work: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def draws() -> list[float]:
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    return [
        float(torch.rand(1)),
        float(torch.rand(1, generator=generator)),
        random.random(),
        float(numpy.random.rand()),
        float(numpy.random.default_rng(5).random()),
        float(numpy.random.RandomState(5).rand()),
    ]


def test_every_stream_is_shifted_and_zero_changes_nothing() -> None:
    plain = draws()

    def shifted() -> bool:
        offset_seeds(3)
        mine = draws()
        return all(a != b for a, b in zip(mine, plain, strict=True)) and isinstance(
            torch.default_generator, torch.Generator
        )

    def unshifted() -> bool:
        offset_seeds(0)
        return draws() == plain

    assert in_fork(shifted)
    assert in_fork(unshifted)
    assert draws() == plain


def test_reseed() -> None:
    reseed(11)
    first = [float(torch.rand(1)), random.random(), float(numpy.random.rand())]
    reseed(11)
    assert first == [float(torch.rand(1)), random.random(), float(numpy.random.rand())]
