"""Emulate Hopper's limited accumulator: FP8 tensor cores keep about 14 bits while they sum.

Products of 32 values along the contraction axis are added to an accumulator that keeps 13 fraction bits, cut off, not
rounded. The error is a bias that grows with the length of the sum: 0.2 % at 2048, 0.6 % at 8192, more than the
quantisation error itself for same-sign data. DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and cuBLAS without
``use_fast_accum`` avoid it by moving partial sums into float32 every 128 values, which is ``accumulation: full``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ACCUMULATOR_BITS", "CHUNK", "limited_matmul"]

#: Values along the contraction axis that one FP8 instruction multiplies and adds at full precision.
CHUNK = 32
#: Fraction bits the accumulator keeps.
ACCUMULATOR_BITS = 13
_MASK = -(1 << (23 - ACCUMULATOR_BITS))


def limited_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``[M, K]`` by ``[K, N]`` (float32) with a limited-precision accumulator; returns float32 ``[M, N]``."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], CHUNK):
        total = total + a[:, start : start + CHUNK] @ b[start : start + CHUNK]
        total = (total.view(torch.int32) & _MASK).view(torch.float32)
    return total
