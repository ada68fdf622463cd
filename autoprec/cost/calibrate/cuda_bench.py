"""Measures a copy and launches of a CUDA or ROCm device through torch, for ``autoprec calibrate``.

Kernels shorter than their launch would measure Python: calls are queued behind a kernel that sleeps until all of them
are launched. A cold device runs at low clocks: it is warmed before the first figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoprec.support.optional import installed_version

_CALLS = 20
#: Clock cycles slept per call that is launched behind: about 100 us at 1.7 GHz, more than a compiled call takes.
_CYCLES_PER_CALL = 170_000


def queued(calls: Sequence[Callable[[], Any]], cycles: int, device: torch.device) -> tuple[float, float]:
    """Return seconds of a call on the device alone and on the host alone: launched while the device sleeps ``cycles``.

    A call that waits for the device itself keeps its launches in both.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    start.record()
    began = time.perf_counter()
    for call in calls:
        call()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / len(calls), host / len(calls)


class CudaBench:
    """Measures the current accelerator; what it cannot run raises, and then the default rate stays."""

    def __init__(self, device: str = "cuda", repeats: int = 5) -> None:
        self.device, self.repeats = torch.device(device), repeats

    def warm(self, seconds: float = 1.0, side: int = 4096) -> None:
        """Multiply ``[side, side]`` bf16 matrices until the clocks have risen."""
        x = torch.randn(side, side, device=self.device, dtype=torch.bfloat16)
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            for _ in range(20):
                x @ x
            torch.cuda.synchronize(self.device)

    def _time(self, runs: list[Callable[[], Any]]) -> float:
        """Return the median seconds of one call on the device; calls take turns over ``runs``."""
        calls = [runs[index % len(runs)] for index in range(_CALLS)]
        for run in (*runs, *calls[:3]):  # compiles, chooses kernels, and touches every operand set
            run()
        torch.cuda.synchronize(self.device)
        cycles = _CYCLES_PER_CALL * len(calls)
        return float(statistics.median(queued(calls, cycles, self.device)[0] for _ in range(self.repeats)))

    def copy(self, size: int) -> float:
        """Return seconds to copy ``size`` bytes inside the device."""
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self._time([lambda: target.copy_(source)])

    def launch(self) -> float:
        """Return seconds of one tiny kernel after another on the device, launches queued beforehand."""
        x = torch.zeros(1, device=self.device)
        return self._time([lambda: x.add_(1.0)])

    def host(self) -> float:
        """Return seconds of CPU time to launch one eager operator."""
        x = torch.zeros(1, device=self.device)
        count = 500
        for _ in range(20):
            x.add_(1.0)
        times = []
        for _ in range(self.repeats):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            for _ in range(count):
                x.add_(1.0)
            times.append((time.perf_counter() - start) / count)
        return float(statistics.median(times))

    def versions(self) -> dict[str, str]:
        """Return torch, CUDA or ROCm, and the libraries that are backends where they are installed."""
        libraries = {name: installed_version(name) for name in ("torchao", "transformer_engine")}
        runtime = str(torch.version.hip or torch.version.cuda or "")
        return {"torch": torch.__version__, "runtime": runtime} | {k: v for k, v in libraries.items() if v}
