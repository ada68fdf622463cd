"""Storage formats of weights, gradients and optimizer state: encode an FP32 tensor into parts, decode it back.

A codec turns FP32 values into a tuple of tensors (codes first, then inverse scales) and back. Conventions:

* inverse scales are FP32 and multiply on decoding, so an all-zero block decodes to zero whatever its codes are, and
  a block that holds a non-finite value decodes to non-finite values (an overflow is never silently clamped);
* optimizer state uses *exact* scales ``max / amax``: with round-to-nearest on a power-of-two grid an exponential
  moving average stalls, because a 0.1 % step is below half a unit in the last place; an exact scale moves the grid a
  little at every step and dithers it. Weights use power-of-two scales, as MS-AMP does (arXiv 2310.18313), and so do
  the ``_tensor`` formats, which are MS-AMP's own, averages that stall included: one such scale per tensor;
* codecs of second moments lift non-zero values to the smallest code instead of flushing them to zero: a flushed
  second moment divides by epsilon, a lifted one only makes that element's update smaller. ``fp16_tensor`` alone
  flushes, as MS-AMP does.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autoprec.numerics.rounding import decode

_SMALLEST_AMAX = 1e-32  # below it max / amax overflows FP32; such a block is stored as zeros
#: The largest value of a format, and its smallest above 0 (OFP8 1.0, IEEE 754).
_FLOAT_LIMITS = {torch.float8_e4m3fn: (448.0, 2.0**-9), torch.float16: (65504.0, 2.0**-24)}


class Codec(Protocol):
    """How FP32 values are stored. ``bits`` counts codes and scales, per value, on a large tensor."""

    @property
    def name(self) -> str:
        """The policy's word for the format, e.g. ``int8_block``; the audit compares it with what was asked for."""

    @property
    def bits(self) -> float:
        """Bits per value, codes and scales, of a large tensor."""

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return the parts that store ``values`` (any shape, floating point, finite)."""

    def decode(self, parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Return a fresh FP32 tensor of ``shape``."""


@dataclass(frozen=True)
class CastCodec:
    """Round to nearest even in a dtype that needs no scale (FP32, BF16)."""

    name: str
    dtype: torch.dtype

    @property
    def bits(self) -> float:
        """Bits per value."""
        return 8.0 * self.dtype.itemsize

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return one tensor of the shape of ``values``, in the format's dtype."""
        return (values.to(self.dtype, copy=True, memory_format=torch.contiguous_format),)

    def decode(self, parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Return a fresh FP32 tensor of ``shape`` from the stored one."""
        return parts[0].to(torch.float32, copy=True).view(shape)


def _random_bits(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform int16 (all bits random), shaped like ``like``: four per draw."""
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16)[: like.numel()].view(like.shape)


