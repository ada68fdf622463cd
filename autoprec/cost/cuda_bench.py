"""Measures GEMMs, casts, copies and launches of a CUDA or ROCm device through torch, for ``autoprec calibrate``.

Casts are this package's own quantisers compiled by torch, GEMMs are ``torch._scaled_mm``: what a policy applied by the
``native`` backend runs. What this torch or device cannot run is left out, and the default rate stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from autoprec.numerics.quantize import quantize, spec_of
from autoprec.recipes import BUILTIN_RECIPES

__all__ = ["CudaBench"]

_RECIPES = {"fp8_tensor": "fp8_tensorwise_e4m3", "fp8_row": "fp8_rowwise"}


class CudaBench:
    """Measures the current accelerator; see :class:`autoprec.cost.calibration.Bench`."""

    def __init__(self, device: str = "cuda", repeats: int = 5) -> None:
        self.device, self.repeats = torch.device(device), repeats
        # NVIDIA and CDNA2+ multiply e4m3fn; gfx942 wants the fnuz variant
        self.fp8 = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn

    def _time(self, run: Callable[[], Any]) -> float | None:
        """Return the median seconds of one call by device events, or None when it cannot run."""
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize(self.device)
            times = []
            for _ in range(self.repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                for _ in range(10):
                    run()
                end.record()
                torch.cuda.synchronize(self.device)
                times.append(start.elapsed_time(end) / 10e3)
        except (RuntimeError, NotImplementedError, ValueError):  # unsupported here, or out of memory
            return None
        return float(statistics.median(times))

    def gemm(self, family: str, m: int, k: int, n: int) -> float | None:
        """Return seconds of one GEMM; tensor and row scales through ``torch._scaled_mm``."""
        if family in ("fp32", "bf16"):
            dtype = torch.float32 if family == "fp32" else torch.bfloat16
            a, b = (torch.randn(*shape, device=self.device, dtype=dtype) for shape in ((m, k), (k, n)))
            return self._time(lambda: a @ b)
        if family not in _RECIPES:
            return None
        left = torch.randn(m, k, device=self.device).to(self.fp8)
        right = torch.randn(n, k, device=self.device).to(self.fp8).t()
        rows = family == "fp8_row"
        scale_a = torch.ones((m, 1) if rows else (), device=self.device)
        scale_b = torch.ones((1, n) if rows else (), device=self.device)
        return self._time(
            lambda: torch._scaled_mm(left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
        )

    def cast(self, family: str, rows: int, columns: int) -> float | None:
        """Return seconds to quantise one operand for fprop and for wgrad."""
        if family not in _RECIPES:
            return None
        recipe = BUILTIN_RECIPES[_RECIPES[family]]
        x = torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16)
        specs = [spec_of(recipe, gemm, "input") for gemm in ("fprop", "wgrad")]

        def both(x: torch.Tensor) -> list[torch.Tensor]:
            made = [quantize(x, spec, operand="input").codes for spec in dict.fromkeys(specs)]
            return [*made, made[0].t().contiguous()] if len(made) == 1 else made

        compiled = torch.compile(both)
        return self._time(lambda: compiled(x))

    def copy(self, size: int) -> float | None:
        """Return seconds to copy ``size`` bytes inside the device."""
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self._time(lambda: target.copy_(source))

    def launch(self) -> float | None:
        """Return seconds between two tiny kernels."""
        x = torch.zeros(1, device=self.device)
        found = self._time(lambda: [x.add_(1.0) for _ in range(100)])
        return None if found is None else found / 100

    def versions(self) -> dict[str, str]:
        """Return torch, CUDA or ROCm, and driver-visible capability."""
        runtime = torch.version.hip or torch.version.cuda or ""
        return {"torch": torch.__version__, "runtime": str(runtime)}
