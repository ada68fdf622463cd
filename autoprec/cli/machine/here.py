"""What this machine gains from low precision, in one sentence: ``doctor`` prints it, ``demo`` acts on it.

A CPU gains from bf16 only where it has bf16 instructions (AMX, AVX512_BF16; on ARM, BF16 of Armv8.6). Elsewhere
PyTorch's bf16 GEMMs convert every operand, one element after the other, and are many times slower than fp32. FP8 never
gains on a CPU: there it is emulated. So one timed GEMM answers the question, and the names of units only explain it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoprec.precision.hardware import cpu_bf16_units

if TYPE_CHECKING:
    import torch

#: A GEMM of this size takes 10 ms in fp32, and half a second where bf16 is emulated by the library.
_SIZE = 512
#: bf16 GEMMs that save less than this share of the fp32 time gain nothing once operands are cast.
_WORTH = 0.8


@dataclass(frozen=True, slots=True)
class Here:
    """What training on this machine could gain: ``bf16_ratio`` is the time of a bf16 GEMM over that of an fp32 one.

    ``gpus`` counts usable GPUs; where there are any, the CPU is not asked (``bf16_ratio`` is 0).
    """

    gpus: int
    units: tuple[str, ...]
    bf16_ratio: float

    @property
    def gains(self) -> bool:
        """True when a measured search has something to find."""
        return self.gpus > 0 or self.bf16_ratio < _WORTH

    @property
    def sentence(self) -> str:
        """What is fast or slow here, and what that means for a search."""
        if self.gpus:
            return f"{self.gpus} usable GPU{'s' if self.gpus > 1 else ''}: `autoprec search` measures there"
        having = f"bf16 instructions ({', '.join(self.units)})" if self.units else "no bf16 instructions"
        if self.gains:
            times = f"bf16 GEMMs are {1 / self.bf16_ratio:.1f} times as fast as fp32 here"
            return f"this CPU has {having}: {times}, so `autoprec search` has something to find on it"
        slower = f"bf16 GEMMs take {self.bf16_ratio:.1f} times as long as fp32 here"
        return f"this CPU has {having}: {slower}, so low precision gains nothing on it; a GPU can be rehearsed for"


def look_here() -> Here:
    """Time one GEMM in fp32 and in bf16 on one thread, unless there is a GPU; under a second."""
    import torch

    if torch.cuda.is_available():
        return Here(torch.cuda.device_count(), (), 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [_gemm_s(torch.ones(_SIZE, _SIZE, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    finally:
        torch.set_num_threads(threads)
    return Here(0, cpu_bf16_units() or (), times[0] / times[1])


def _gemm_s(matrix: torch.Tensor) -> float:
    """Return the CPU seconds of the fastest of three products (the first one is warm-up)."""
    found = []
    for _ in range(4):
        began = time.process_time()
        matrix @ matrix
        found.append(time.process_time() - began)
    return max(min(found[1:]), 1e-9)


def cores() -> int:
    """Return the CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
