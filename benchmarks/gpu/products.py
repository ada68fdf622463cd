"""Times single GEMMs on a CUDA or ROCm device through torch, beside what ``autoprec calibrate`` times.

Operands that stay in the L2 cache between two calls look faster than the memory is: calls take turns over operand sets
that together exceed it.
"""

from __future__ import annotations

import torch

from autoprec.cost.calibrate.cuda_bench import CudaBench

#: M, K, N of the measured GEMMs: square and large, as a transformer has them, and small.
GEMM_SHAPES = ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 4096, 4096), (2048, 1024, 4096), (1024, 1024, 1024))
#: Operand sets must exceed the L2 cache this many times before one is read again.
_CACHES = 3
_MAX_SETS = 64


class ProductBench(CudaBench):
    """Measures GEMMs on the current accelerator."""

    def __init__(self, device: str = "cuda", repeats: int = 5) -> None:
        super().__init__(device, repeats)
        # NVIDIA and CDNA4 multiply e4m3fn; gfx942 wants the fnuz variant
        self.fp8 = torch.float8_e4m3fn
        if torch.version.hip and torch.cuda.get_device_properties(self.device).gcnArchName.startswith("gfx94"):
            self.fp8 = torch.float8_e4m3fnuz

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
