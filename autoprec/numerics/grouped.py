"""Scales that lie inside the sum of a GEMM: FP8 blocks, MXFP8 and NVFP4.

========  ==================================================  =====================================================
scheme    groups                                              scale
========  ==================================================  =====================================================
block     128 values along the contraction axis; 128 x 128    float32, or a power of two (DeepSeek-V3, arXiv
          for the weight                                      2412.19437 section 3.3; Transformer Engine's default)
mx        32 along the contraction axis                       E8M0, rounded up so that nothing saturates (OCP MX 1.0;
                                                              the ``cvt.rp.satfinite.ue8m0x2`` rule of Blackwell)
nvfp4     16 along the contraction axis; optionally 16 x 16   E4M3 per group times one float32 per tensor (NVIDIA
          for the weight                                      NVFP4 pretraining, arXiv 2509.25149)
========  ==================================================  =====================================================

Sizes that are not multiples of the group are padded with zeros, which change neither a scale nor a sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.operand import QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.rounding import (
    decode,
    encode,
    hashed_noise,
    number,
    round_e2m1,
    round_e2m1_stochastic,
    stores_values,
)
from autoprec.numerics.scaling import inverse_of, scale_of
from autoprec.numerics.sharded import reduced

#: Values per scale along the contraction axis (and across it, for square groups).
GROUP_SIZES = {"block": 128, "mx": 32, "nvfp4": 16}
#: The random signs of Transformer Engine's 16 x 16 Hadamard transform, bit i for column i (1: negative): fixed, so that
#: both operands use the same. Kept as an integer, which needs no copy to the device.
NEGATIVE = 0b1101_0111_1110_1000


def _grouped(x: Tensor, spec: Spec) -> tuple[Tensor, tuple[int, ...]]:
    """Return ``x`` padded and viewed so that every group lies along the returned dimensions."""
    size = GROUP_SIZES[spec.scheme]
    rows, columns = x.shape
    pad_rows = -rows % size if spec.square or spec.axis == 0 else 0
    pad_columns = -columns % size if spec.square or spec.axis == 1 else 0
    if pad_rows or pad_columns:
        x = F.pad(x, (0, pad_columns, 0, pad_rows))
    rows, columns = x.shape
    if spec.square:
        return x.reshape(rows // size, size, columns // size, size), (1, 3)
    if spec.axis == 0:
        return x.reshape(rows // size, size, columns), (1,)
    return x.reshape(rows, columns // size, size), (2,)


def _group_amax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros([1 if d in dims else n for d, n in enumerate(x.shape)], dtype=torch.float32)
    return x.abs().amax(dims, keepdim=True).float()


def encode_e8m0(amax: Tensor, limit: float) -> Tensor:
    """Return the E8M0 code of the smallest power of two that keeps ``amax`` within ``limit``; 255 is NaN.

    Zero and everything below ``2**-127`` get code 0, infinity gets 254.

    Args:
        amax: largest magnitudes, float32 of any shape.
        limit: the largest value of the element format.

    Returns:
        Codes of the shape of ``amax``, uint8.
    """
    # by exponents and mantissas: compiled for a GPU a quotient may be off by two units of its last place, and where it
    # should be a power of two the scale would be the next one
    mantissa, exponent = math.frexp(limit)
    bits = amax.view(torch.int32)
    above = (bits & 0x7FFFFF) > int((2 * mantissa - 1) * 2**23)
    code = ((bits >> 23) - (exponent - 1) + above).clamp_(0, 254)
    code = torch.where(amax.isinf(), 254, code)
    return torch.where(amax.isnan(), 255, code).to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """Return the float32 value of E8M0 codes, uint8 of any shape: ``2**(code - 127)``, NaN for 255."""
    wide = code.to(torch.int32)
    value = torch.where(wide == 0, 0x400000, wide << 23).view(torch.float32)
    return torch.where(wide == 255, torch.nan, value)


def _reciprocal_e8m0(code: Tensor) -> Tensor:
    """Return what values are multiplied by; code 0 multiplies by 1, so that what lies below it becomes zero."""
    wide = code.to(torch.int32)
    value = torch.where(wide == 254, 0x400000, (254 - wide) << 23).view(torch.float32)
    value = torch.where(wide == 0, 1.0, value)
    return torch.where(wide == 255, torch.nan, value)


def _block(x: Tensor, dims: tuple[int, ...], spec: Spec, values: bool) -> tuple[Tensor, Tensor]:
    scaling, limit = spec.rule, number(spec.format)
    amax = _group_amax(x, dims)
    scale = scale_of(amax, limit, power_of_2=scaling.power_of_2, epsilon=scaling.epsilon)
    return encode(x * scale, spec.format, bounded=True, in_place=values), inverse_of(scale, amax)


def _mx(x: Tensor, dims: tuple[int, ...], spec: Spec, values: bool) -> tuple[Tensor, Tensor]:
    code = encode_e8m0(_group_amax(x, dims), number(spec.format))
    return encode(x * _reciprocal_e8m0(code), spec.format, in_place=values), code


def _nvfp4(
    x: Tensor, dims: tuple[int, ...], spec: Spec, state: QuantizerState | None, values: bool, over: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return E2M1 values (stored as E4M3), E4M3 group scales and the float32 tensor scale; see torchao's NVFP4."""
    group = _group_amax(x, dims)
    amax = reduced(group.amax() if group.numel() else group.new_zeros(()), over)
    # a GPU divides by a tensor, by a number it multiplies by a rounded reciprocal
    limit, most = amax.new_full((), number("e4m3") * number("e2m1")), amax.new_full((), number("e2m1"))
    tensor = amax / limit
    # where the quotient underflows the tensor scale would divide by zero
    tensor = torch.where((tensor > 0) & tensor.isfinite(), tensor, 1.0)
    # at least the smallest normal E4M3 value, as in torchao
    wanted = (group / most / tensor).clamp(2.0**-6, number("e4m3"))
    scale = wanted.nan_to_num(nan=1.0).to(torch.float8_e4m3fn)
    scaled = x * (tensor.reciprocal() / scale.float())
    if not spec.stochastic:
        rounded = round_e2m1(scaled)
    elif state is None or torch.compiler.is_compiling():
        rounded = round_e2m1_stochastic(scaled, hashed_noise(scaled, amax))
    else:
        noise = torch.rand(scaled.shape, generator=state.generator(x.device), device=x.device, dtype=torch.float32)
        rounded = round_e2m1_stochastic(scaled, noise)
    stored = torch.bfloat16 if stores_values(x.device) else torch.float8_e4m3fn
    return (
        rounded if values else rounded.to(stored),
        scale,
        torch.where(amax.isfinite(), tensor, torch.nan).reshape(1, 1),
    )


