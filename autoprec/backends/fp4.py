"""NVFP4 operands inside compiled graphs: two kernels for an operand, for both of its GEMMs at once.

A compiler makes 7 to 11 kernels of one NVFP4 cast, and writes float32 between them: the amax of the tensor must be
known before the first group scale, codes are packed two to a byte, scales lie in tiles, wgrad wants both transposed
and after a Hadamard transform. Here one kernel finds the amax (of the tensor as it is, and transformed) and one casts:

====================  ==========================================================================
``nvfp4_largest``     reads the operand; largest magnitudes, int32 ``[2, 512]``
``nvfp4_cast``        reads it again; packed codes and scales in cuBLAS's layouts, either or both
====================  ==========================================================================

Codes and scales are those of :mod:`autoprec.numerics.grouped` with :func:`~autoprec.numerics.rounding.hashed_noise`,
bit for bit, which is checked on the device the first time; else, and where Triton is missing, torch's operators cast.
Not run on a GPU yet.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from autoprec.backends.fused import agreed, has_kernels, launch
from autoprec.backends.scaled_mm import nvfp4_layout
from autoprec.numerics.grouped import NEGATIVE, quantize_grouped
from autoprec.numerics.operand import QuantizedOperand, Spec

#: Programs of the first kernel, whose findings every program of the second one reads.
_PROGRAMS = 512
#: Tiles of either kernel. With 128 x 128 the second needs all registers and spills (ptxas for 10.0), with this 98.
_LARGEST_TILE, _TILE = (64, 128), 64

Flags = tuple[bool, bool, bool, bool, bool]  # by row, by column, square, Hadamard, stochastic
Codes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Pair = tuple[QuantizedOperand | None, QuantizedOperand | None]


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def packed_pair(x: Tensor, first: Spec | None, second: Spec | None) -> Pair:
    """Quantise ``[rows, columns]`` for a GEMM that sums along rows, and for one that sums along columns.

    Args:
        x: float32 or bfloat16 on a GPU, in a graph that is being compiled.
        first, second: how, or None where there is no such GEMM.

    Returns:
        Two operands, whose codes are packed and whose group scales lie in tiles, both uint8; None in place of one that
        is not asked for or not NVFP4.
    """
    if not _on_gpu(x):
        return None, None
    first, second = (spec if spec is not None and spec.scheme == "nvfp4" else None for spec in (first, second))
    spec = first or second
    if spec is None:
        return None, None
    if (
        first is not None
        and second is not None
        and (first.square, first.stochastic) != (second.square, second.stochastic)
    ):
        return packed_pair(x, first, None)[0], packed_pair(x, None, second)[1]
    flags = first is not None, second is not None, spec.square, second is not None and second.hadamard, spec.stochastic
    largest = torch.ops.autoprec.nvfp4_largest(x, flags[0] or not flags[3], flags[3])
    codes, scales, turned, turned_scales, tensors = torch.ops.autoprec.nvfp4_cast(x, largest, *flags)
    rows, columns = x.shape
    return (
        None if first is None else QuantizedOperand(codes, tensors[0], first, rows, columns, scales),
        None if second is None else QuantizedOperand(turned, tensors[1], second, rows, columns, turned_scales),
    )


@torch.library.custom_op("autoprec::nvfp4_largest", mutates_args=())
def _largest(x: Tensor, plain: bool, hadamard: bool) -> Tensor:
    """Return bits of the largest magnitudes, int32 ``[2, 512]``: of ``x`` and of its transform, where asked for."""
    found = x.new_empty((2, _PROGRAMS), dtype=torch.int32)
    if not (_on_gpu(x) and has_kernels()):
        return found.zero_()  # torch's operators find them again
    tile = _LARGEST_TILE
    tiles = -(-x.shape[0] // tile[0]) * -(-x.shape[1] // tile[1])
    constants = {"PLAIN": plain, "HADAMARD": hadamard, "SIGNS": NEGATIVE, "TRIPS": -(-tiles // _PROGRAMS)}
    constants |= {"BLOCK_R": tile[0], "BLOCK_C": tile[1], "num_warps": 8}
    launch("fp4_largest_kernel", (_PROGRAMS, 1), (x, *x.shape, *x.stride(), found), constants)
    return found


@_largest.register_fake
def _largest_shape(x: Tensor, _plain: bool, _hadamard: bool) -> Tensor:
    return x.new_empty((2, _PROGRAMS), dtype=torch.int32)


def _whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _empty(x: Tensor, *, by_row: bool, by_column: bool) -> Codes:
    """Return what ``nvfp4_cast`` fills: packed codes and tiled scales along rows, along columns, and tensor scales."""

    def one(asked: bool, outer: int, inner: int) -> tuple[Tensor, Tensor]:
        if not asked:
            return x.new_empty((0,), dtype=torch.uint8), x.new_empty((0,), dtype=torch.uint8)
        codes = x.new_empty((_whole(outer, 16), _whole(inner, 32) // 2), dtype=torch.uint8)
        return codes, x.new_empty((_whole(outer, 128) * _whole(inner, 64) // 16,), dtype=torch.uint8)

    rows, columns = x.shape
    return *one(by_row, rows, columns), *one(by_column, columns, rows), x.new_empty((2,), dtype=torch.float32)


def _by_kernel(x: Tensor, largest: Tensor, flags: Flags) -> Codes:
    by_row, by_column, square, hadamard, stochastic = flags
    made = _empty(x, by_row=by_row, by_column=by_column)
    rows, columns = x.shape
    sizes = [_whole(rows, 16), _whole(columns, 32) // 2, _whole(columns, 16), _whole(rows, 32) // 2]
    sizes += [_whole(rows, 16), _whole(columns, 16)] if square else [rows, columns]
    constants = {
        "BY_ROW": by_row, "BY_COLUMN": by_column, "SQUARE": square, "HADAMARD": hadamard, "STOCHASTIC": stochastic,
        "SIGNS": NEGATIVE, "PROGRAMS": _PROGRAMS, "BLOCK_R": _TILE, "BLOCK_C": _TILE, "num_warps": 8,
    }  # fmt: skip
    grid = _whole(rows, 128) // _TILE, _whole(columns, 128) // _TILE  # whole tiles of scales are written
    launch("fp4_cast_kernel", grid, (x, rows, columns, *x.stride(), largest, *made, *sizes), constants)
    return made


def _by_torch(x: Tensor, flags: Flags) -> Codes:
    by_row, by_column, square, hadamard, stochastic = flags
    made: list[Tensor] = []
    tensors = x.new_zeros((2,), dtype=torch.float32)
    for index, asked in enumerate((by_row, by_column)):
        if not asked:
            made += [x.new_empty((0,), dtype=torch.uint8) for _ in range(2)]  # an operator's results share nothing
            continue
        axis = 1 - index
        spec = Spec(
            "nvfp4",
            "e2m1",
            -1 if square else axis,
            square=square,
            hadamard=hadamard and axis == 0,
            stochastic=stochastic,
        )
        codes, (scales, tensor), _ = nvfp4_layout(quantize_grouped(x, spec, None), axis)
        made += [codes.view(torch.uint8), scales.view(torch.uint8)]
        tensors[index] = tensor
    return made[0], made[1], made[2], made[3], tensors


def _same(device: torch.device, dtype: torch.dtype, flags: Flags) -> bool:
    x = torch.linspace(-3.0, 5.0, 144 * 208, device=device).pow(3).reshape(144, 208).to(dtype)
    ours, theirs = _by_kernel(x, _largest(x, True, flags[3]), flags), _by_torch(x, flags)
    asked = [index for index, on in enumerate(flags[:2]) if on]
    same = all(torch.equal(a, b) for a, b in zip(ours[:4], theirs[:4], strict=True))
    return same and all(torch.equal(ours[4][index], theirs[4][index]) for index in asked)


@torch.library.custom_op("autoprec::nvfp4_cast", mutates_args=())
def _cast(
    x: Tensor, largest: Tensor, by_row: bool, by_column: bool, square: bool, hadamard: bool, stochastic: bool
) -> Codes:
    """Cast ``[rows, columns]``: packed codes and tiled scales along rows, then along columns, and tensor scales."""
    flags = by_row, by_column, square, hadamard, stochastic
    same = functools.partial(_same, x.device, x.dtype, flags)
    if _on_gpu(x) and has_kernels() and agreed(("nvfp4", x.device, x.dtype, flags), x.device, same):
        return _by_kernel(x, largest, flags)
    return _by_torch(x, flags)


@_cast.register_fake
def _cast_shape(
    x: Tensor, _largest: Tensor, by_row: bool, by_column: bool, _square: bool, _hadamard: bool, _stochastic: bool
) -> Codes:
    return _empty(x, by_row=by_row, by_column=by_column)
