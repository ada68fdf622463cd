"""Number formats as frozen data: what a value can hold, without importing torch.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling Formats 1.0 (MX, E8M0);
NVIDIA NVFP4 (E2M1 values, E4M3 scale per 16); IEEE 754 binary16/32; bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A binary floating-point (or integer) format.

    ``mantissa`` counts stored bits, ``min_exponent`` is the exponent of the smallest *normal* value, ``max`` the
    largest finite value, ``torch_name`` the attribute of ``torch`` that stores it (empty when torch has none).
    """

    name: str
    bits: int
    mantissa: int
    min_exponent: int
    max: float
    torch_name: str


#: Bits, bits of the fraction, exponent of the smallest normal value, largest value: of IEEE 754 (fp32, fp16), OFP8 1.0
#: (e4m3, e5m2) and OCP Microscaling Formats 1.0 (e2m1); bf16 and tf32 have fp32's exponents.
FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        NumberFormat("fp32", 32, 23, -126, 3.4028234663852886e38, "float32"),
        NumberFormat("tf32", 19, 10, -126, 3.4011621342146535e38, ""),
        NumberFormat("bf16", 16, 7, -126, 3.3895313892515355e38, "bfloat16"),
        NumberFormat("fp16", 16, 10, -14, 65504.0, "float16"),
        NumberFormat("e4m3", 8, 3, -6, 448.0, "float8_e4m3fn"),
        NumberFormat("e5m2", 8, 2, -14, 57344.0, "float8_e5m2"),
        NumberFormat("e2m1", 4, 1, 0, 6.0, ""),
        NumberFormat("int8", 8, 7, 0, 127.0, "int8"),
    )
}