def hadamard(x: Tensor) -> Tensor:
    """Multiply groups of 16 rows of a matrix by the signed 16 x 16 Hadamard matrix.

    The matrix is orthogonal, so transforming both operands of a GEMM along its contraction axis leaves the exact
    product unchanged while spreading outliers over the group. Four rounds of sums and differences compute it, in an
    order of their own: every device gives the same bits.

    Args:
        x: ``[rows, columns]``, rows a multiple of 16; any float dtype.

    Returns:
        ``[rows, columns]``, float32.
    """
    rows, columns = x.shape
    signs = 1 - 2 * ((NEGATIVE >> torch.arange(16, device=x.device)) & 1)
    y = x.float().reshape(rows // 16, 16, columns) * signs.unsqueeze(1)
    for span in (1, 2, 4, 8):
        a, b = y.reshape(rows // (2 * span), 2, span * columns).unbind(1)
        y = torch.stack([a + b, a - b], 1)
    return y.reshape(rows, columns) * 0.25


def quantize_grouped(
    x: Tensor, spec: Spec, state: QuantizerState | None, values: bool = False, *, groups: tuple[Any, ...] = ()
) -> QuantizedOperand:
    """Quantise a matrix in groups; see the module's table.

    Args:
        x: ``[rows, columns]``, any float dtype.
        spec: scheme and axis of the groups.
        state: what the layer remembers; without it what is random is hashed, as in compiled graphs.
        values: keep the codes' values as float32 (:func:`~autoprec.numerics.quantize.quantize`).
        groups: process groups over which the tensor is cut; NVFP4's scale of the whole tensor is that of all parts.
    """
    rows, columns = x.shape
    x = x.float() if x.dtype is torch.float64 else x
    if spec.hadamard:
        x = hadamard(F.pad(x, (0, 0, 0, -rows % 16)))
    view, dims = _grouped(x, spec)
    tensor_scale: Tensor | None = None
    if spec.scheme == "block":
        codes, scale = _block(view, dims, spec, values)
    elif spec.scheme == "mx":
        codes, scale = _mx(view, dims, spec, values)
    else:
        codes, scale, tensor_scale = _nvfp4(view, dims, spec, state, values, groups)
    return QuantizedOperand(codes, tensor_scale, spec, rows, columns, scale)


def grouped_values(operand: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """Return the values the GEMM multiplies, tensor scale not applied; padding cropped where it is not part of the sum.

    After a Hadamard transform padded rows hold values, and both operands keep them.

    Args:
        operand: quantised in groups.
        dtype: of the result.

    Returns:
        ``[rows, columns]``; with a Hadamard transform rows are those of whole groups.
    """
    codes, scale, spec = operand.codes, operand.inside, operand.spec
    wide = decode_e8m0(scale) if spec.scheme == "mx" else scale
    values = decode(codes, dtype) * wide.to(dtype)
    size = GROUP_SIZES[spec.scheme]
    rows = codes.shape[0] * size if spec.square or spec.axis == 0 else codes.shape[0]
    values = values.reshape(rows, -1)
    keep = rows if spec.hadamard else operand.rows
    return values[:keep, : operand.columns]
