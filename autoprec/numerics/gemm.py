"""Multiply two quantised operands: the emulated GEMM.

Values of E4M3, E5M2, MXFP8 and NVFP4 have at most seven significant bits, so bfloat16 holds them exactly and a
bfloat16 GEMM, which accumulates in float32, computes what an 8-bit GEMM computes; only its output is rounded to
bfloat16, as ``torch._scaled_mm(out_dtype=bfloat16)`` rounds it. That makes the emulation faster than float32 on CPUs
with bfloat16 instructions; elsewhere the same values are multiplied in float32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from autoprec.numerics.operand import QuantizedOperand
from autoprec.numerics.quantize import operand_values

__all__ = ["contract", "emulated_multiply", "fast_bf16_gemm"]


@lru_cache(maxsize=8)
def fast_bf16_gemm(device_type: str) -> bool:
    """Say whether bfloat16 GEMMs are faster than float32 ones on a device; asked of the hardware, never timed.

    A timed probe could answer differently in two processes and break the pairing of trials.
    """
    if device_type == "cpu":
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
    return True


def contract(a: Tensor, a_axis: int, b: Tensor, b_axis: int) -> Tensor:
    """Sum the product of two matrices over ``a``'s axis ``a_axis`` and ``b``'s axis ``b_axis``."""
    return torch.mm(a if a_axis == 1 else a.t(), b if b_axis == 0 else b.t())


def _wide(a: QuantizedOperand, b: QuantizedOperand, device_type: str) -> torch.dtype:
    formats = {a.spec.format, b.spec.format}
    if formats & {"fp32", "tf32"}:
        return torch.float32
    if "fp16" in formats:
        return torch.float32 if device_type == "cpu" else torch.float16
    inexact = any(s.scheme == "block" and s.scaling is not None and not s.scaling.power_of_2 for s in (a.spec, b.spec))
    if inexact or "int8" in formats or not fast_bf16_gemm(device_type):
        return torch.float32
    return torch.bfloat16


def emulated_multiply(
    a: QuantizedOperand, b: QuantizedOperand, axes: tuple[int, int], out_dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Multiply quantised operands and return the scaled product as ``out_dtype``.

    Args:
        a, b: operands; ``axes`` their contraction axes.
        out_dtype: dtype of the result.
        fast: emulate Hopper's limited-precision accumulator.
    """
    del fast
    if a.spec.format == b.spec.format == "int8":
        out = torch._int_mm(a.codes if axes[0] == 1 else a.codes.t(), b.codes if axes[1] == 0 else b.codes.t())
    else:
        wide = _wide(a, b, a.codes.device.type)
        out = contract(operand_values(a, wide), axes[0], operand_values(b, wide), axes[1])
    if "fp16" in (a.spec.format, b.spec.format):
        out = out.to(torch.float16)  # overflow becomes infinity, as it does on the GPU
    scales = [s if axis == kept else s.t() for s, axis, kept in _folded_scales(a, b, axes)]
    if not scales:
        return out.to(out_dtype)
    scale = scales[0]
    if len(scales) == 2:
        if scale.numel() == 1 or scales[1].numel() == 1:
            scale = scale * scales[1]
        else:
            return (out * scale).mul_(scales[1]).to(out_dtype)
    return (out * scale).to(out_dtype)


def _folded_scales(a: QuantizedOperand, b: QuantizedOperand, axes: tuple[int, int]) -> list[tuple[Tensor, int, int]]:
    """Return (scale, contraction axis, axis at which it needs no transpose) of the operands that have one."""
    found = []
    if a.scale is not None:
        found.append((a.scale, axes[0], 1))
    if b.scale is not None:
        found.append((b.scale, axes[1], 0))
    return found
