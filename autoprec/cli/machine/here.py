"""What this machine gains from low precision, in one sentence: ``doctor`` prints it, ``demo`` acts on it.

A CPU gains from bf16 only where it has bf16 instructions (AMX, AVX512_BF16; on ARM, BF16 of Armv8.6). Elsewhere
PyTorch's bf16 GEMMs convert every operand, one element after the other, and are many times slower than fp32. INT8 gains
with and without integer instructions (VNNI), FP8 never: there it is emulated. So two timed GEMMs answer the question,
and the names of units only explain it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoprec.precision.hardware import cpu_bf16_units, cpu_int8_units

if TYPE_CHECKING:
    import torch

#: A GEMM of this size takes 10 ms in fp32, and half a second where bf16 is emulated by the library.
_SIZE = 512
#: GEMMs that save less than this share of the fp32 time gain nothing once operands are cast.
_WORTH = 0.8


@dataclass(frozen=True, slots=True)
class Here:
    """What training on this machine could gain: ratios are the time of a GEMM over that of an fp32 one.

    ``gpus`` counts usable GPUs; where there are any, the CPU is not asked (ratios are 0). ``units`` multiply bf16,
    ``int8_units`` int8. ``gpu_memory``: bytes of the first GPU.
    """

    gpus: int
    units: tuple[str, ...]
    bf16_ratio: float
    int8_units: tuple[str, ...] = ()
    int8_ratio: float = 1.0
    gpu_memory: int = 0

    @property
    def gains(self) -> bool:
        """True when a measured search has something to find."""
        return self.gpus > 0 or min(self.bf16_ratio, self.int8_ratio) < _WORTH

    @property
    def sentence(self) -> str:
        """What is fast or slow here, and what that means for a search."""
        if self.gpus:
            return f"{self.gpus} usable GPU{'s' if self.gpus > 1 else ''}: `autoprec search` measures there"
        known = {"bf16": (self.units, self.bf16_ratio), "int8": (self.int8_units, self.int8_ratio)}
        parts = [
            f"{form} GEMMs {_compared(ratio)} ({', '.join(units) if units else f'no {form} instructions'})"
            for form, (units, ratio) in known.items()
        ]
        means = "so `autoprec search` has something to find on it"
        if not self.gains:
            means = "so low precision gains nothing on it; a GPU can be rehearsed for"
        return f"on this CPU {' and '.join(parts)}, {means}"


def _compared(ratio: float) -> str:
    return f"are {1 / ratio:.1f} times as fast as fp32" if ratio < 1 else f"take {ratio:.1f} times as long as fp32"


def look_here() -> Here:
    """Time one GEMM in fp32, in bf16 and in int8 on one thread, unless there is a GPU; under a second."""
    import torch

    if torch.cuda.is_available():
        return Here(torch.cuda.device_count(), (), 0.0, (), 0.0, torch.cuda.get_device_properties(0).total_memory)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ones = torch.ones(_SIZE, _SIZE)
        fp32, bf16 = (_gemm_s(torch.mm, ones.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
        int8 = _gemm_s(torch._int_mm, ones.to(torch.int8))
    finally:
        torch.set_num_threads(threads)
    return Here(0, cpu_bf16_units() or (), bf16 / fp32, cpu_int8_units() or (), int8 / fp32)


def _gemm_s(product: Callable[..., torch.Tensor], matrix: torch.Tensor) -> float:
    """Return the CPU seconds of the fastest of three products (the first one is warm-up)."""
    found = []
    for _ in range(4):
        began = time.process_time()
        product(matrix, matrix)
        found.append(time.process_time() - began)
    return max(min(found[1:]), 1e-9)


def cores() -> int:
    """Return the CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
