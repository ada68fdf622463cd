"""Matrix shapes and FLOPs of one operator call, from the shapes of its arguments.

Counting rule: a multiply-add is two operations; a GEMM ``[M, K] x [K, N]`` is ``2 M K N``. Fused attention forward is
its two products; fused attention backward is five (scores again, dV, dP, dQ, dK), as FlashAttention runs it. A Fourier
transform of N complex values is ``5 N log2 N`` (the radix-2 count of FFTW's benchmarks), of N real ones half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2, prod

from autoprec.graph.trace import Call, Ref, Trace

#: Fused recurrent kernels: all gates of all steps in one call.
RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward")

Shape = tuple[int, ...]
#: Matrix products -> the position of their first operand.
_DENSE = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"), 0),
    **dict.fromkeys(("dot", "vdot", "linear", "mkldnn_linear", "int_mm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_sparse_addmm"), 1),
}
#: Attention of torch, flash-attn 2 and 3 and xformers that has the sequence before the heads.
_SEQUENCE_FIRST = ("_flash_att", "_efficient_attention", "fwd", "bwd", "flash_fwd", "flash_bwd", "efficient_attention")
_CONV = ("convolution", "_convolution", "convolution_overrideable")


@dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix product: ``batch`` times ``[m, k] x [k, n]``; ``a`` and ``b`` are the operands' value indices.

    ``filled`` is the share of a sparse operand's entries that is stored: no other is multiplied.
    """

    m: int
    k: int
    n: int
    batch: int
    a: int
    b: int
    filled: float = 1.0

    @property
    def flops(self) -> int:
        """Floating-point operations of the product: 2 M K N per matrix of the batch, of what is filled."""
        return round(2 * self.m * self.k * self.n * self.batch * self.filled)


def _shape(trace: Trace, value: int | None) -> Shape:
    return () if value is None else trace.values[value].shape


def _operands(trace: Trace, call: Call, first: int) -> tuple[int, int, Shape, Shape] | None:
    a, b = trace.argument(call, first), trace.argument(call, first + 1)
    if a is None or b is None:
        return None
    return a, b, _shape(trace, a), _shape(trace, b)


def _matmul(a: int, b: int, x: Shape, y: Shape) -> Gemm | None:
    if not x or not y:
        return None
    if len(y) == 1:
        return Gemm(prod(x[:-1]), x[-1], 1, 1, a, b)
    if len(x) == 1:
        return Gemm(1, x[0], y[-1], prod(y[:-2]), a, b)
    if len(y) == 2:
        return Gemm(prod(x[:-1]), x[-1], y[-1], 1, a, b)
    return Gemm(x[-2], x[-1], y[-1], prod(x[:-2]), a, b)


def _grouped(a: int, b: int, x: Shape, y: Shape) -> Gemm | None:
    if len(x) == 2 and len(y) == 3:  # tokens of all experts, one weight each: every row meets one expert
        return Gemm(x[0], x[1], y[2], 1, a, b)
    if len(x) == 2 and len(y) == 2:  # the contraction is split over the groups (weight gradients)
        return Gemm(x[0], x[1], y[1], 1, a, b)
    if len(x) == 3 and len(y) == 2:
        return Gemm(x[1], x[2], y[1], 1, a, b)
    return _matmul(a, b, x, y)


def gemm_of(trace: Trace, call: Call) -> Gemm | None:
    """Return the matrix product a call runs, None when it is none (or a convolution, see :func:`conv_gemm`)."""
    found = _dense_gemm(trace, call)
    if found is None:
        return None
    filled = trace.values[found.a].filled * trace.values[found.b].filled
    return found if filled == 1.0 else replace(found, filled=filled)


def _dense_gemm(trace: Trace, call: Call) -> Gemm | None:
    name = call.name
    if name not in _DENSE:
        return None
    found = _operands(trace, call, _DENSE[name])
    if found is None:
        return None
    a, b, x, y = found
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        return _grouped(a, b, x, y)
    if name in ("dot", "vdot"):
        return Gemm(1, x[0] if x else 1, 1, 1, a, b)
    if name in ("linear", "mkldnn_linear"):
        return Gemm(prod(x[:-1]), x[-1], y[0], 1, a, b)
    return _matmul(a, b, x, y)


