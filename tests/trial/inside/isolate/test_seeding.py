"""Shifting the seeds a script sets (in a fork: it cannot be undone)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy
import pytest
import torch

from autoprec.trial.inside.isolate import seeding
from autoprec.trial.inside.isolate.seeding import clock_seeds, offset_seeds, reseed, seeded_by_clock


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


def test_a_later_offset_replaces_an_earlier_one() -> None:
    def work() -> bool:
        offset_seeds(3)
        three = draws()
        offset_seeds(4)
        four = draws()
        offset_seeds(3)
        return draws() == three != four and isinstance(numpy.random.mtrand._rand, numpy.random.RandomState)

    assert in_fork(work)


def test_the_time_is_not_a_seed() -> None:
    def work() -> bool:
        offset_seeds(0)
        seen, now = [], 1_764_000_000.0
        time.time = lambda: now
        for late in (0.0, 1.0):
            random.seed(time.time() + late)
            torch.manual_seed(int(time.time() + late))
            numpy.random.seed(int((time.time() + late) * 1000) % 2**32)
            seen.append([random.random(), float(torch.rand(1)), float(numpy.random.rand())])
        return seen[0] == seen[1] and set(clock_seeds) == {"random.seed", "torch.manual_seed", "numpy.random.seed"}

    assert in_fork(work)
    assert seeded_by_clock(time.time_ns())
    assert not any(seeded_by_clock(seed) for seed in (0, 1, 42, 1337, True, "time", None, 20231117))


@pytest.mark.parametrize("seed", [0, 1, 42, 1337, 31337, 1_000_003, 20_231_117, 99_999_999])
@pytest.mark.parametrize("unit", [1e3, 1e6])
def test_a_seed_that_a_person_wrote_is_never_the_time(seed: int, unit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 32 bits of the clock come by it: for ten seconds in 72 minutes seed 0 was another one."""
    for late in (-1.5, -0.5, 0.0, 0.5, 1.5):
        now = (400_000 * 2**32 if unit == 1e6 else 400 * 2**32) / unit + seed / unit + late
        monkeypatch.setattr(seeding, "time", SimpleNamespace(time=lambda now=now: now))
        assert not seeded_by_clock(seed)


@pytest.mark.parametrize("unit", [1e3, 1e6])
@pytest.mark.parametrize("late", [0.0, 1e-4, 0.1, 1.5])
def test_the_last_bits_of_the_time_are_known(unit: float, late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "time", SimpleNamespace(time=lambda: 1_764_000_000.0 + late))
    assert seeded_by_clock(int(1_764_000_000.0 * unit) % 2**32)
    assert not seeded_by_clock(2**32 + int(1_764_000_000.0 * unit) % 2**32)


def test_reseed() -> None:
    reseed(11)
    first = [float(torch.rand(1)), random.random(), float(numpy.random.rand())]
    reseed(11)
    assert first == [float(torch.rand(1)), random.random(), float(numpy.random.rand())]
