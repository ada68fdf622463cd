"""Times single GEMMs on a CUDA or ROCm device through torch.

Kernels shorter than their launch would measure Python: calls are queued behind a kernel that sleeps until all of them
are launched. A cold device runs at low clocks: it is warmed before the first figure.

Operands that stay in the L2 cache between two calls look faster than the memory is: calls take turns over operand sets
that together exceed it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: M, K, N of the measured GEMMs: square and large, as a transformer has them, and small.
GEMM_SHAPES = ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 4096, 4096), (2048, 1024, 4096), (1024, 1024, 1024))
#: Operand sets must exceed the L2 cache this many times before one is read again.
_CACHES = 3
_MAX_SETS = 64


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


class ProductBench:
    """Measures GEMMs on the current accelerator."""

    def __init__(self, device: str = "cuda", repeats: int = 5) -> None:
        self.device, self.repeats = torch.device(device), repeats
        # NVIDIA and CDNA4 multiply e4m3fn; gfx942 wants the fnuz variant
        self.fp8 = torch.float8_e4m3fn
        if torch.version.hip and torch.cuda.get_device_properties(self.device).gcnArchName.startswith("gfx94"):
            self.fp8 = torch.float8_e4m3fnuz

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

    def _sets(self, size: int) -> int:
        """Return how many operand sets of ``size`` bytes are needed to read none of them from the cache."""
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 64 << 20
        return max(1, min(_MAX_SETS, -(-_CACHES * cache // max(1, size))))

    def gemm(self, family: str, m: int, k: int, n: int, *, fast: bool = False) -> float | None:
        """Return seconds of one GEMM; scaled ones through ``torch._scaled_mm``, which may accumulate ``fast``."""
        if family in ("fp32", "bf16"):
            dtype = torch.float32 if family == "fp32" else torch.bfloat16
            width = 4 if family == "fp32" else 2
            pairs = [
                tuple(torch.randn(*shape, device=self.device, dtype=dtype) for shape in ((m, k), (k, n)))
                for _ in range(self._sets(width * (m * k + k * n)))
            ]
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")  # else the fp32 figure is TF32's
            try:
                return self._time([lambda a=a, b=b: a @ b for a, b in pairs])  # type: ignore[misc]
            finally:
                torch.set_float32_matmul_precision(before)
        if family not in ("fp8_tensor", "fp8_row"):
            return None
        rows = family == "fp8_row"
        scale_a = torch.ones((m, 1) if rows else (), device=self.device, dtype=torch.float32)
        scale_b = torch.ones((1, n) if rows else (), device=self.device, dtype=torch.float32)

        def operands() -> tuple[torch.Tensor, torch.Tensor]:
            left, right = (
                torch.randn(*shape, device=self.device, dtype=torch.bfloat16).to(self.fp8) for shape in ((m, k), (n, k))
            )
            return left, right.t()  # row-major times column-major: the only layout Hopper multiplies

        def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(
                left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        pairs = [operands() for _ in range(self._sets(m * k + k * n))]
        return self._time([lambda a=a, b=b: product(a, b) for a, b in pairs])  # type: ignore[misc]
