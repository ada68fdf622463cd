"""How far a GEMM may be from the exact product of its quantised operands.

Codes and scales are data: given them, a kernel may differ from the product in float64 by the order of its sums and by
the rounding of what it returns, and by nothing else. With ``u`` the unit roundoff and ``K`` the length of the sums:

=====================================  ==================================================================
sums                                   distance allowed, as a share of ``sum |a b|``
=====================================  ==================================================================
integers                               0: int32 holds them exactly
FP32 in any order                      ``min(K, 8 sqrt(K)) u``: worst case (Higham, Accuracy and Stability of
                                       Numerical Algorithms, 2002, section 3.1), and what longer sums keep to
                                       (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4 with
                                       lambda = 8: broken with probability ``2 exp(-32)``)
tensor cores, 16-bit operands          ``+ K / 16 * 2**-23``: they cut off instead of rounding (Fasi, Higham,
                                       Mikaitis and Pranesh, PeerJ CS 7:e330, 2021)
8-bit floats on Ada and Hopper,        ``+ K / 32 * 2**-13``: 13 fraction bits (DeepSeek-V3, arXiv 2412.19437,
and everywhere with ``fast``           section 3.3.2); on Hopper no more than 128 values are summed so, unless fast
FP32 operands rounded by the device    ``+ 2 v`` with ``v`` that of TF32 or bfloat16 (``fp32_precision``)
=====================================  ==================================================================

What is returned may be rounded twice, as a product and as a result, which allows ``2 w |y|``, and a third time with its
bias, ``w (|y| + 2 |bias|)``: ``w`` is the unit roundoff of the narrowest of the result, the operands of a 16-bit GEMM,
and bfloat16 for 8-bit floats (``torch._scaled_mm`` returns that with row scales). Scales allow ``4 u |y|``. A GPU may
round the partial sums of a 16-bit GEMM to 16 bits (split-K, ``allow_bf16_reduced_precision_reduction``):
``8 w sum |a b| / sqrt(K)``, their size in a random walk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoprec.numerics.gemm import ACCUMULATOR_BITS, CHUNK, product_scales
from autoprec.numerics.operand import QuantizedOperand
from autoprec.numerics.plan import GemmStep
from autoprec.numerics.quantize import dequantize, operand_values
from autoprec.numerics.rounding import STORAGE
from autoprec.precision.formats import FORMATS

#: The constant of the probabilistic bound of a sum's rounding (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
_LAMBDA = 8.0
#: Rows of a result that are compared at once, so that no copy in float64 is larger than this many values.
_VALUES = 1 << 24
#: Rows over which errors against the product without any rounding are taken.
_SAMPLED = 64
#: Products of 16-bit values that a tensor core's instruction sums before it rounds to fp32 (PTX: k16).
_TENSOR_CORE = 16


@dataclass(frozen=True, slots=True)
class Compared:
    """A GEMM's result beside the exact product of its operands.

    Attributes:
        worst: the largest distance in units of what is allowed: 1 is the bound.
        wrong: how many values are beyond it; ``at``: row and column of the first of them.
        nonfinite: how many of those are NaN or infinite, where the product is not.
        ratio: the middle one of the wrong values over what each should be; NaN where none is finite.
    """

    worst: float = 0.0
    wrong: int = 0
    at: tuple[int, int] = (-1, -1)
    nonfinite: int = 0
    ratio: float = math.nan


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def sum_error(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, inner: int) -> float:
    """Return the distance that sums of ``inner`` products may have, as a share of the sum of their magnitudes.

    Args:
        a, b: operands, 2-D.
        step: how they are multiplied.
        inner: K, the number of products in a sum.
    """
    dtypes, device = {a.codes.dtype, b.codes.dtype}, a.codes.device
    if dtypes == {torch.int8}:
        return 0.0
    if torch.float64 in dtypes:
        return inner * _unit(torch.float64)
    error = min(inner, _LAMBDA * math.sqrt(inner)) * _unit(torch.float32)
    narrow = all(dtype.itemsize == 1 for dtype in dtypes)
    if step.fast or (narrow and device.type == "cuda" and torch.cuda.get_device_capability(device) < (10, 0)):
        cut = inner if step.fast or torch.cuda.get_device_capability(device) < (9, 0) else min(inner, 128)
        error += math.ceil(cut / CHUNK) * 2.0**-ACCUMULATOR_BITS
    if device.type == "cuda":
        error += math.ceil(inner / _TENSOR_CORE) * 2.0**-23
    if "fp32" in (a.spec.format, b.spec.format):
        backends: Any = torch.backends
        library = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
        error += 2 * {"tf32": 2.0**-11, "bf16": _unit(torch.bfloat16)}.get(library.fp32_precision, 0.0)
    return error


def _values(operand: QuantizedOperand) -> Tensor:
    """Return what a GEMM multiplies, as float64; 8-bit values go by float32, which the decoder is fast at."""
    plain = operand.spec.scheme == "cast" or operand.codes.dtype is torch.int8
    return operand.codes.double() if plain else operand_values(operand, torch.float32).double()


def compare(
    found: Tensor, a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, bias: Tensor | None = None
) -> Compared:
    """Compare a result ``[M, N]`` with ``a @ b + bias`` in float64; ``a``, ``b`` and ``step`` are those of its GEMM.

    Args:
        found: the result.
        a, b: its operands, 2-D.
        step: how they were multiplied.
        bias: ``[N]``; None for none.
    """
    left = _values(a) if step.axes[0] == 1 else _values(a).t()
    right = _values(b) if step.axes[1] == 0 else _values(b).t()
    inner = left.shape[1]
    scales = [scale.double() for scale in product_scales(a, b, step.axes)]
    share = sum_error(a, b, step, inner)
    added = None if bias is None else bias.detach().double()
    cast = a.spec.scheme == "cast"
    returned = [STORAGE[one.spec.format] if cast else torch.bfloat16 for one in (a, b)]
    held = step.wide or a.codes.dtype is torch.int8
    dtypes = [torch.finfo(dtype) for dtype in (found.dtype, *([] if held else returned))]
    last, limit = max(finfo.eps for finfo in dtypes) / 2, min(finfo.max for finfo in dtypes)
    # FP16 keeps what is subnormal, other formats may not
    tiny = max(finfo.smallest_normal * (finfo.eps if finfo.dtype == "float16" else 1.0) for finfo in dtypes)
    if cast and returned[0].itemsize == 2 and found.device.type == "cuda":
        share += _LAMBDA * last / math.sqrt(inner)
    total, chunk = Compared(), max(1, _VALUES // max(right.shape[1], inner, 1))
    for start in range(0, left.shape[0], chunk):
        part = left[start : start + chunk]
        exact, size = part @ right, (part.abs().float() @ right.abs().float()).double() if share else None
        for scale in scales:
            scale = scale if scale.shape[:1] in ((), (1,)) else scale[start : start + chunk]
            exact = exact * scale
            size = None if size is None else size * scale.abs()
        allowed = exact.abs() * (2 * last + 4 * _unit(torch.float32)) + tiny
        allowed = allowed if size is None else allowed + size * share
        if added is not None:
            exact, allowed = exact + added, allowed + (exact.abs() + 2 * added.abs()) * last
        total = _joined(total, _compared(found[start : start + chunk].double(), exact, allowed, limit), start)
    return total


def _compared(found: Tensor, exact: Tensor, allowed: Tensor, limit: float) -> Compared:
    beyond = exact.abs() >= limit * (1 - 2.0**-8)  # what a format cannot hold may be its largest value or infinity
    over = (found.sign() == exact.sign()) & (found.abs() >= limit * (1 - 2.0**-6))
    good = torch.where(exact.isfinite(), torch.where(beyond, over, (found - exact).abs() <= allowed), ~found.isfinite())
    wrong = ~good
    judged = exact.isfinite() & ~beyond
    distance = torch.where(judged & found.isfinite(), (found - exact).abs() / allowed, 0.0)
    worst = float(distance.amax()) if distance.numel() else 0.0
    count = int(wrong.sum())
    if not count:
        return Compared(min(worst, 1.0))
    row, column = (int(at[0]) for at in torch.nonzero(wrong, as_tuple=True))
    finite = wrong & found.isfinite() & (exact != 0)
    ratio = float((found[finite] / exact[finite]).median()) if finite.any() else math.nan
    return Compared(max(worst, 1.0), count, (row, column), int((wrong & ~found.isfinite()).sum()), ratio)


def _joined(one: Compared, other: Compared, start: int) -> Compared:
    at = one.at if one.wrong or not other.wrong else (other.at[0] + start, other.at[1])
    ratio = one.ratio if other.wrong <= one.wrong else other.ratio
    return Compared(max(one.worst, other.worst), one.wrong + other.wrong, at, one.nonfinite + other.nonfinite, ratio)


def errors(
    found: Tensor, raw: tuple[Tensor, Tensor], codes: tuple[QuantizedOperand, QuantizedOperand], step: GemmStep
) -> list[float]:
    """Return the relative errors of a result, of its quantised operands and of bfloat16 against exact arithmetic.

    In the Frobenius norm, over some of the rows: is what a user sees precision, or a kernel?

    Args:
        found: ``[M, N]``, without its bias.
        raw: the operands before they were quantised, with the axes of ``step``.
        codes: the same, quantised.
    """
    rows = torch.linspace(0, found.shape[0] - 1, min(_SAMPLED, found.shape[0]), device=found.device).long()
    left, right = (raw[0] if step.axes[0] == 1 else raw[0].t())[rows], raw[1] if step.axes[1] == 0 else raw[1].t()
    full = left.double() @ right.double()
    low = (left.bfloat16() @ right.bfloat16()).double()
    a, b = (_values(one) for one in codes)
    exact = (a if step.axes[0] == 1 else a.t())[rows] @ (b if step.axes[1] == 0 else b.t())
    for scale in product_scales(codes[0], codes[1], step.axes):
        exact = exact * (scale if scale.shape[:1] in ((), (1,)) else scale[rows]).double()
    norm = full.norm() + torch.finfo(torch.float64).tiny
    return [float((one - full).norm() / norm) for one in (found[rows].double(), exact, low)]


def shares(x: Tensor, operand: QuantizedOperand) -> tuple[float, float]:
    """Return which shares of an operand's values were cut off at its format's largest, and rounded to zero.

    Args:
        x: the operand before it was quantised, ``[rows, columns]``, any float dtype.
        operand: what was made of it.
    """
    if operand.spec.hadamard or x.numel() == 0:
        return 0.0, 0.0
    kept, size = dequantize(operand).double().abs(), x.detach().double().abs()
    flushed = (size > 0) & (kept == 0)
    if operand.spec.scheme == "cast":
        saturated = ~kept.isfinite() & size.isfinite()
    elif operand.groups is None:
        number = FORMATS[operand.spec.format]
        integer = operand.codes.dtype is torch.int8
        half = 0.5 if integer else 2.0 ** (math.floor(math.log2(number.max)) - number.mantissa - 1)
        largest = operand_values(operand, torch.float32).abs() >= number.max
        saturated = largest & (size > kept * (1 + 1.01 * half / number.max))
    else:  # a scale of the very values that share it
        saturated = torch.zeros_like(flushed)
    return float(saturated.double().mean()), float(flushed.double().mean())
