"""8-bit and 4-bit GEMMs of CUDA through torch: codes and scales brought into the layouts that cuBLAS reads.

=========  =========================================  ================================================================
scheme     torch call                                 scales
=========  =========================================  ================================================================
tensor     ``torch._scaled_mm``                       one float32 each
row        ``torch._scaled_mm``                       float32 ``[M, 1]`` and ``[1, N]``
block      ``F.scaled_mm``, 1x128 and 128x128         float32, outer dimension contiguous; 128x128 scales padded to a
                                                      multiple of 4 along the sum
mx         ``F.scaled_mm``, 1x32                      E8M0 in 128 x 4 tiles (``SWIZZLE_32_4_4``)
nvfp4      ``F.scaled_mm``, 1x16 and one per tensor   E4M3 in such tiles, and float32
=========  =========================================  ================================================================

The first operand is row-major ``[M, K]`` and the second column-major ``[K, N]``, where K is the summed dimension. Sizes
that kernels cannot take are padded with zero codes, which change no sum, and cut off the result: a ragged last batch
runs as any other. Sources: torch ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` and ``_meta_registrations.py``,
https://docs.nvidia.com/cuda/cublas/ (scaling factors layouts), pytorch pull request 166752.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.grouped import GROUP_SIZES
from autoprec.numerics.operand import QuantizedOperand
from autoprec.numerics.plan import GemmStep, multiply_emulated

#: What every side of an 8-bit product is padded to: cuBLAS takes multiples of 16 bytes.
MULTIPLE = 16
#: Before CUDA 12.9 row scales with full accumulation run in CUTLASS's kernel, which is slow at that. As in torchao, the
#: product then has a tensor scale of 1, and a compiler fuses the scaling with what follows.
_SLOW_ROWS = tuple(int(part) for part in (torch.version.cuda or "99.0").split(".")[:2]) < (12, 9)

#: The CPU's kernel of torch 2.11 has tensor scales alone: there, too, the product is scaled afterwards.
_ROWS_ON_CPU = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def _is_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _padded(codes: Tensor, multiple: int) -> Tensor:
    """Pad an 8-bit matrix with zero codes to multiples in both dimensions."""
    down, right = -codes.shape[0] % multiple, -codes.shape[1] % multiple
    if not down and not right:
        return codes
    return F.pad(codes.view(torch.uint8), (0, right, 0, down)).view(codes.dtype)


def scaled_multiply(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, out_dtype: torch.dtype) -> Tensor:
    """Multiply two FP8 operands with tensor or row scales through ``torch._scaled_mm``.

    Args:
        a, b: operands, 2-D.
        step: which axes are summed.
        out_dtype: of the product.

    Returns:
        ``[M, N]`` in ``out_dtype``.
    """
    axes = step.axes
    left = a.codes if axes[0] == 1 else a.codes.t()
    right = b.codes if axes[1] == 1 else b.codes.t()  # [N, K]: its transpose is the column-major second operand
    if left.numel() == 0 or right.numel() == 0 or a.scale is None or b.scale is None:
        return multiply_emulated(a, b, step, out_dtype)
    if left.element_size() > 1:  # values: graphs that Inductor compiles for a CPU hold no 8-bit codes
        return multiply_emulated(a, b, step, out_dtype)
    rows, columns, on_gpu = left.shape[0], right.shape[0], _is_cuda(left)
    if on_gpu:
        left, right = _padded(left, MULTIPLE), _padded(right, MULTIPLE)
    rowwise = "row" in (a.spec.scheme, b.spec.scheme)
    if rowwise:
        scale_a, scale_b = _vector(a.scale, left.shape[0]).unsqueeze(1), _vector(b.scale, right.shape[0]).unsqueeze(0)
    else:
        scale_a, scale_b = a.scale.reshape(()), b.scale.reshape(())
    after: tuple[Tensor, ...] = ()
    if rowwise and (_SLOW_ROWS and not step.fast if on_gpu else not _ROWS_ON_CPU):
        after, rowwise = (scale_a[:rows], scale_b[:, :columns]), False
        scale_a = scale_b = scale_a.new_ones(())
    # row scales return bfloat16 only on GPUs
    produced = torch.bfloat16 if rowwise and on_gpu else out_dtype
    out: Tensor = torch._scaled_mm(
        left.contiguous(),
        right.contiguous().t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=produced,
        use_fast_accum=step.fast,
    )
    out = out[:rows, :columns]
    for scale in after:
        out = out * scale
    return out.to(out_dtype)


def _vector(scale: Tensor, length: int) -> Tensor:
    """Return row scales (or one tensor scale) as a contiguous vector, ones for padded rows."""
    flat = scale.reshape(-1)
    if flat.numel() == 1:
        flat = flat.expand(length)
    elif flat.numel() < length:
        flat = F.pad(flat, (0, length - flat.numel()), value=1.0)
    return flat.contiguous()


def blocked_multiply(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, out_dtype: torch.dtype) -> Tensor:
    """Multiply two operands whose scales lie inside the sum through ``F.scaled_mm``, which sums into bfloat16.

    Args:
        a, b: operands, 2-D.
        step: which axes are summed.
        out_dtype: of the product.

    Returns:
        ``[M, N]`` in ``out_dtype``.
    """
    if a.codes.numel() == 0 or b.codes.numel() == 0:
        return multiply_emulated(a, b, step, out_dtype)
    layout = {"block": _block, "mx": _mx, "nvfp4": nvfp4_layout}[a.spec.scheme]
    left, scale_a, how_a = layout(a, step.axes[0])
    right, scale_b, how_b = layout(b, step.axes[1])
    if torch.compiler.is_compiling():
        # Inductor's own lowering (torch 2.13) refuses scales in tiles, and padded ones of squares; bytes it passes on
        bytes_a, bytes_b = (
            [scale if scale.dtype is torch.float32 else scale.view(torch.uint8) for scale in scales]
            for scales in (scale_a, scale_b)
        )
        out: Tensor = torch.ops.autoprec.blocked_mm(
            left.view(torch.uint8), right.view(torch.uint8), bytes_a, bytes_b, ",".join(how_a), ",".join(how_b)
        )
    else:
        out = _blocked_mm(left, right, scale_a, scale_b, how_a, how_b)
    rows = a.rows if step.axes[0] == 1 else a.columns
    columns = b.rows if step.axes[1] == 1 else b.columns
    return out[:rows, :columns].to(out_dtype)


def _blocked_mm(
    left: Tensor,
    right: Tensor,
    scale_a: list[Tensor],
    scale_b: list[Tensor],
    how_a: Sequence[str],
    how_b: Sequence[str],
) -> Tensor:
    kind, swizzle = F.ScalingType, F.SwizzleType
    plain = swizzle.NO_SWIZZLE if "128" in how_a[0] else swizzle.SWIZZLE_32_4_4
    patterns = [plain, swizzle.NO_SWIZZLE][: len(scale_a)]
    out: Tensor = F.scaled_mm(
        left,
        right.t(),
        scale_a=scale_a,
        scale_recipe_a=[getattr(kind, name) for name in how_a],
        scale_b=scale_b,
        scale_recipe_b=[getattr(kind, name) for name in how_b],
        swizzle_a=patterns,
        swizzle_b=patterns,
        output_dtype=torch.bfloat16,
    )
    return out


#: dtypes of codes and of the scales in tiles, by the first part of how an operand is scaled.
_BYTES = {
    "BlockWise1x32": (torch.float8_e4m3fn, torch.float8_e8m0fnu),
    "BlockWise1x16": (torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
}


@torch.library.custom_op("autoprec::blocked_mm", mutates_args=())
def _blocked_mm_of_bytes(
    left: Tensor, right: Tensor, scale_a: list[Tensor], scale_b: list[Tensor], how_a: str, how_b: str
) -> Tensor:
    """Multiply codes ``[M, K]`` and ``[N, K]`` (uint8) in a compiled graph; scales are float32, or bytes in tiles."""
    first, second = how_a.split(","), how_b.split(",")
    codes, tiles = _BYTES.get(first[0], (torch.float8_e4m3fn, torch.float32))
    a, b = ([s.view(tiles) if s.dtype is torch.uint8 else s for s in found] for found in (scale_a, scale_b))
    return _blocked_mm(left.view(codes), right.view(codes), a, b, first, second)


@_blocked_mm_of_bytes.register_fake
def _blocked_shape(
    left: Tensor, right: Tensor, _scale_a: list[Tensor], _scale_b: list[Tensor], _how_a: str, _how_b: str
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=torch.bfloat16)


_Layout = tuple[Tensor, list[Tensor], tuple[str, ...]]
_NVFP4 = ("BlockWise1x16", "TensorWise")


def _matrix(operand: QuantizedOperand, axis: int) -> Tensor:
    """Return the codes as ``[outer, sum]``, contiguous, padded to whole groups along the sum."""
    size, codes, spec = GROUP_SIZES[operand.spec.scheme], operand.codes, operand.spec
    rows = codes.shape[0] * size if spec.square or spec.axis == 0 else codes.shape[0]
    flat = codes.reshape(rows, -1)
    return (flat if axis == 1 else flat.t()).contiguous()


def _scales(operand: QuantizedOperand, axis: int) -> Tensor:
    """Return group scales as ``[outer or outer groups, groups along the sum]``."""
    groups = operand.inside
    flat = groups.reshape(groups.shape[0], -1) if groups.shape[1] == 1 else groups.squeeze(-1)
    return flat if axis == 1 else flat.t()


def _outer_padded(matrix: Tensor, scales: Tensor, multiple: int, value: float) -> tuple[Tensor, Tensor]:
    """Pad the outer dimension of codes with zeros, and of their scales with ``value``."""
    missing = -matrix.shape[0] % multiple
    if missing:
        matrix = F.pad(matrix.view(torch.uint8), (0, 0, 0, missing)).view(matrix.dtype)
        scales = F.pad(scales, (0, 0, 0, missing), value=value)
    return matrix, scales


def _block(operand: QuantizedOperand, axis: int) -> _Layout:
    """Scales ``[outer, K/128]`` of tiles, or ``[K/128 padded to 4s, outer/128]`` of squares; columns contiguous."""
    matrix, scales = _matrix(operand, axis), _scales(operand, axis)
    if operand.spec.square:
        return matrix, [F.pad(scales, (0, -scales.shape[1] % 4), value=1.0).contiguous().t()], ("BlockWise128x128",)
    matrix, scales = _outer_padded(matrix, scales, MULTIPLE, 1.0)
    return matrix, [scales.t().contiguous().t()], ("BlockWise1x128",)


def tiled(scales: Tensor) -> Tensor:
    """Bring ``[rows, groups]`` of one-byte scales into cuBLAS's 128 x 4 tiles (``SWIZZLE_32_4_4``), flat.

    Rows are padded to 128 and groups to 4; within a tile, rows ``r, r + 32, r + 64, r + 96`` lie side by side.
    """
    padded = F.pad(scales.view(torch.uint8), (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
    high, wide = padded.shape[0] // 128, padded.shape[1] // 4
    tiles = padded.reshape(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def _mx(operand: QuantizedOperand, axis: int) -> _Layout:
    matrix, scales = _outer_padded(_matrix(operand, axis), _scales(operand, axis), MULTIPLE, 0)
    return matrix, [tiled(scales.contiguous().view(torch.float8_e8m0fnu))], ("BlockWise1x32",)


def nvfp4_layout(operand: QuantizedOperand, axis: int) -> _Layout:
    """Codes packed two to a byte ``[outer, K/2]``, E4M3 scales in tiles, and the tensor scale."""
    matrix, scales = _matrix(operand, axis), _scales(operand, axis)
    if operand.spec.square:  # cuBLAS has one scale per 16 values of a row
        scales = scales.view(torch.uint8).repeat_interleave(GROUP_SIZES["nvfp4"], 0).view(torch.float8_e4m3fn)
    matrix, scales = _outer_padded(matrix, scales.contiguous().view(torch.uint8), MULTIPLE, 0)
    if matrix.shape[1] % (2 * MULTIPLE):  # an odd number of groups: 16 bytes of packed codes need two
        matrix = F.pad(matrix.view(torch.uint8), (0, MULTIPLE)).view(matrix.dtype)
        scales = F.pad(scales, (0, 1))
    tensor: Any = operand.scale
    parts = [tiled(scales.contiguous().view(torch.float8_e4m3fn)), tensor.reshape(())]
    return _packed(matrix), parts, _NVFP4


def _packed(codes: Tensor) -> Tensor:
    """Pack E2M1 values, stored as E4M3 codes ``[outer, K]``, two to a byte: the first value in the low half.

    Of an E4M3 code of an E2M1 value the exponent and the top mantissa bit say which value it is; 0.5 is the only one
    below E2M1's smallest normal value.
    """
    bits = codes.view(torch.uint8).to(torch.int32)
    magnitude = bits & 0x7F
    # 1 to 6 are E4M3 exponent 7 to 9 and one mantissa bit; 0.5 is exponent 6; 0 is 0
    code = torch.where(magnitude >= 0x38, (magnitude >> 2) - 12, (magnitude >= 0x30).to(torch.int32))
    nibble = code | ((bits >> 7) << 3)
    packed = nibble[:, ::2] | (nibble[:, 1::2] << 4)
    return packed.to(torch.uint8).contiguous().view(torch.float4_e2m1fn_x2)
