"""The Triton kernels of ``backends.fused`` and ``backends.experts``; imported where Triton is, and nowhere else.

Rounding to 8 bits is done on the bits of float32 values, ties to even, so that every architecture and Triton's
interpreter (``TRITON_INTERPRET=1``) give the codes of ``numerics.rounding.encode``, and no multiplication can be
contracted with an addition. Magnitudes are compared as integers: among the bits of non-negative floats NaN is above
infinity and infinity above all numbers, so that a maximum carries NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cast_kernel", "groups_kernel", "largest_kernel"]

#: Passed to ``tl.reduce``: the interpreter knows them, and a maximum of integers needs no care for NaN.
_maximum = tl.standard._elementwise_max
_sum = tl.standard._sum_combine

_INFINITY = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _magnitudes(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _code(y, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr):
    """Round float32 to 8 bits: ``EXPONENT`` is the biased float32 exponent of the smallest normal value."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    saturated = tl.minimum(magnitude, LIMIT)
    exponent = saturated >> 23
    whole = (saturated & 0x7FFFFF) | 0x800000
    # values below the smallest normal one lose a bit per power of two; beyond 25 none is left
    shift = tl.minimum(tl.maximum(EXPONENT - exponent, 0) + (23 - MANTISSA), 25)
    half = (1 << (shift - 1)) - 1
    rounded = (whole + half + ((whole >> shift) & 1)) >> shift
    code = (tl.maximum(exponent - EXPONENT, 0) << MANTISSA) + rounded
    code = tl.where(magnitude > _INFINITY, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _scale(magnitude, EPSILON: tl.constexpr, FORMAT_MAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Return ``FORMAT_MAX / amax``, 1 for zeros and what is not finite: :func:`autoprec.numerics.scaling.scale_of`."""
    amax = magnitude.to(tl.float32, bitcast=True)
    amax = tl.where(magnitude > _INFINITY, amax, tl.maximum(amax, EPSILON))
    usable = (amax > 0) & (amax < float("inf"))
    divisor = tl.where(usable, amax, 1.0)
    scale = tl.minimum(tl.math.div_rn(FORMAT_MAX, divisor), _LARGEST)
    scale = tl.where(usable, scale, 1.0)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _inverse(scale, magnitude):
    """Return ``1 / scale``, NaN where the largest magnitude is not finite."""
    inverse = tl.math.div_rn(1.0, scale)
    return tl.where(magnitude < _INFINITY, inverse, float("nan"))


@triton.jit
def _tile(rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    return r, c, (r[:, None] < rows) & (c[None, :] < columns)


@triton.jit
def largest_kernel(
    x, rows, columns, stride_r, stride_c, whole, by_row, by_column,
    WHOLE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Take the largest magnitudes of a tile into cells of int32 that begin at 0: of all, by row, by column."""
    r, c, inside = _tile(rows, columns, BLOCK_R, BLOCK_C)
    values = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0.0)
    magnitude = _magnitudes(values)
    along = tl.reduce(magnitude, 1, _maximum)
    if WHOLE:
        tl.atomic_max(whole, tl.reduce(along, 0, _maximum))
    if BY_ROW:
        tl.atomic_max(by_row + r, along, mask=r < rows)
    if BY_COLUMN:
        tl.atomic_max(by_column + c, tl.reduce(magnitude, 0, _maximum), mask=c < columns)


@triton.jit
def cast_kernel(
    x, rows, columns, stride_r, stride_c,
    row_codes, column_codes, row_width, column_width, row_inverse, column_inverse,
    row_largest, column_largest, given, seen,
    SCHEME: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, NOTE: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr, FORMAT_MAX: tl.constexpr,
    POWER_OF_2: tl.constexpr, EPSILON: tl.constexpr, EPSILON_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Cast a tile to 8 bits, for GEMMs that sum along rows and for those that sum along columns, transposed.

    Args (pointers):
        row_codes, column_codes: ``[rows, row_width]`` and ``[columns, column_width]``, uint8.
        row_inverse, column_inverse: float32; one, or by row and by column; in blocks ``[groups, rows]`` and
            ``[groups, columns]``, or squares ``[row groups, column groups]``. Of ``delayed`` int32 at 0.
        row_largest, column_largest: what ``largest_kernel`` found.
        given, seen: of ``delayed``: its scale, and the bits of the largest amax noted so far.
    """
    r, c, inside = _tile(rows, columns, BLOCK_R, BLOCK_C)
    values = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0.0).to(tl.float32)
    first_r, first_c = tl.program_id(0), tl.program_id(1)
    if SCHEME == "tensor":
        magnitude = tl.load(row_largest)
        scale = _scale(magnitude, EPSILON, FORMAT_MAX, POWER_OF_2)
        tl.store(row_inverse, _inverse(scale, magnitude), mask=(first_r == 0) & (first_c == 0))
        by_row = _code(values * scale, EXPONENT, MANTISSA, LIMIT)
        by_column = by_row
    elif SCHEME == "delayed":
        amax = tl.reduce(tl.reduce(_magnitudes(values), 1, _maximum), 0, _maximum)
        known = tl.load(given)
        scale = tl.where(known > 0, known, 1.0)
        tl.atomic_max(row_inverse, _inverse(scale, amax).to(tl.int32, bitcast=True))
        if NOTE:
            tl.atomic_max(seen, tl.maximum(amax, EPSILON_BITS))
        by_row = _code(values * scale, EXPONENT, MANTISSA, LIMIT)
        by_column = by_row
    elif SCHEME == "row":
        if BY_ROW:
            magnitude = tl.load(row_largest + r, mask=r < rows, other=0)
            scale = _scale(magnitude, EPSILON, FORMAT_MAX, POWER_OF_2)
            tl.store(row_inverse + r, _inverse(scale, magnitude), mask=(r < rows) & (first_c == 0))
            by_row = _code(values * scale[:, None], EXPONENT, MANTISSA, LIMIT)
        if BY_COLUMN:
            magnitude = tl.load(column_largest + c, mask=c < columns, other=0)
            scale = _scale(magnitude, EPSILON, FORMAT_MAX, POWER_OF_2)
            tl.store(column_inverse + c, _inverse(scale, magnitude), mask=(c < columns) & (first_r == 0))
            by_column = _code(values * scale[None, :], EXPONENT, MANTISSA, LIMIT)
    elif SCHEME == "square":
        magnitude = tl.reduce(tl.reduce(_magnitudes(values), 1, _maximum), 0, _maximum)
        scale = _scale(magnitude, EPSILON, FORMAT_MAX, POWER_OF_2)
        tl.store(row_inverse + first_r * tl.num_programs(1) + first_c, _inverse(scale, magnitude))
        by_row = _code(values * scale, EXPONENT, MANTISSA, LIMIT)
        by_column = by_row
    else:  # 1x128
        magnitudes = _magnitudes(values)
        if BY_ROW:
            magnitude = tl.reduce(magnitudes, 1, _maximum)
            scale = _scale(magnitude, EPSILON, FORMAT_MAX, POWER_OF_2)
            tl.store(row_inverse + first_c.to(tl.int64) * rows + r, _inverse(scale, magnitude), mask=r < rows)
            by_row = _code(values * scale[:, None], EXPONENT, MANTISSA, LIMIT)
        if BY_COLUMN:
            magnitude = tl.reduce(magnitudes, 0, _maximum)
            scale = _scale(magnitude, EPSILON, FORMAT_MAX, POWER_OF_2)
            tl.store(column_inverse + first_r.to(tl.int64) * columns + c, _inverse(scale, magnitude), mask=c < columns)
            by_column = _code(values * scale[None, :], EXPONENT, MANTISSA, LIMIT)
    # groups are padded with zero codes; elsewhere the widths end with the tensor
    if BY_ROW:
        last = rows if SCHEME != "square" else tl.num_programs(0) * BLOCK_R
        tl.store(
            row_codes + r[:, None] * row_width + c[None, :], by_row,
            mask=(r[:, None] < last) & (c[None, :] < row_width),
        )  # fmt: skip
    if BY_COLUMN:
        last = columns if SCHEME != "square" else tl.num_programs(1) * BLOCK_C
        tl.store(
            column_codes + c[:, None] * column_width + r[None, :], tl.trans(by_column),
            mask=(c[:, None] < last) & (r[None, :] < column_width),
        )  # fmt: skip


@triton.jit
def groups_kernel(
    x, columns, stride_r, stride_c, ends, padded, codes, width, inverse,
    COUNT: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr,
    FORMAT_MAX: tl.constexpr, POWER_OF_2: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Cast groups of rows for GEMMs that sum over each group by itself: transposed, every group padded with zeros.

    Args (pointers):
        ends: int32, the row at which each group ends; ``COUNT`` is the next power of two of their number.
        padded: int32, written: the column of ``codes`` at which it ends, a multiple of 16 after the one before, at
            least 16.
        codes: ``[columns, width]``, uint8; columns beyond the last group are not written.
        inverse: float32 ``[groups, columns]``.
    """
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    group, inside = tl.program_id(1), c < columns
    every = tl.arange(0, COUNT)
    starts = tl.load(ends + every - 1, mask=(every > 0) & (every <= group), other=0).to(tl.int64)
    sizes = tl.load(ends + every, mask=every <= group, other=0).to(tl.int64) - starts
    wide = tl.where(every <= group, tl.maximum((sizes + 15) // 16, 1) * 16, 0)
    stop = tl.reduce(wide, 0, _sum)
    start = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64)
    rows = tl.load(ends + group).to(tl.int64) - start
    room = tl.maximum((rows + 15) // 16, 1) * 16
    tl.store(padded + group, stop.to(tl.int32), mask=tl.program_id(0) == 0)
    source = x + start * stride_r + c[None, :] * stride_c
    magnitude = tl.full([BLOCK_C], 0, tl.int32)
    for first in range(0, rows, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (r[:, None] < rows) & inside[None, :]
        values = tl.load(source + r[:, None] * stride_r, mask=mask, other=0.0)
        magnitude = tl.maximum(magnitude, tl.reduce(_magnitudes(values), 0, _maximum))
    scale = _scale(magnitude, EPSILON, FORMAT_MAX, POWER_OF_2)
    tl.store(inverse + group.to(tl.int64) * columns + c, _inverse(scale, magnitude), mask=inside)
    for first in range(0, room, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (r[:, None] < rows) & inside[None, :]
        values = tl.load(source + r[:, None] * stride_r, mask=mask, other=0.0).to(tl.float32)
        code = _code(values * scale[None, :], EXPONENT, MANTISSA, LIMIT)
        tl.store(
            codes + c[:, None] * width + (stop - room) + r[None, :], tl.trans(code),
            mask=inside[:, None] & (r[None, :] < room),
        )  # fmt: skip
