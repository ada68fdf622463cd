"""Clocks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from autoprec.trial.inside.observe.measure import CpuClock, CudaClock, clock_for, heap_for, own_seconds, some_heap


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


def test_what_is_left_out_is_not_of_the_step_it_happens_in() -> None:
    clock = clock_for(torch.device("cpu"))
    clock.resume()
    busy(0.01)
    with clock.left_out():
        busy(0.05)
    clock.pause()
    (worked,) = clock.milliseconds()
    assert 5 <= worked < 30


@pytest.mark.parametrize(("duel", "name"), [(False, "thread_time"), (True, "wall_time")])
def test_with_several_threads_a_step_takes_what_its_own_thread_does_and_in_a_duel_what_a_watch_says(
    duel: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    clock = clock_for(torch.device("cpu"), duel=duel)
    assert clock.name == name
    other = threading.Thread(target=busy, args=(0.06,))
    began = own_seconds(torch.device("cpu"))
    clock.resume()
    other.start()
    other.join()  # its CPU time is that of the process, not of this thread
    clock.pause()
    assert own_seconds(torch.device("cpu")) - began < 0.05
    assert (clock.milliseconds()[0] > 50) is duel


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
    clock.resume()
    with clock.left_out():
        pass
    clock.pause()
    assert log == []
    assert clock.milliseconds() == [1.0, 1.0, 1.0, 2.0]  # of three between four events
    assert log == ["synchronize"]


def test_every_process_begins_with_a_heap_of_its_own() -> None:
    """``random.Random()`` is the same in every fork of a host, and so were the page faults of all its trials."""
    sizes = [[len(block) for block in some_heap(seed)] for seed in (1, 2, 1)]
    assert sizes[0] == sizes[2] != sizes[1]
    assert all(size < 1 << 19 for size in sizes[0])


FAULTS = """
import resource, torch
from autoprec.trial.inside.observe.measure import heap_for
for timed in (True, False):
    held, counts = heap_for(torch.device("cpu"), 0, timed=timed), []
    for _ in range(12):
        torch.ones(20_000_000).mul(2)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print(bool(held), counts[-1] - counts[7])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc's allocator")
def test_what_is_not_timed_keeps_the_memory_that_it_frees() -> None:
    """Half of the time of ``autoprec check`` of a model of 124M parameters was page faults, beside a load."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    (held, timed), (kept, untimed) = (line.split() for line in done.stdout.splitlines())
    assert (held, kept) == ("True", "False")
    assert int(timed) > 50_000 > 1_000 > int(untimed), done.stdout  # once its heap has grown, it has what it needs
    assert heap_for(torch.device("cuda"), 0, timed=True) == []
