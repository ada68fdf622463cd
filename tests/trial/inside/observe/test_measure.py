"""Clocks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from autoprec.trial.inside.observe.measure import CpuClock, CudaClock, clock_for, some_heap


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_cpu_time_does_not_count_sleeping_and_credit_is_taken_off() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    clock.resume()
    time.sleep(0.05)
    clock.pause()
    clock.resume()
    busy(0.04)
    clock.credit(0.03)
    clock.pause()
    idle, worked = clock.milliseconds()
    assert idle < 20
    assert 5 <= worked < 25


def test_cuda_events_are_read_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in events: what the clock asks of CUDA, without a GPU."""
    log: list[str] = []

    class Event:
        now = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            Event.now += 1.0
            self.at = Event.now

        def synchronize(self) -> None:
            log.append("synchronize")

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    for _ in range(3):
        clock.resume()
        clock.pause()
        clock.credit(1.0)
    assert log == []
    assert clock.milliseconds() == [1.0, 1.0, 1.0]
    assert log == ["synchronize"]


def test_every_process_begins_with_a_heap_of_its_own() -> None:
    """``random.Random()`` is the same in every fork of a host, and so were the page faults of all its trials."""
    sizes = [[len(block) for block in some_heap(seed)] for seed in (1, 2, 1)]
    assert sizes[0] == sizes[2] != sizes[1]
    assert all(size < 1 << 19 for size in sizes[0])
