"""Clocks of a training step: CPU time or that on the wall on the CPU, CUDA events (read once, at the end) on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: What is kept on the heap before a process's first step: blocks of at most so many bytes.
_KEPT, _KEPT_BYTES = 32, 1 << 19
#: mallopt's M_MMAP_MAX, M_TRIM_THRESHOLD (-1: never) and M_TOP_PAD.
_KEEPS_FREED = ((-4, 0), (-1, -1), (-2, 64 << 20))


class StepClock(ABC):
    """Measures intervals between :meth:`resume` and :meth:`pause`; one ``pause`` ends one step."""

    name: str

    @abstractmethod
    def resume(self) -> None:
        """Start (or go on with) measuring."""

    @abstractmethod
    def pause(self) -> None:
        """End one interval."""

    def credit(self, seconds: float) -> None:  # noqa: B027 - a default: nothing to take off
        """Take this much off the running interval: work that would not have been done by this process.

        Nothing by default: host-side work does not appear between CUDA events unless the device waits for it.
        """

    @abstractmethod
    def left_out(self) -> contextlib.AbstractContextManager[None]:
        """Take what the body does, in this process or on the device, off the running interval."""

    @abstractmethod
    def milliseconds(self) -> list[float]:
        """The intervals so far, in order, in ms."""


class CpuClock(StepClock):
    """A clock of the operating system.

    With one thread it is process CPU time: other processes on a shared machine do not count. With several it is the CPU
    time of the thread that trains. That takes its share of each parallel region and does not run while it waits for the
    others, so that its time is that on the wall of a quiet machine, less what it takes to wake threads. A duel counts
    that as well, as its steps do at the user's: on the wall, where other work disturbs all contenders alike.
    """

    def __init__(self, name: str = "cpu_time", now: Callable[[], float] = time.process_time) -> None:
        self.name, self._now = name, now
        self._start = now()
        self._spans: list[float] = []

    def resume(self) -> None:
        self._start = self._now()

    def pause(self) -> None:
        self._spans.append(max(self._now() - self._start, 0.0))

    def credit(self, seconds: float) -> None:
        self._start += seconds

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self._start += self._now() - began

    def milliseconds(self) -> list[float]:
        return [span * 1e3 for span in self._spans]


class CudaClock(StepClock):
    """CUDA events around each step; nothing is synchronised until the figures are read."""

    name = "cuda_events"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []
        self._begin: Any = None
        self._left_out: list[tuple[int, Any, Any]] = []  # of which interval

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def resume(self) -> None:
        self._begin = self._event()

    def pause(self) -> None:
        self._pairs.append((self._begin, self._event()))

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        began = self._event()
        try:
            yield
        finally:
            self._left_out.append((len(self._pairs), began, self._event()))

    def milliseconds(self) -> list[float]:
        if self._pairs:
            self._pairs[-1][1].synchronize()
        found = [float(begin.elapsed_time(end)) for begin, end in self._pairs]
        for index, begin, end in self._left_out:
            if index < len(found):
                found[index] -= float(begin.elapsed_time(end))
        return found


def clock_for(device: torch.device, *, duel: bool = False) -> StepClock:
    """Return the clock of the device the model trains on, for contenders of a duel or for a trial by itself."""
    if device.type == "cuda":
        return CudaClock(device)
    if not _several_threads(device):
        return CpuClock()
    return CpuClock("wall_time", time.perf_counter) if duel else CpuClock("thread_time", time.thread_time)


def own_seconds(device: torch.device) -> float:
    """Return the CPU seconds that this process has had; where kernels have several threads, the one that trains."""
    return time.thread_time() if _several_threads(device) else time.process_time()


def _several_threads(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() > 1


def heap_for(device: torch.device, seed: float, *, timed: bool) -> list[bytearray]:
    """Prepare the heap of this process; on a CPU alone, where a step's memory is of it.

    Args:
        device: where the model trains.
        seed: of :func:`some_heap`.
        timed: steps are timed: memory is asked for and given back as in the user's own process. Else what is freed is
            kept (:func:`keep_freed`).

    Returns:
        What has to be held as long as steps are timed.
    """
    if device.type != "cpu":
        return []
    if timed:
        return some_heap(seed)
    keep_freed()
    return []


def keep_freed() -> None:
    """Let this process keep the memory that it frees, where its C library is glibc.

    Each tensor of more than 32 MiB is else mapped anew, and what lies at the end of the heap is given back. Where a
    step of a model of 124M parameters is played again and again, that was half of the time.
    """
    with contextlib.suppress(AttributeError, OSError):  # macOS, musl
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _KEEPS_FREED:
            mallopt(parameter, value)


def some_heap(seed: float) -> list[bytearray]:
    """Return blocks that lie at random on the heap of this process, for as long as they are held.

    Forks of one process have its heap, and with it the same page faults in each step: their times agree within 1 %,
    and differ by 9 % (ConvNeXt) from those of forks of another process. So every one begins with a heap of its own.

    Args:
        seed: seed of their random sizes.
    """
    draw = random.Random(seed)
    sizes = [draw.randrange(_KEPT_BYTES) for _ in range(2 * _KEPT)]
    return [bytearray(size) for size in sizes][::2]  # with holes between them
