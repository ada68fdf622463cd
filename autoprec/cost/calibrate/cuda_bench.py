"""Measures GEMMs, casts, copies and launches of a CUDA or ROCm device through torch, for ``autoprec calibrate``.

Casts are this package's own quantisers compiled by torch, GEMMs are ``torch._scaled_mm``: what a policy applied by the
``native`` backend runs. What this torch or device cannot run raises or is None; the caller keeps the default then.

Three things would otherwise spoil the figures. Operands that stay in the L2 cache between two calls look faster than
the memory is: calls take turns over operand sets that together exceed it. Kernels shorter than their launch measure
Python: calls are queued behind a kernel that sleeps until all of them are launched. A cold device runs at low clocks:
it is warmed before the first figure, and the first figure is taken again at the end (:func:`.calibration.calibrate`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from autoprec.numerics.quantize import quantize, spec_of
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import installed_version

_RECIPES = {"fp8_tensor": "fp8_tensorwise_e4m3", "fp8_row": "fp8_rowwise"}
#: Operand sets must exceed the L2 cache this many times before one is read again.
_CACHES = 3
_MAX_SETS = 64
_CALLS = 20
#: Clock cycles slept per call that is launched behind: about 100 us at 1.7 GHz, more than a compiled call takes.
_CYCLES_PER_CALL = 170_000


class CudaBench:
    """Measures the current accelerator; None or an exception where it cannot run, and then the default rate stays."""

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

    def _sets(self, size: int) -> int:
        """Return how many operand sets of ``size`` bytes are needed to read none of them from the cache."""
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 64 << 20
        return max(1, min(_MAX_SETS, -(-_CACHES * cache // max(1, size))))

    def _time(self, runs: list[Callable[[], Any]]) -> float:
        """Return the median seconds of one call on the device; calls take turns over ``runs``."""
        calls = [runs[index % len(runs)] for index in range(_CALLS)]
        for run in (*runs, *calls[:3]):  # compiles, chooses kernels, and touches every operand set
            run()
        torch.cuda.synchronize(self.device)
        times = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(_CYCLES_PER_CALL * len(calls))  # type: ignore[no-untyped-call]
            start.record()
            for run in calls:
                run()
            end.record()
            torch.cuda.synchronize(self.device)
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
        return float(statistics.median(times))

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
        if family not in _RECIPES:
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

    def cast(self, family: str, rows: int, columns: int) -> float | None:
        """Return seconds to quantise one operand for fprop and for wgrad."""
        if family not in _RECIPES:
            return None
        recipe = BUILTIN_RECIPES[_RECIPES[family]]
        specs = dict.fromkeys(spec_of(recipe, gemm, "input", "cuda") for gemm in ("fprop", "wgrad"))
        count = self._sets(2 * rows * columns)
        sources = [torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16) for _ in range(count)]

        def both(x: torch.Tensor) -> list[torch.Tensor]:
            made = [quantize(x, spec, operand="input").codes for spec in specs]
            # a product reads each operand contiguous along the sum: the second use is a transposed copy
            return [made[0], made[-1].t().contiguous()]

        # every shape is compiled for itself: the compiler would go over to symbolic shapes at the second one, and to
        # no compilation at all, without a word, after the eighth version of one function
        torch.compiler.reset()
        compiled = torch.compile(both, dynamic=False)
        return self._time([lambda x=x: compiled(x) for x in sources])  # type: ignore[misc]

    def copy(self, size: int) -> float | None:
        """Return seconds to copy ``size`` bytes inside the device."""
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self._time([lambda: target.copy_(source)])

    def launch(self) -> float | None:
        """Return seconds of one tiny kernel after another on the device, launches queued beforehand."""
        x = torch.zeros(1, device=self.device)
        return self._time([lambda: x.add_(1.0)])

    def host(self) -> float | None:
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
        libraries = {name: installed_version(name) for name in ("torchao", "transformer_engine", "deep_gemm")}
        runtime = str(torch.version.hip or torch.version.cuda or "")
        return {"torch": torch.__version__, "runtime": runtime} | {k: v for k, v in libraries.items() if v}
