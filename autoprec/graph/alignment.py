"""Which multiples the dimensions of a layer's GEMMs allow: what decides whether a GPU can run them in FP8 at all."""

from __future__ import annotations

from autoprec.graph.report import GemmCall, Layer

__all__ = ["MULTIPLES", "alignment", "blockers"]

#: Multiples that kernels ask for. 16: ``torch._scaled_mm``, cuBLASLt FP8 and Transformer Engine; 32: MXFP8 blocks
#: (OCP Microscaling 1.0); 128: DeepSeek-style 1x128 and 128x128 blocks (arXiv 2412.19437).
MULTIPLES: dict[int, str] = {
    8: "fp16 and bf16 Tensor Cores at full speed",
    16: "FP8 with one scale per tensor or row",
    32: "MXFP8 and NVFP4 blocks",
    128: "FP8 with 128-wide blocks",
}
_DIMENSIONS = {
    "fprop": ("tokens", "in", "out"),
    "dgrad": ("tokens", "out", "in"),
    "wgrad": ("out", "tokens", "in"),
    "recompute": ("tokens", "in", "out"),
}


def _dimensions(gemm: GemmCall) -> tuple[tuple[str, str, int], ...]:
    names = _DIMENSIONS.get(gemm.role, ("M", "K", "N"))
    return tuple(zip("MKN", names, (gemm.m, gemm.k, gemm.n), strict=True))


def alignment(layer: Layer) -> int:
    """Return the largest of 128, 32, 16, 8 that divides every dimension of every GEMM of a layer, else 1."""
    sizes = [size for gemm in layer.gemms for _, _, size in _dimensions(gemm)]
    return next((m for m in sorted(MULTIPLES, reverse=True) if sizes and all(size % m == 0 for size in sizes)), 1)


def blockers(layer: Layer, multiple: int) -> tuple[str, ...]:
    """Return which dimensions, the token dimension of every batch seen included, are no multiple: one line each."""
    out = []
    for gemm in layer.gemms:
        for letter, name, size in _dimensions(gemm):
            if size % multiple:
                out.append(f"{gemm.role} {letter} = {size} ({name}) is no multiple of {multiple}")
    return tuple(out)
