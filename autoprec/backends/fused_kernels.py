"""The Triton kernels of ``backends.fused``, ``experts`` and ``fp4``; imported where Triton is, and nowhere else.

Rounding to 8 bits is done on the bits of float32 values, ties to even, so that every architecture and Triton's
interpreter (``TRITON_INTERPRET=1``) give the codes of ``numerics.rounding.encode``, and no multiplication can be
contracted with an addition. Magnitudes are compared as integers: among the bits of non-negative floats NaN is above
infinity and infinity above all numbers, so that a maximum carries NaN. In the NVFP4 kernels, the last two, what could
be contracted multiplies by powers of two alone, and sums of the Hadamard transform have the order of
:func:`autoprec.numerics.grouped.hadamard`.
"""

from __future__ import annotations

import triton
import triton.language as tl

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


@triton.jit
def _sums_and_differences(y, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    pairs = tl.permute(tl.reshape(y, (ROWS // (2 * SPAN), 2, SPAN * COLUMNS)), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def _turned(x, SIGNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply groups of 16 rows by the signed Hadamard matrix."""
    negative = (SIGNS >> (tl.arange(0, ROWS) % 16)) & 1
    y = x * (1 - 2 * negative).to(tl.float32)[:, None]
    y = _sums_and_differences(y, 1, ROWS, COLUMNS)
    y = _sums_and_differences(y, 2, ROWS, COLUMNS)
    y = _sums_and_differences(y, 4, ROWS, COLUMNS)
    return _sums_and_differences(y, 8, ROWS, COLUMNS) * 0.25


@triton.jit
def fp4_largest_kernel(
    x, rows, columns, stride_r, stride_c, largest,
    PLAIN: tl.constexpr, HADAMARD: tl.constexpr, SIGNS: tl.constexpr, TRIPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the largest magnitude that each program sees, as it is and after the transform: int32 ``[2, programs]``."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    across = (columns + BLOCK_C - 1) // BLOCK_C
    plain = tl.full([BLOCK_R], 0, tl.int32)
    turned = tl.full([BLOCK_R], 0, tl.int32)
    for trip in range(TRIPS):
        tile = program + trip * programs
        r = (tile // across).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        c = (tile % across).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = (r[:, None] < rows) & (c[None, :] < columns)
        values = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0.0).to(tl.float32)
        if PLAIN:
            plain = tl.maximum(plain, tl.reduce(_magnitudes(values), 1, _maximum))
        if HADAMARD:
            magnitudes = _magnitudes(_turned(values, SIGNS, BLOCK_R, BLOCK_C))
            turned = tl.maximum(turned, tl.reduce(magnitudes, 1, _maximum))
    tl.store(largest + program, tl.reduce(plain, 0, _maximum))
    tl.store(largest + programs + program, tl.reduce(turned, 0, _maximum))


@triton.jit
def _tensor_scale(magnitude):
    """Return what ``numerics.grouped`` divides a tensor by so that its group scales fit E4M3."""
    amax = magnitude.to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(tl.where(magnitude < _INFINITY, amax, 0.0), 2688.0)
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def _noise(bits, position, salt):
    """Return :func:`autoprec.numerics.rounding.hashed_noise` of float32 bits."""
    mixed = position.to(tl.uint32) * 0x2545F491 + bits.to(tl.uint32, bitcast=True) * 0x632BE5AB
    mixed += salt.to(tl.uint32, bitcast=True) * 0x45D9F3B
    for _ in tl.static_range(2):
        mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B
    return (((mixed >> 16) ^ mixed) & 0xFFFFFF).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _rounded(y, position, salt, STOCHASTIC: tl.constexpr):
    """Round float32 to the four bits of E2M1."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 6.0)
    power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 1.0)
    if STOCHASTIC:
        spacing = power * 0.5
        counted = tl.floor(magnitude / spacing + _noise(bits, position, salt))
        found = tl.minimum(counted * spacing, 6.0)
        sign = (bits >> 31) & 1
    else:
        found = (magnitude + power * 6291456.0) - power * 6291456.0
        sign = tl.where(found > 0, (bits >> 31) & 1, 0)  # zeros have no sign
    kept = found.to(tl.int32, bitcast=True)
    normal = (((kept >> 23) - 126) << 1) | ((kept >> 22) & 1)
    return tl.where(found >= 1.0, normal, (found > 0).to(tl.int32)) | (sign << 3)


@triton.jit
def _packed(
    x, position, magnitude, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr
):
    """Quantise ``[OUTER, INNER]`` in groups of 16: codes, two to a byte, and E4M3 scales, all as int32."""
    GROUPS: tl.constexpr = INNER // 16
    group = tl.reduce(tl.reshape(_magnitudes(x), (OUTER, GROUPS, 16)), 2, _maximum)
    if SQUARE:
        square = tl.reduce(tl.reshape(group, (OUTER // 16, 16, GROUPS)), 1, _maximum)
        group = tl.reshape(tl.broadcast_to(square[:, None, :], (OUTER // 16, 16, GROUPS)), (OUTER, GROUPS))
    tensor = _tensor_scale(magnitude)
    wanted = tl.math.div_rn(tl.math.div_rn(group.to(tl.float32, bitcast=True), 6.0), tensor)
    wanted = tl.where(group > _INFINITY, 1.0, tl.minimum(tl.maximum(wanted, 0.015625), 448.0))
    scale = _code(wanted, 121, 3, 0x43E00000).to(tl.int32)
    wide = (((scale >> 3) + 120) << 23) | ((scale & 7) << 20)
    factor = tl.math.div_rn(tl.math.div_rn(1.0, tensor), wide.to(tl.float32, bitcast=True))
    y = tl.reshape(tl.reshape(x, (OUTER, GROUPS, 16)) * factor[:, :, None], (OUTER, INNER))
    codes = _rounded(y, position, magnitude, STOCHASTIC)
    low, high = tl.split(tl.reshape(codes, (OUTER, INNER // 2, 2)))
    return low | (high << 4), scale


@triton.jit
def _stored(
    codes, scales, packed, scale, first_outer, first_inner, outer, width, valid_outer, valid_groups,
    OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Store codes ``[outer, width]`` and scales in tiles of 128 x 4; what is not valid has scale 0."""
    o = first_outer + tl.arange(0, OUTER)
    i = first_inner // 2 + tl.arange(0, INNER // 2)
    inside = (o[:, None] < outer) & (i[None, :] < width)
    tl.store(codes + o[:, None] * width + i[None, :], packed.to(tl.uint8), mask=inside)
    g = first_inner // 16 + tl.arange(0, INNER // 16)
    wide = (width + 31) // 32
    tile = ((o // 128)[:, None] * wide + (g // 4)[None, :]) * 512
    place = tile + (o % 32 * 16 + (o % 128) // 32 * 4)[:, None] + (g % 4)[None, :]
    scale = tl.where((o[:, None] < valid_outer) & (g[None, :] < valid_groups), scale, 0)
    tl.store(
        scales + place, scale.to(tl.uint8), mask=(g[None, :] < wide * 4) & (o[:, None] < (outer + 127) // 128 * 128)
    )


@triton.jit
def fp4_cast_kernel(
    x, rows, columns, stride_r, stride_c, largest, row_codes, row_scales, column_codes, column_scales, tensor_scales,
    row_outer, row_width, column_outer, column_width, row_valid, column_valid,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, SQUARE: tl.constexpr, HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr, SIGNS: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Cast a tile to E2M1, for GEMMs that sum along rows and for those that sum along columns, transposed.

    Args (pointers):
        largest: of ``fp4_largest_kernel``.
        row_codes, column_codes: two codes to a byte, ``[row_outer, row_width]`` and ``[column_outer, column_width]``.
        row_scales, column_scales: E4M3 in tiles of 128 x 4.
        tensor_scales: float32, by row and by column.
    """
    first_r, first_c = tl.program_id(0).to(tl.int64) * BLOCK_R, tl.program_id(1).to(tl.int64) * BLOCK_C
    r, c = first_r + tl.arange(0, BLOCK_R), first_c + tl.arange(0, BLOCK_C)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    values = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0.0).to(tl.float32)
    is_first = (first_r == 0) & (first_c == 0)
    if BY_ROW:
        magnitude = tl.reduce(tl.load(largest + tl.arange(0, PROGRAMS)), 0, _maximum)
        told = tl.where(magnitude < _INFINITY, _tensor_scale(magnitude), float("nan"))
        tl.store(tensor_scales, told, mask=is_first)
        position = r[:, None] * ((columns + 15) // 16 * 16) + c[None, :]
        packed, scale = _packed(values, position, magnitude, SQUARE, STOCHASTIC, BLOCK_R, BLOCK_C)
        _stored(
            row_codes, row_scales, packed, scale, first_r, first_c, row_outer, row_width, row_valid,
            (columns + 15) // 16, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    if BY_COLUMN:
        OFFSET: tl.constexpr = PROGRAMS if HADAMARD else 0
        magnitude = tl.reduce(tl.load(largest + OFFSET + tl.arange(0, PROGRAMS)), 0, _maximum)
        told = tl.where(magnitude < _INFINITY, _tensor_scale(magnitude), float("nan"))
        tl.store(tensor_scales + 1, told, mask=is_first)
        if HADAMARD:
            values = _turned(values, SIGNS, BLOCK_R, BLOCK_C)
        position = tl.trans(r[:, None] * columns + c[None, :])
        packed, scale = _packed(tl.trans(values), position, magnitude, SQUARE, STOCHASTIC, BLOCK_C, BLOCK_R)
        _stored(
            column_codes, column_scales, packed, scale, first_c, first_r, column_outer, column_width, column_valid,
            (rows + 15) // 16, BLOCK_C, BLOCK_R,
        )  # fmt: skip
