"""Rounding to and reading back each number format, with explicit clamping.

Casting semantics of 8-bit formats differ between torch versions (2.13 saturates E4M3 and sends infinity to 448, older
versions give NaN; E5M2 overflows to infinity in all of them), so nothing here relies on them: values are clamped to
the largest finite value first, and NaN stays NaN. Reading E4M3 back through torch's own cast is the bottleneck of CPU
emulation (7.5 ns per value); moving the bits by hand is four times faster and bit-exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.precision.formats import FORMATS
from autoprec.precision.hardware import cpu_bf16_units, cpu_int8_units

#: torch dtype in which codes of a format are stored (E2M1 codes are kept as E4M3, which holds every E2M1 value).
STORAGE: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float8_e4m3fn,
    "int8": torch.int8,
}
#: Floating-point dtypes of 16 bits, in which sums and updates lose what fp32 keeps.
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_FP32_FROM_E4M3 = 0x87F00000 - (1 << 32)  # sign, four bits of exponent, three of mantissa
#: Half a unit of TF32's ten bits of the fraction in fp32's 23, and the bits that TF32 keeps.
_TF32_HALF, _TF32_MASK = 1 << 12, -(1 << 13)


#: asked once, outside of any graph that torch.compile may trace
_FAST_ON_CPU = bool(cpu_bf16_units())
#: whether torch._int_mm is right and fast on this CPU; flags that cannot be read are not an x86 CPU's
INTEGER_UNITS_ON_CPU = cpu_int8_units() != ()


def number(text: str) -> float:
    """Return the number that is written as ``text``, or the largest value of the format of that name.

    For what layers compute with in a graph: where a script compiles with ``dynamic=True``, Dynamo makes every float
    that it reads an input of the graph, and torch 2.13 fails where two ``autograd.Function`` read the same one. What
    this function returns is a constant.
    """
    return FORMATS[text].max if text in FORMATS else float(text)


number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result, unloaded


def fast_bf16_gemm(device_type: str) -> bool:
    """Say whether bfloat16 GEMMs are faster than float32 ones on a device; asked of the hardware, never timed.

    A timed probe could answer differently in two processes and break the pairing of trials.
    """
    return device_type != "cpu" or _FAST_ON_CPU


def stores_values(device: torch.device) -> bool:
    """Say whether "codes" are the rounded values themselves, as bfloat16: inside a graph compiled for a CPU.

    The compiler fuses rounding on the float32 grid with the scaling around it and runs it eight times faster than casts
    through an 8-bit dtype; the values are the same, and what is saved for backward takes two bytes instead of one.
    """
    return device.type == "cpu" and torch.compiler.is_compiling()


def encode(x: Tensor, format_name: str, *, bounded: bool = False, in_place: bool = False) -> Tensor:
    """Round scaled values to the nearest of ``e4m3`` or ``e5m2``, ties to even.

    Finite overflow and infinities saturate to the largest finite value; NaN stays NaN.

    Args:
        x: of any shape, float32 or bfloat16, already scaled.
        format_name: ``e4m3`` or ``e5m2``.
        bounded: promises that ``|x|`` rounds to at most the largest value already (scales taken from this very tensor),
            and saves the clamp.
        in_place: return the values instead of codes, in the memory of ``x`` (float32): five passes over it take half
            the time that a CPU needs for a cast to 8 bits and back.

    Returns:
        Codes of the shape of ``x`` in the format's dtype; bfloat16 values where the device stores those; ``x`` itself
        where ``in_place``.
    """
    f, largest = FORMATS[format_name], number(format_name)
    if stores_values(x.device):
        return split_to_grid(x.float(), f.mantissa, f.min_exponent, largest).to(torch.bfloat16)
    if in_place:
        return to_grid_(x if bounded else x.clamp_(-largest, largest), f.mantissa, f.min_exponent)
    if not bounded:
        x = x.clamp(-largest, largest)
    return x.to(STORAGE[format_name])


def decode(codes: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Read 8-bit codes, of any shape, back as ``dtype``; bfloat16 holds every value of E4M3 and E5M2 exactly.

    NaN codes of E4M3 may read back as a finite value: whoever scales marks non-finite tensors with a NaN scale.
    """
    if codes.dtype in (torch.bfloat16, torch.float32):
        return codes.to(dtype)
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # seeeemmm: sign-extend, move exponent and mantissa up to the wider format's, clear the copied signs, rebias
    if codes.dtype is torch.float8_e4m3fn and dtype is torch.bfloat16:
        bits = codes.view(torch.int8).to(torch.int16).mul_(16).bitwise_and_(-30736)
        return bits.view(torch.bfloat16).mul_(2.0**120)  # bias 127 of bf16 and float32 minus bias 7 of e4m3
    if codes.dtype is torch.float8_e4m3fn and dtype is torch.float32:
        bits = codes.view(torch.int8).to(torch.int32).mul_(1 << 20).bitwise_and_(_FP32_FROM_E4M3)
        return bits.view(torch.float32).mul_(2.0**120)
    if codes.dtype is torch.float8_e5m2:  # the upper half of a float16
        return codes.view(torch.int8).to(torch.int16).mul_(256).view(torch.float16).to(dtype)
    return codes.to(dtype)


