"""Multiply two quantised operands: the emulated GEMM.

Values of E4M3, E5M2, MXFP8 and NVFP4 have at most seven significant bits, so bfloat16 holds them exactly and a
bfloat16 GEMM, which accumulates in float32, computes what an 8-bit GEMM computes; only its output is rounded to
bfloat16, as ``torch._scaled_mm(out_dtype=bfloat16)`` rounds it. That makes the emulation faster than float32 on CPUs
with bfloat16 instructions; elsewhere the same values are multiplied in float32.

Hopper's limited accumulator: FP8 tensor cores keep about 14 bits while they sum. Products of 32 values along the
contraction axis are added to an accumulator that keeps 13 fraction bits, cut off, not rounded. The error is a bias that
grows with the length of the sum: 0.2 % at 2048, 0.6 % at 8192, more than the quantisation error itself for same-sign
data. DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and cuBLAS without ``use_fast_accum`` avoid it by moving partial
sums into float32 every 128 values, which is ``accumulation: full``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.numerics.operand import QuantizedOperand, Spec
from autoprec.numerics.quantize import operand_values
from autoprec.numerics.rounding import INTEGER_UNITS_ON_CPU, SIXTEEN_BIT, fast_bf16_gemm

#: Values along the contraction axis that one FP8 instruction multiplies and adds at full precision.
CHUNK = 32
#: Fraction bits the accumulator keeps.
ACCUMULATOR_BITS = 13
#: Products of two codes that int32 can hold the sum of: 2**31 / 2**14.
LONGEST_SUM = 1 << 17
#: The bits of fp32 (23 of the fraction) that it keeps.
_MASK = -(1 << (23 - ACCUMULATOR_BITS))


def limited_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``[M, K]`` by ``[K, N]`` (float32) with a limited-precision accumulator; returns float32 ``[M, N]``."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], CHUNK):
        total = total + a[:, start : start + CHUNK] @ b[start : start + CHUNK]
        total = (total.view(torch.int32) & _MASK).view(torch.float32)
    return total


def contract(a: Tensor, a_axis: int, b: Tensor, b_axis: int, *, wide: bool = False, tf32: bool = False) -> Tensor:
    """Sum the product of two matrices over ``a``'s axis ``a_axis`` and ``b``'s axis ``b_axis``.

    Args:
        a: ``[M, K]``, or ``[K, M]`` where ``a_axis`` is 0.
        a_axis, b_axis: the axis that is summed, of each.
        b: ``[K, N]``, or ``[N, K]`` where ``b_axis`` is 1; of the dtype of ``a``.
        wide: return the FP32 sums of a 16-bit product on a GPU (cuBLAS with a float32 C), instead of rounding them.
        tf32: let a GPU multiply float32 on its TF32 units, whatever the script has chosen.

    Returns:
        ``[M, N]`` in the dtype of ``a``; float32 where ``wide``.
    """
    left, right = a if a_axis == 1 else a.t(), b if b_axis == 0 else b.t()
    if tf32:
        return torch.ops.autoprec.tf32_mm(left, right) if torch.compiler.is_compiling() else tf32_mm(left, right)
    if wide and left.dtype in SIXTEEN_BIT:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right)


def tf32_mm(left: Tensor, right: Tensor) -> Tensor:
    """Multiply float32 matrices with TF32 allowed for this product alone (``torch.backends.cuda.matmul``).

    The setting is of the process: a product of another thread meanwhile may run on the TF32 units as well.

    Args:
        left: ``[M, K]``, float32.
        right: ``[K, N]``, float32.

    Returns:
        ``[M, N]``, float32.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return torch.mm(left, right)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


#: :func:`tf32_mm` in a compiled graph, where the compiler would settle the precision for all products at once.
_tf32_mm_in_a_graph = torch.library.custom_op("autoprec::tf32_mm", tf32_mm, mutates_args=())
_tf32_mm_in_a_graph.register_fake(torch.mm)


def product_dtype(a: Spec, b: Spec, device_type: str, *, wide: bool = False) -> torch.dtype:
    """Return the narrowest dtype that holds the values of both operands exactly and multiplies fast on a device.

    A ``wide`` product (FP32 sums returned) of 16-bit operands has a kernel on GPUs only; elsewhere the operands'
    values are multiplied in float32, which is the same arithmetic.

    Args:
        a, b: how the operands are quantised.
        device_type: ``cpu`` or ``cuda``.
        wide: whether the FP32 sums are returned.
    """
    if wide and device_type != "cuda":
        return torch.float32
    formats = {a.format, b.format}
    if "fp64" in formats:
        return torch.float64
    if formats & {"fp32", "tf32"}:
        return torch.float32
    if "fp16" in formats:
        return torch.float32 if device_type == "cpu" else torch.float16
    inexact = any(s.scheme == "block" and s.scaling is not None and not s.scaling.power_of_2 for s in (a, b))
    return torch.float32 if inexact or not fast_bf16_gemm(device_type) else torch.bfloat16


