"""MXFP8 operands of grouped GEMMs on Blackwell: codes and E8M0 scales where ``torch._scaled_grouped_mm`` reads them.

Scales lie in cuBLAS's 128 x 4 tiles, and every group begins a tile of its own:

======  ==========================  ==============================================================================
GEMM    codes                       scales
======  ==========================  ==============================================================================
fprop   tokens ``[M, K]``           the rows of each group padded to 128, in tiles
dgrad   weights ``[E, N, K]``       ``[E, tiles of N x K/32]``
wgrad   ``[N, T]``, ``[K, T]``      the scales of each group along T padded to 4, its tiles row of tiles by row
======  ==========================  ==============================================================================

``T``: each group of tokens padded with zeros to a multiple of 32, at least 32, because a kernel leaves the result of an
empty sum as it finds it. Sizes are upper bounds, so that the host waits for none.

Written after torch's ``GroupedBlas.cpp`` (2.11, 2.13), the kernel that MSLK (before it FBGEMM) brings into torch
(``grouped_common.cuh`` says where the scales of a group begin) and torchao 0.18's ``mxfp8_grouped_mm``. Their tests
group multiples of 32 tokens; fprop and dgrad here group any number, to which the kernel's source has no objection. Not
run on a GPU yet.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.backends.scaled_mm import tiled
from autoprec.numerics.operand import Spec
from autoprec.numerics.quantize import quantize

#: Values that share a scale (OCP Microscaling Formats 1.0), and rows and columns of cuBLAS's tile of scales.
_GROUP, _TILE = 32, (128, 4)


def padded_ends(ends: Tensor, multiple: int, *, least: int = 1) -> Tensor:
    """Return where groups end once each has a multiple of ``multiple`` rows, ``least`` multiples or more.

    Args:
        ends: integers ``[E]``: the row after each group's last one.
        multiple: of rows.
        least: multiples that an empty group has as well.

    Returns:
        ``[E]``, int32.
    """
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return (((sizes + (multiple - 1)) // multiple).clamp(min=least) * multiple).cumsum(0, dtype=torch.int32)


def padded_width(rows: int, count: int, multiple: int) -> int:
    """Return an upper bound of the last padded end, a multiple of ``multiple``, that needs no look at the groups.

    Args:
        rows: of all groups together.
        count: of groups.
        multiple: of rows that each group has.
    """
    return (rows + multiple - 1) // multiple * multiple + multiple * count


def padded_rows(ends: Tensor, padded: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for ``width`` rows of padded groups: the row each holds, whether it holds one, and its group.

    Args:
        ends: integers ``[E]``: the row after each group's last one.
        padded: ``[E]``, int32, of :func:`padded_ends`.
        width: of the result, see :func:`padded_width`.

    Returns:
        Three tensors ``[width]``: int32, bool, integers.
    """
    at = torch.arange(width, dtype=torch.int32, device=ends.device)
    group = torch.searchsorted(padded, at, right=True).clamp(max=ends.shape[0] - 1)
    begins, starts = (F.pad(stops, (1, 0))[:-1][group] for stops in (padded, ends))
    source = at - begins + starts
    held = source < ends[group]
    return torch.where(held, source, 0), held, group


def _codes(x: Tensor, spec: Spec, axis: int, operand: str) -> tuple[Tensor, Tensor]:
    """Quantise ``[rows, columns]``, whole groups along ``axis``: codes of that shape, E8M0 scales as uint8."""
    made = quantize(x, replace(spec, axis=axis), operand=operand)
    return made.codes.reshape(x.shape), made.inside.squeeze(1 + axis)


