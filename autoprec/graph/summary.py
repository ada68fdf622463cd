"""Figures of a report that a person asks for first: what share of the step is tunable, and what the rest is."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.graph.analysis.flops import FOURIER
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.trace import OTHER_MODEL

#: Multiples that kernels ask of M, K and N. 8: fp16 and bf16 Tensor Cores at full speed; 16: ``torch._scaled_mm``,
#: cuBLASLt FP8 and Transformer Engine; 32: MXFP8 blocks (OCP Microscaling 1.0); 128: DeepSeek-style 1x128 and 128x128
#: blocks (arXiv 2412.19437).
_MULTIPLES = (128, 32, 16, 8)


@dataclass(frozen=True, slots=True)
class ClassShare:
    """A class of operators: how many calls, and its share of the step's FLOPs and of the bytes it moves."""

    name: str
    precision: str
    calls: int
    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Remainder:
    """FLOPs that no policy rule can name, and why."""

    reason: str
    flops: int
    names: tuple[str, ...]


def class_shares(report: GraphReport) -> tuple[ClassShare, ...]:
    """Return every class of the step, most FLOPs first, then most bytes."""
    rows: dict[str, list[int]] = {}
    precisions: dict[str, str] = {}
    for operator in report.operators:
        row = rows.setdefault(operator.cls, [0, 0, 0])
        precisions[operator.cls] = operator.precision
        for index, value in enumerate((1, operator.flops, operator.bytes)):
            row[index] += value
    shares = [ClassShare(name, precisions[name], *row) for name, row in rows.items()]
    return tuple(sorted(shares, key=lambda share: (-share.flops, -share.bytes)))


def remainders(report: GraphReport) -> tuple[Remainder, ...]:
    """Return what is not tunable, by reason, most FLOPs first."""
    found: dict[str, tuple[int, list[str]]] = {}
    for layer in report.layers:
        if not layer.tunable:
            flops, names = found.setdefault(layer.reason, (0, []))
            found[layer.reason] = (flops + layer.total_flops, [*names, layer.name])
    left = report.total_flops - sum(layer.total_flops for layer in report.layers)
    for reason, (flops, names) in _products_of_activations(report).items():
        taken = min(flops, left)
        if taken > 0:
            found[reason], left = (taken, names), left - taken
    fourier = [o for o in report.operators if o.op.partition("::")[2] in FOURIER]
    if flops := min(sum(o.flops for o in fourier), left):
        names = list(dict.fromkeys(o.module for o in fourier))
        found["Fourier transforms: no policy changes what they run in"] = (flops, names)
        left -= flops
    if left > 0:
        found["other operators with FLOPs: follow activations"] = (left, [])
    rows = [Remainder(reason, flops, tuple(names)) for reason, (flops, names) in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.flops))


def _products_of_activations(report: GraphReport) -> dict[str, tuple[int, list[str]]]:
    """Return FLOPs and modules of the products without a weight, by what they are; not every one is attention."""
    rows = [o for o in report.operators if o.cls == "attention" and o.flops]
    attends = {o.module for o in rows if o.attends}
    out: dict[str, tuple[int, list[str]]] = {}
    for o in rows:
        if o.module == OTHER_MODEL:
            reason = "products with weights of another model, which the policy is not for"
        elif o.module in attends:
            reason = "attention's products of two activations: follow activations"
        elif o.module in ("<hooks>", "<accumulate>"):
            reason = "backward products whose forward operator was not found"
        else:
            reason = "products of two activations outside attention: follow activations"
        flops, names = out.setdefault(reason, (0, []))
        out[reason] = (flops + o.flops, names if o.module in names else [*names, o.module])
    return out


def coverage_line(report: GraphReport) -> str:
    """Return one sentence: what share of the step's FLOPs a policy can decide about, and what the rest is."""
    total = report.total_flops or 1
    rest = [f"{row.flops / total:.1%} {row.reason}" for row in remainders(report) if row.flops / total >= 0.0005]
    tail = f"; not: {'; '.join(rest)}" if rest else ""
    return f"{report.tunable_flops_share:.1%} of the step's {_human(report.total_flops)}FLOP are tunable{tail}"


def _human(count: int) -> str:
    value = float(count)
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} E"


def shape_text(layer: Layer) -> str:
    """Return ``M x K x N`` of the forward GEMM, with its count: ``2048x768x3072``, ``4 x 64x16x16``."""
    for gemm in layer.gemms:
        if gemm.role in ("fprop", "recompute"):
            count = gemm.calls * gemm.batch
            return (f"{count} x " if count > 1 else "") + f"{gemm.m}x{gemm.k}x{gemm.n}"
    return "-"


def alignment(layer: Layer) -> int:
    """Return the largest of 128, 32, 16, 8 that divides M, K and N of every GEMM of a layer, else 1.

    Tokens are the K of wgrad, so an odd batch keeps a layer of even widths out of FP8; every batch seen counts.
    """
    sizes = [size for gemm in layer.gemms for size in (gemm.m, gemm.k, gemm.n)]
    return next((m for m in _MULTIPLES if sizes and all(size % m == 0 for size in sizes)), 1)