def emulated_multiply(
    a: QuantizedOperand,
    b: QuantizedOperand,
    axes: tuple[int, int],
    out_dtype: torch.dtype,
    *,
    product: torch.dtype,
    fast: bool = False,
    wide: bool = False,
) -> Tensor:
    """Multiply quantised operands and return the scaled product ``[M, N]`` as ``out_dtype``.

    Args:
        a, b: operands, 2-D.
        axes: the contraction axis of each.
        out_dtype: of the product.
        product: dtype in which the values are multiplied; see :func:`product_dtype`.
        fast: emulate Hopper's limited-precision accumulator.
        wide: keep the FP32 sums of 16-bit operands.
    """
    if a.codes.dtype is b.codes.dtype is torch.int8:
        out = integer_matmul(a.codes if axes[0] == 1 else a.codes.t(), b.codes if axes[1] == 0 else b.codes.t())
    elif fast:
        left, right = operand_values(a, torch.float32), operand_values(b, torch.float32)
        out = limited_matmul(left if axes[0] == 1 else left.t(), right if axes[1] == 0 else right.t())
    else:
        tf32 = a.spec.format == b.spec.format == "tf32"
        out = contract(operand_values(a, product), axes[0], operand_values(b, product), axes[1], wide=wide, tf32=tf32)
    if "fp16" in (a.spec.format, b.spec.format) and not wide:
        out = out.to(torch.float16)  # overflow becomes infinity, as it does on the GPU
    scales = product_scales(a, b, axes)
    # widen first, scale in place: one pass each, where mixed dtypes would copy as well
    out = out.to(torch.float32 if scales else out_dtype)
    for scale in scales:
        out.mul_(scale)
    return out.to(out_dtype)


def exact_sums(a: Tensor, b: Tensor) -> bool:
    """Say whether ``torch._int_mm`` gives the exact sums of two int8 matrices ``[M, K]`` and ``[K, N]``.

    On a CPU it misreads a transposed operand of one row or column (torch 2.13: wrong numbers, no error). Without VNNI
    it is a plain loop, 20 times slower than float32; and where ``ONEDNN_MAX_CPU_ISA`` forbids VNNI, two products of a
    signed and an unsigned byte are added in 16 bits (``vpmaddubsw``) and overflow. On a GPU it takes more than 16 rows
    and multiples of 8 only. Longer sums than ``2**17`` may not fit into int32.
    """
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
    if inner > LONGEST_SUM:
        return False
    if a.device.type == "cpu":
        return INTEGER_UNITS_ON_CPU and min(rows, inner, columns) > 1
    return rows > 16 and inner % 8 == 0 and columns % 8 == 0


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply int8 matrices exactly, through the integer kernel where it can be trusted.

    Args:
        a: ``[M, K]``, int8.
        b: ``[K, N]``, int8.

    Returns:
        ``[M, N]``: int32 of the kernel, else float64.
    """
    if exact_sums(a, b):
        return torch._int_mm(a, b)
    inner, step = a.shape[1], LONGEST_SUM
    if inner > step:
        parts = ((a[:, start : start + step], b[start : start + step]) for start in range(0, inner, step))
        return torch.stack([integer_matmul(left, right).double() for left, right in parts]).sum(0)
    return a.double() @ b.double()


def product_scales(a: QuantizedOperand, b: QuantizedOperand, axes: tuple[int, int]) -> list[Tensor]:
    """Return the scales of the product: one 0-d tensor, or a column ``[M, 1]`` and a row ``[1, N]``; none without any.

    Args:
        a, b: operands, 2-D.
        axes: the contraction axis of each.
    """
    left = a.scale if a.scale is None or axes[0] == 1 else a.scale.t()
    right = b.scale if b.scale is None or axes[1] == 0 else b.scale.t()
    if left is not None and right is not None and left.numel() == right.numel() == 1:
        return [(left * right).reshape(())]
    return [scale.reshape(()) if scale.numel() == 1 else scale for scale in (left, right) if scale is not None]