def mx_rows(x: Tensor, ends: Tensor, spec: Spec, operand: str) -> tuple[Tensor, Tensor]:
    """Quantise ``[M, K]`` along its rows: codes, and scales of groups of rows in tiles, ``[rows, K/32]`` padded.

    Args:
        x: ``[M, K]``, rows ordered by group.
        ends: integers ``[E]``: the row after each group's last one.
        spec: of MXFP8 codes.
        operand: ``input``, ``weight`` or ``grad_output``.
    """
    codes, scales = _codes(x, spec, 1, operand)
    width = padded_width(x.shape[0] // _TILE[0] * _TILE[0], ends.shape[0], _TILE[0])
    source, held, _ = padded_rows(ends, padded_ends(ends, _TILE[0], least=0), width)
    return codes.contiguous(), tiled(torch.where(held.unsqueeze(1), scales[source], 0)).view(width, -1)


def mx_matrices(weight: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Quantise ``[E, outer, sum]`` along its last dimension: contiguous codes, scales in tiles, ``[E, ...]``."""
    count, outer, summed = weight.shape
    codes, scales = _codes(weight.reshape(count * outer, summed), spec, 1, "weight")
    scales = F.pad(scales.view(count, outer, -1), (0, 0, 0, -outer % _TILE[0]))
    return codes.view(count, outer, summed), tiled(scales.reshape(-1, summed // _GROUP)).view(count, -1)


def mx_columns(x: Tensor, ends: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise ``[M, columns]`` for sums over each group: codes ``[columns, T]``, scales in tiles, ends in ``T``.

    Args:
        x: ``[M, columns]``, rows ordered by group.
        ends: integers ``[E]``: the row after each group's last one.
        spec: of MXFP8 codes.
    """
    count, columns = ends.shape[0], x.shape[1]
    padded, width = padded_ends(ends, _GROUP), padded_width(x.shape[0], ends.shape[0], _GROUP)
    source, held, _ = padded_rows(ends, padded, width)
    codes, scales = _codes(torch.where(held.unsqueeze(1), x[source], 0), spec, 0, "input")
    # tiles one after the other: those of a group lie together, row of tiles by row, however wide the group is
    first = F.pad(padded, (1, 0)) // _GROUP
    wide = (torch.diff(first) + _TILE[1] - 1) // _TILE[1]
    stops = wide.cumsum(0, dtype=torch.int32)
    high, most = -(-columns // _TILE[0]), width // _GROUP // _TILE[1] + count
    tile = torch.arange(high * most, dtype=torch.int32, device=x.device)
    group = torch.searchsorted(stops * high, tile, right=True).clamp(max=count - 1)
    inside = tile - (stops - wide)[group] * high
    down, right = inside // wide[group], inside % wide[group]
    lane = torch.arange(_TILE[0] * _TILE[1], dtype=torch.int32, device=x.device)
    row = down.unsqueeze(1) * _TILE[0] + lane // _TILE[1] % 4 * 32 + lane // 16
    column = first[group].unsqueeze(1) + right.unsqueeze(1) * _TILE[1] + lane % _TILE[1]
    valid = (row < columns) & (column < first[group + 1].unsqueeze(1))
    tiles = torch.where(valid, scales[torch.where(valid, column, 0), torch.where(valid, row, 0)], 0)
    return codes.t().contiguous(), tiles.view(high * _TILE[0], -1), padded


def mx_product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    """Multiply ``[M, K]`` by ``[E, N, K]``, or ``[N, T]`` by ``[K, T]`` group by group, scales in tiles; bfloat16.

    Args:
        a, b: codes, and their scales in tiles (uint8).
        ends: ``[E]``, int32: where each group ends, in rows or in ``T``.
    """
    if not torch.compiler.is_compiling():
        return _product(a[0], b[0], a[1], b[1], ends)
    # Inductor knows neither these scales nor their dtype; bytes it passes on
    codes = (x[0].view(torch.uint8) for x in (a, b))
    out: Tensor = torch.ops.autoprec.grouped_mx(*codes, a[1], b[1], ends)
    return out


def _product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    first, second = (scale.view(torch.float8_e8m0fnu) for scale in (scale_a, scale_b))
    b = b.transpose(-2, -1)
    out: Tensor = torch._scaled_grouped_mm(a, b, first, second, offs=ends, out_dtype=torch.bfloat16)
    return out


@torch.library.custom_op("autoprec::grouped_mx", mutates_args=())
def _product_of_bytes(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    """:func:`mx_product` in a compiled graph, of bytes."""
    return _product(a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), scale_a, scale_b, ends)


@_product_of_bytes.register_fake
def _product_shape(a: Tensor, b: Tensor, _scale_a: Tensor, _scale_b: Tensor, ends: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[1]) if b.ndim == 3 else (ends.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=torch.bfloat16)
