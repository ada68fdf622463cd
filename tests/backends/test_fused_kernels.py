"""The Triton kernels compile for real cards without one, and nothing is contracted where rounding must be exact."""

from __future__ import annotations

from typing import Any

import pytest

POINTERS = {"x": "*bf16", "given": "*fp32", "inverse": "*fp32", "tensor_scales": "*fp32"}
POINTERS |= dict.fromkeys(("row_codes", "column_codes", "row_scales", "column_scales", "codes"), "*u8")
INTEGERS = ("ends", "padded", "row_largest", "column_largest", "seen", "whole", "by_row", "by_column", "largest")
CONSTANTS: dict[str, Any] = {
    "BY_ROW": True, "BY_COLUMN": True, "EXPONENT": 121, "MANTISSA": 3, "LIMIT": 0x43E00000, "FORMAT_MAX": 448.0,
    "POWER_OF_2": True, "EPSILON": 0.0, "EPSILON_BITS": 0, "NOTE": True, "WHOLE": True, "BLOCK_R": 64, "BLOCK_C": 128,
    "stride_c": 1, "COUNT": 8, "SQUARE": False, "HADAMARD": True, "STOCHASTIC": True, "PLAIN": True, "SIGNS": 0xD7E8,
    "TRIPS": 2, "PROGRAMS": 512,
}  # fmt: skip


def compiled(kernel: Any, capability: int = 90, **constants: Any) -> str:
    """Compile as a launch on contiguous tensors would; return the PTX."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    fixed = {name: value for name, value in (CONSTANTS | constants).items() if name in names}
    signature = dict.fromkeys(names, "i32") | {n: k for n, k in POINTERS.items() if n in names}
    inverse = "*i32" if constants.get("SCHEME") == "delayed" else "*fp32"
    signature |= {n: "*i32" for n in INTEGERS if n in names}
    signature |= {n: inverse for n in ("row_inverse", "column_inverse") if n in names}
    signature |= dict.fromkeys(fixed, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in fixed}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert found.asm["cubin"]
    return str(found.asm["ptx"])


def test_kernels_compile_for_hopper(compiled_kernels: Any) -> None:
    cast = compiled(compiled_kernels.cast_kernel, SCHEME="delayed")
    assert "fma.rn" not in cast  # a product contracted with an addition would round once instead of twice
    assert "st.global.v4" in cast  # both layouts are written 16 bytes at a time
    assert "atom" in compiled(compiled_kernels.largest_kernel)
    assert "fma.rn" not in compiled(compiled_kernels.groups_kernel)


def test_nvfp4_kernels_compile_for_blackwell(compiled_kernels: Any) -> None:
    assert "fma.rn" not in compiled(compiled_kernels.fp4_largest_kernel, 100)
    assert "div.rn" in compiled(compiled_kernels.fp4_cast_kernel, 100, BLOCK_C=64)