def conv_gemm(trace: Trace, call: Call) -> Gemm | None:
    """Return the implicit GEMM of a convolution's forward: M output positions, K patch, N output channels per group.

    For ``convolution_backward`` it is the GEMM of the forward it belongs to; each of its two products is as large.
    """
    backward = call.name.startswith("convolution_backward")
    if not backward and call.name not in _CONV:
        return None
    base = 1 if backward else 0
    x, w = trace.argument(call, base), trace.argument(call, base + 1)
    if x is None or w is None:
        return None
    out = trace.argument(call, 0) if backward else (call.outs[0] if call.outs else None)
    transposed = bool(call.args[7] if backward else call.args[6])
    groups = int(call.args[9] if backward else call.args[8])
    image, weight, result = _shape(trace, x), _shape(trace, w), _shape(trace, out)
    if transposed:
        m = image[0] * prod(image[2:])
        return Gemm(m, weight[0] // groups, weight[1] * prod(weight[2:]), groups, x, w)
    m = result[0] * prod(result[2:])
    return Gemm(m, weight[1] * prod(weight[2:]), weight[0] // groups, groups, x, w)


def _attention(trace: Trace, call: Call) -> int:
    backward = "backward" in call.name or call.name.endswith("bwd")
    q, k, v = (_shape(trace, trace.argument(call, int(backward) + i)) for i in range(3))
    if len(q) < 3 or len(k) < 3 or len(v) < 3:
        return 0
    if call.name.startswith(_SEQUENCE_FIRST):  # [batch, sequence, heads, head]
        q, k, v = ((*s[:-3], s[-2], s[-3], s[-1]) for s in (q, k, v))
        lengths = [argument for argument in call.args if type(argument) is int][:2]
        if len(q) == 3 and len(lengths) == 2:  # sequences end to end: each token sees one, at most the longest
            k = (*k[:-2], lengths[1], k[-1])
    pairs = prod(q[:-2]) * q[-2] * k[-2]
    if backward:
        return 2 * pairs * (3 * q[-1] + 2 * v[-1])
    return 2 * pairs * (q[-1] + v[-1])


def recurrent_gemms(trace: Trace, call: Call) -> list[tuple[int, int, int, int]]:
    """Return ``(M, K, N, calls)`` of the products in a fused recurrent kernel's forward; empty for any other call.

    Inputs of all steps are multiplied at once, the state (and an LSTM's projection of it) step by step, with M the
    samples of a step. A backward kernel runs two products for each of its forward's: give it the forward's list.
    """
    if call.name not in RECURRENT:
        return []
    backward = call.name.endswith("_backward")
    x = _shape(trace, trace.argument(call, 0))
    if call.name.startswith("mkldnn"):  # one layer and direction a call, the steps first
        weights, steps = [_shape(trace, trace.argument(call, i)) for i in (1, 2)], x[0]
        firsts: Sequence[int] = (0,)
    else:  # cuDNN is given the weights of all layers and directions in a list; packed samples lie end to end
        held = [trace.values[item.value].shape if isinstance(item, Ref) else () for item in call.args[1]]
        batch_first, batch_sizes = call.args[14 if backward else 10], call.args[18 if backward else 14]
        steps = len(batch_sizes) or x[1 if batch_first else 0]
        weights, firsts = held, range(0, len(held), int(call.args[2]))
    rows = prod(x[:-1])
    return [
        (rows, k, n, 1) if at in firsts else (max(1, rows // steps), k, n, steps)
        for at, (n, k) in ((at, shape) for at, shape in enumerate(weights) if len(shape) == 2)
    ]


def _recurrent(trace: Trace, call: Call) -> int:
    once = sum(2 * m * k * n * calls for m, k, n, calls in recurrent_gemms(trace, call))
    return 2 * once if call.name.endswith("_backward") else once


#: Fourier transforms: from and to complex values, or real ones on one side.
FOURIER = ("_fft_c2c", "_fft_r2c", "_fft_c2r")


def _fourier(trace: Trace, call: Call) -> int:
    real = call.name != "_fft_c2c"
    shape = _shape(trace, call.outs[0] if call.name == "_fft_c2r" else trace.argument(call, 0))
    length = prod(shape[dim] for dim in call.args[1])
    return round((2.5 if real else 5.0) * prod(shape) * log2(max(length, 1)))


def call_flops(trace: Trace, call: Call, cls: str) -> int:
    """Return the operations of one call of class gemm, conv or attention, or of a Fourier transform; else 0."""
    if call.name in FOURIER:
        return _fourier(trace, call)
    if cls not in ("gemm", "conv", "attention"):
        return 0
    gemm = gemm_of(trace, call)
    if gemm is not None:
        return gemm.flops
    convolution = conv_gemm(trace, call)
    if convolution is not None:
        if call.name.startswith("convolution_backward"):
            mask = call.args[-1]
            return convolution.flops * (int(bool(mask[0])) + int(bool(mask[1])))
        return convolution.flops
    return _attention(trace, call) if cls == "attention" else _recurrent(trace, call)