@dataclass(frozen=True)
class StochasticCodec(CastCodec):
    """BF16 with stochastic rounding: the expected value is exact, so small updates survive on average.

    Without a generator it rounds to nearest (values that are on the BF16 grid already stay what they are).
    """

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return the part that stores ``values`` (any shape, floating point, finite): one tensor of their shape.

        Args:
            values: rounded up or down with a probability by their distance, so that the expected value is kept.
            generator: of the noise; without one rounding is to nearest.
        """
        if generator is None:
            return super().encode(values)
        values = values.float().contiguous()
        # Adding uniform noise below the BF16 mantissa and truncating rounds up with probability = distance.
        noise = _random_bits(values, generator).to(torch.int32).bitwise_and_(0xFFFF)
        bits = noise.add_(values.view(torch.int32)).bitwise_and_(-65536)
        return (bits.view(torch.float32).to(self.dtype),)


@dataclass(frozen=True)
class TensorCodec:
    """One scale per tensor: FP16 or FP8 codes; ``power_of_2`` scales rescale exactly."""

    name: str
    dtype: torch.dtype
    power_of_2: bool
    lift: bool = False

    @property
    def bits(self) -> float:
        """Bits per value; the one scale of a tensor does not count."""
        return 8.0 * self.dtype.itemsize

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return codes of the shape of ``values``, and the float32 factor ``[]`` that brings them back."""
        values = values.float().contiguous()
        largest, smallest = _FLOAT_LIMITS[self.dtype]
        low, high = torch.aminmax(values) if values.numel() else (values.new_zeros(()), values.new_zeros(()))
        amax = torch.maximum(high, -low)
        if self.power_of_2:
            inverse = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(_SMALLEST_AMAX) / largest)))
        else:  # 12 bits, so that largest * inverse is exact and encoding what was decoded changes nothing
            inverse = _round_mantissa(amax.clamp_min(_SMALLEST_AMAX) / largest, 12)
        scaled = values / inverse
        inverse = inverse.masked_fill(amax < _SMALLEST_AMAX, 0.0)
        if self.lift:
            scaled.clamp_min_(smallest)
        return scaled.clamp_max_(largest).to(self.dtype), inverse

    def decode(self, parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Return a fresh FP32 tensor of ``shape`` from codes and factor."""
        return decode(parts[0], torch.float32).mul_(parts[1]).view(shape)


def _round_mantissa(values: Tensor, keep: int) -> Tensor:
    """Round positive FP32 values to ``keep`` stored mantissa bits (infinities and NaN stay what they are)."""
    drop = 23 - keep
    bits = values.contiguous().view(torch.int32).add(1 << (drop - 1)).bitwise_and_(-(1 << drop))
    return torch.where(torch.isfinite(values), bits.view(torch.float32), values)


def _blocks(values: Tensor, size: int) -> Tensor:
    """Return ``values`` flattened to (blocks, size), zero-padded at the end."""
    flat = values.float().reshape(-1)
    short = -flat.numel() % size
    return (torch.nn.functional.pad(flat, (0, short)) if short else flat).view(-1, size)


def _trimmed(codes: Tensor, count: int) -> Tensor:
    """Return the first ``count`` codes without keeping the padding alive."""
    return codes if codes.numel() == count else codes[:count].clone()


def _scale_blocks(values: Tensor, inverse: Tensor, size: int, shape: torch.Size) -> Tensor:
    """Multiply flat FP32 values by the scales of their blocks, in place."""
    whole = values.numel() // size
    values[: whole * size].view(-1, size).mul_(inverse[:whole].view(-1, 1))
    if whole < inverse.numel():  # the last block is short
        values[whole * size :].mul_(inverse[whole])
    return values.view(shape)


class _InBlocks:
    """What codecs share that keep one exact FP32 scale per ``size`` consecutive values, and eight bits of each."""

    size: int

    @property
    def bits(self) -> float:
        return 8.0 + 32.0 / self.size


@dataclass(frozen=True)
class BlockCodec(_InBlocks):
    """E4M3 codes with one exact FP32 scale per ``size`` consecutive values."""

    name: str
    size: int = 128

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return codes ``[values]`` in E4M3, and float32 factors ``[blocks]``."""
        blocks = _blocks(values, self.size)
        amax = torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_())
        # 20 mantissa bits make 448 * inverse exact: encoding what was decoded changes nothing (exact resume).
        inverse = _round_mantissa(amax.clamp_min(_SMALLEST_AMAX) / 448.0, 20)
        # The scale brings the largest value to 448 up to a rounding, which the cast rounds back to 448.
        codes = (blocks * inverse.reciprocal()).to(torch.float8_e4m3fn).view(-1)
        inverse.masked_fill_(amax < _SMALLEST_AMAX, 0.0)
        return _trimmed(codes.view(torch.uint8), values.numel()).view(torch.float8_e4m3fn), inverse.view(-1)

    def decode(self, parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Return a fresh FP32 tensor of ``shape`` from codes and factors."""
        return _scale_blocks(decode(parts[0], torch.float32), parts[1], self.size, shape)


@functools.cache
def _dynamic_map(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 256 values of dynamic tree quantisation (arXiv 2110.02861), and each decade's slope and offset.

    Decade ``d`` holds ``2 ** (d + 1)`` evenly spaced codes from ``2 ** (d + 1) - 1`` on; code 0 is 0, code 255 is 1.
    """
    values, slopes, offsets = [0.0, 1.0], [], []
    for decade in range(7):
        count, unit = 2 ** (decade + 1), 10.0 ** (decade - 6)
        values += [(0.1 + 0.9 * (step + 0.5) / count) * unit for step in range(count)]
        slopes.append(count / 0.9 / unit)
        offsets.append(count - 1 - count / 9.0)
    table, slope, offset = (torch.tensor(x, dtype=torch.float32, device=device) for x in (values, slopes, offsets))
    return table.sort().values, slope, offset


@dataclass(frozen=True)
class MapCodec(_InBlocks):
    """Eight-bit dynamic map with one exact FP32 scale per ``size`` values.

    The map spaces values logarithmically from 5.5e-7 to 1 of the block's largest (bitsandbytes, torchao AdamW8bit). It
    is for second moments: nothing is negative, and nothing non-zero becomes zero.
    """

    name: str = "int8_block"
    size: int = 256

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return codes ``[values]`` in uint8, and float32 factors ``[blocks]``; values are at least 0."""
        blocks = _blocks(values, self.size)
        _, slopes, offsets = _dynamic_map(blocks.device)
        amax = blocks.amax(1, keepdim=True)
        inverse = amax.masked_fill(amax < _SMALLEST_AMAX, 0.0)
        share = (blocks * amax.clamp_min(_SMALLEST_AMAX).reciprocal()).view(-1)
        # Which decade below 1 (0: 1e-7 to 1e-6, ... 6: 0.1 to 1), then linearly within it: code = slope x + offset.
        decade = share.log10().add_(7.0).clamp_(0.0, 6.0).to(torch.int32)
        found = slopes.index_select(0, decade).mul_(share).add_(offsets.index_select(0, decade))
        codes = found.clamp_(1.0, 255.0).to(torch.uint8)  # code 0 is zero: lifted
        return _trimmed(codes, values.numel()), inverse.view(-1)

    def decode(self, parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Return a fresh FP32 tensor of ``shape`` from codes and factors."""
        return _scale_blocks(_look_up(parts[0]), parts[1], self.size, shape)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Return, for every two neighbouring codes, their two FP32 values as one 64-bit number (little-endian)."""
    values = _dynamic_map(device)[0]
    return torch.stack([values.repeat(256), values.repeat_interleave(256)], dim=1).view(torch.int64).view(-1)


def _look_up(codes: Tensor) -> Tensor:
    """Return the FP32 values of the dynamic map's codes: on a CPU two at a time, ten times as fast."""
    codes = codes.view(-1)
    if codes.device.type == "cpu" and codes.numel() % 2 == 0 and not codes.storage_offset() % 2 and _LITTLE_ENDIAN:
        return _pairs(codes.device).index_select(0, codes.view(torch.uint16).to(torch.int32)).view(torch.float32)
    return _dynamic_map(codes.device)[0].index_select(0, codes.to(torch.int32))


_LITTLE_ENDIAN = sys.byteorder == "little"


@dataclass(frozen=True)
class PairCodec:
    """A weight that is computed with in low precision and remembered in higher: compute value and what it lacks.

    With ``residual`` the second half stores ``values - compute`` (Kahan compensation in BF16: 16 bits of mantissa in
    two BF16 numbers); without, the second half is a whole master copy (MS-AMP O3).
    """

    name: str
    compute: Codec
    memory: Codec
    residual: bool

    @property
    def bits(self) -> float:
        """Bits per value of both parts."""
        return self.compute.bits + self.memory.bits

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return the parts that store ``values`` (any shape, floating point, finite).

        First those of what is computed with, then those of what is remembered.

        Args:
            values: what the optimizer updated.
            generator: of the noise of stochastic rounding, for what is computed with.
        """
        if not self.residual:
            memory = self.memory.encode(values)
            return (*self.compute.encode(self.memory.decode(memory, values.shape), generator), *memory)
        low = self.compute.encode(values, generator)
        rest = self.memory.encode(values.float() - self.compute.decode(low, values.shape))
        # The rounded rest may reach exactly half a step: splitting the sum again makes encoding idempotent.
        exact = self.exact((*low, *rest), values.shape)
        low = self.compute.encode(exact)
        return (*low, *self.memory.encode(exact - self.compute.decode(low, values.shape)))

    def decode(self, parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Return a fresh FP32 tensor of ``shape``: what the model computes with."""
        return self.compute.decode(parts[: self._split(parts)], shape)

    def exact(self, parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Return what the optimizer updates, FP32 of ``shape``: the value with everything that is remembered of it."""
        at = self._split(parts)
        memory = self.memory.decode(parts[at:], shape)
        return memory.add_(self.compute.decode(parts[:at], shape)) if self.residual else memory

    @staticmethod
    def _split(parts: tuple[Tensor, ...]) -> int:
        return len(parts) // 2


_BF16, _FP16 = CastCodec("bf16", torch.bfloat16), TensorCodec("fp16_scaled", torch.float16, power_of_2=True)
_E4M3 = TensorCodec("e4m3", torch.float8_e4m3fn, power_of_2=True)

#: (what is stored, the policy's word for it) -> codec. FP32 needs none. A new one also needs its word in
#: ``policy/schema.py`` (``OptimizerPolicy``) and its bytes in ``cost/rest.py``.
CODECS: dict[tuple[str, str], Codec] = {
    ("weights", "fp16_scaled"): _FP16,
    ("weights", "bf16_stochastic"): StochasticCodec("bf16_stochastic", torch.bfloat16),
    ("weights", "bf16_kahan"): PairCodec("bf16_kahan", _BF16, _BF16, residual=True),
    ("weights", "e4m3_master"): PairCodec("e4m3_master", _E4M3, _FP16, residual=False),
    ("exp_avg", "bf16"): CastCodec("bf16", torch.bfloat16),
    ("exp_avg", "e4m3"): BlockCodec("e4m3"),
    ("exp_avg", "e4m3_tensor"): TensorCodec("e4m3_tensor", torch.float8_e4m3fn, power_of_2=True),
    ("exp_avg_sq", "fp16_scaled"): TensorCodec("fp16_scaled", torch.float16, power_of_2=False, lift=True),
    ("exp_avg_sq", "fp16_tensor"): TensorCodec("fp16_tensor", torch.float16, power_of_2=True),
    ("exp_avg_sq", "int8_block"): MapCodec(),
    ("gradients", "bf16"): CastCodec("bf16", torch.bfloat16),
    ("gradients", "e4m3"): BlockCodec("e4m3"),
    ("gradients", "e4m3_tensor"): TensorCodec("e4m3_tensor", torch.float8_e4m3fn, power_of_2=True),
}


def codec(what: str, name: str) -> Codec | None:
    """Return the codec that stores ``what`` under the policy's ``name``; None for plain FP32."""
    return None if name == "fp32" else CODECS[what, name]
