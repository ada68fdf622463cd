"""Figures of a report that a person asks for first: what share of the step is tunable, and what the rest is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from autoprec.graph.analysis.flops import FOURIER
from autoprec.graph.report import GraphReport, Layer, Operator
from autoprec.graph.trace import OTHER_MODEL, bare_name
from autoprec.policy.sections import FEWEST_CLASSES, MOST_SCORES

#: Multiples that kernels ask of M, K and N. 8: fp16 and bf16 Tensor Cores at full speed; 16: ``torch._scaled_mm``,
#: cuBLASLt FP8 and Transformer Engine; 32: MXFP8 blocks (OCP Microscaling 1.0); 128: DeepSeek-style 1x128 and 128x128
#: blocks (arXiv 2412.19437).
_MULTIPLES = (128, 32, 16, 8)

#: Beginnings of the names of dtypes that no precision is about.
_WHOLE = ("int", "uint", "bool")


def class_shares(report: GraphReport) -> list[tuple[str, str, int, int, int]]:
    """Return name, dtypes, calls, FLOPs and bytes moved of every class of the step, most FLOPs first, then bytes.

    The dtypes are those of floating-point operands and results that ran, the most frequent first.
    Classes of Muon's step, which comes after it, have names of their own.
    """
    rows: dict[str, list[int]] = {}
    ran: dict[str, Counter[str]] = {}
    attends = attending(report)
    for operator in (*report.operators, *report.updating):
        name = class_name(operator, attends)
        row = rows.setdefault(name, [0, 0, 0])
        floating = {dtype for dtype in (*operator.dtypes, *operator.out_dtypes) if not dtype.startswith(_WHOLE)}
        ran.setdefault(name, Counter()).update(sorted(floating))
        for index, value in enumerate((1, operator.flops, operator.bytes)):
            row[index] += value
    dtypes = {name: ", ".join(dtype for dtype, _ in counts.most_common()) for name, counts in ran.items()}
    shares = [(name, dtypes[name], calls, flops, moved) for name, (calls, flops, moved) in rows.items()]
    return sorted(shares, key=lambda share: (-share[3], -share[4]))


def attending(report: GraphReport) -> set[str]:
    """Return the modules of a step that hold an attention."""
    return {operator.module for operator in report.operators if operator.attends}


def class_name(operator: Operator, attends: Collection[str]) -> str:
    """Return the class of an operator as tables name it.

    Args:
        operator: of a recorded step.
        attends: of :func:`attending`: another product of two activations is not one.
    """
    name = "product" if operator.cls == "attention" and operator.module not in attends else operator.cls
    return f"optimizer: {name}" if operator.phase == "optimizer" else name


def has_large_vocabulary(report: GraphReport) -> bool:
    """Say whether a step computes log-probabilities over so many classes that its loss may be computed in slices."""
    return any(is_large_log_softmax(operator) for operator in report.operators)


def is_large_log_softmax(operator: Operator) -> bool:
    """Say whether an operator computes log-probabilities, or their gradient, of a loss that may be in slices."""
    shape = operator.shapes[0] if operator.shapes else ()
    return "::_log_softmax" in operator.op and len(shape) == 2 and shape[1] >= FEWEST_CLASSES


def has_fused_attention(report: GraphReport) -> bool:
    """Say whether a step calls attention of torch that may be written out: a kernel, or its own ``_safe_softmax``."""
    for operator in report.operators:
        name, shapes = bare_name(operator.op), operator.shapes
        if operator.phase != "forward" or not name.startswith(("_scaled_dot_product", "_safe_softmax")):
            continue
        scores = next(iter(shapes), ())[-2:] if name == "_safe_softmax" else tuple(shape[-2] for shape in shapes[:2])
        if math.prod(scores) <= MOST_SCORES:
            return True
    return False


def has_images(report: GraphReport) -> bool:
    """Say whether a step convolves images ``[N, C, H, W]`` or volumes ``[N, C, D, H, W]``."""
    images = (operator for operator in report.operators if operator.cls == "conv" and operator.phase == "forward")
    return any(len(shape) in (4, 5) for operator in images for shape in operator.shapes[:1])


def remainders(report: GraphReport) -> dict[str, int]:
    """Return the FLOPs that no policy rule can name, by why, most first."""
    found: Counter[str] = Counter()
    for layer in report.layers:
        if not layer.tunable:
            found[layer.reason] += layer.total_flops
    left = report.total_flops - sum(layer.total_flops for layer in report.layers)
    fourier = sum(o.flops for o in report.operators if o.op.partition("::")[2] in FOURIER)
    others = {
        **_products_of_activations(report),
        "Fourier transforms: no policy changes what they run in": fourier,
        "other operators with FLOPs: follow activations": left,
    }
    for reason, flops in others.items():
        taken = min(flops, left)
        if taken > 0:
            found[reason], left = taken, left - taken
    return dict(found.most_common())


def _products_of_activations(report: GraphReport) -> dict[str, int]:
    """Return FLOPs of the products without a weight, by what they are; not every one is attention."""
    rows = [o for o in report.operators if o.cls == "attention" and o.flops]
    attends = {o.module for o in rows if o.attends}
    out: Counter[str] = Counter()
    for o in rows:
        if o.module == OTHER_MODEL:
            reason = "products with weights of another model, which the policy is not for"
        elif o.module in attends:
            reason = "attention's products of two activations: follow activations"
        elif o.module in ("<hooks>", "<accumulate>"):
            reason = "backward products whose forward operator was not found"
        else:
            reason = "products of two activations outside attention: follow activations"
        out[reason] += o.flops
    return out


def coverage_line(report: GraphReport) -> str:
    """Return one sentence: what share of the step's FLOPs a policy can decide about, and what the rest is."""
    total = report.total_flops or 1
    rest = [f"{flops / total:.1%} {why}" for why, flops in remainders(report).items() if flops / total >= 0.0005]
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