def to_grid(x: Tensor, mantissa: int, min_exponent: int, limit: float) -> Tensor:
    """Round float32 values to the grid of a smaller float, ties to even, staying in float32; fuses under compile.

    Adding and subtracting ``1.5 * 2**(23 - mantissa)`` times the value's power of two makes the float32 adder do the
    rounding; below ``2**min_exponent`` the grid is the subnormal one. NaN stays NaN, overflow saturates to ``limit``.

    Args:
        x: of any shape, float32.
        mantissa: explicit bits of the format's mantissa.
        min_exponent: exponent of its smallest normal value.
        limit: its largest value.
    """
    return to_grid_(x.clamp(-limit, limit), mantissa, min_exponent)


def to_grid_(x: Tensor, mantissa: int, min_exponent: int) -> Tensor:
    """Do in place what :func:`to_grid` does, to values that its limit does not cut off.

    Args:
        x: of any shape, float32; is changed, and returned.
        mantissa: explicit bits of the format's mantissa.
        min_exponent: exponent of its smallest normal value.
    """
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    magic = power.clamp_(min=2.0**min_exponent).mul_(1.5 * 2.0 ** (23 - mantissa))
    return x.add_(magic).sub_(magic)


def split_to_grid(x: Tensor, mantissa: int, min_exponent: int, limit: float) -> Tensor:
    """Compute what :func:`to_grid` computes without looking at bits, three times faster in a graph compiled for a CPU.

    A compiler that also converts to bfloat16 in the same loop does not vectorise a reinterpretation of bits. This is
    Veltkamp's splitting, ``q - (q - x)`` with ``q = (2**s + 1) x``; it needs every product rounded by itself, which
    Triton does not promise.

    Args:
        x: of any shape, float32.
        mantissa: explicit bits of the format's mantissa.
        min_exponent: exponent of its smallest normal value.
        limit: its largest value.
    """
    x = x.clamp(-limit, limit)
    q = x * (2.0 ** (23 - mantissa) + 1.0)
    magic = 2.0**min_exponent * 1.5 * 2.0 ** (23 - mantissa)
    return torch.where(x.abs() < 2.0**min_exponent, (x + magic) - magic, q - (q - x))


def round_e2m1(x: Tensor) -> Tensor:
    """Round float32 values of any shape to E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), ties to even, saturating at 6."""
    return split_to_grid(x, 1, 0, 6.0) if stores_values(x.device) else to_grid(x, 1, 0, 6.0)


def round_e2m1_stochastic(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 values to one of their two E2M1 neighbours, so that the expected value is ``x``; saturates at 6.

    ``noise`` is uniform in [0, 1), of the shape of ``x``.
    """
    magnitude = x.abs().clamp_(max=6.0)
    # the power of two below the value, from 1 up, is twice the spacing of E2M1 there
    power = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
    spacing = power.clamp_(min=1.0).mul_(0.5)
    return magnitude.div_(spacing).add_(noise).floor_().mul_(spacing).clamp_(max=6.0).copysign_(x)


def hashed_noise(x: Tensor, salt: Tensor) -> Tensor:
    """Return numbers in [0, 1) of the shape of ``x`` that look random: a hash of each value's position, bits and salt.

    For compiled graphs, which cannot draw from a private stream, and must not draw from torch's. The salt (a float32
    scalar, such as the tensor's amax) makes a step differ from the last. Twice multiplied and folded, 32 bits in int64.

    Args:
        x: float32, contiguous.
        salt: float32, one value.
    """
    position = torch.arange(x.numel(), device=x.device, dtype=torch.int64).view(x.shape)
    values, salted = (t.view(torch.int32).to(torch.int64) & 0xFFFFFFFF for t in (x, salt.reshape(())))
    bits = (position * 0x2545F491 + values * 0x632BE5AB & 0xFFFFFFFF) + salted * 0x45D9F3B & 0xFFFFFFFF
    for _ in range(2):
        bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & 0xFFFFFFFF
    return (((bits >> 16) ^ bits) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def cast_values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as float32 that holds only values of ``dtype``; its gradient is rounded to ``dtype`` as well.

    A product of such operands, rounded to ``dtype``, is what a GEMM in ``dtype`` with float32 accumulation gives, up to
    the order of its sums.

    Args:
        x: of any shape and float dtype.
        dtype: whose values are kept.
    """
    return x.to(dtype).to(torch.float32)


def round_tf32(x: Tensor) -> Tensor:
    """Round float32 of any shape to TF32's 10 mantissa bits, ties to even; infinities and NaN pass through."""
    bits = x.view(torch.int32)
    odd = (bits >> 13) & 1
    rounded = ((bits + (_TF32_HALF - 1) + odd) & _TF32_MASK).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)
