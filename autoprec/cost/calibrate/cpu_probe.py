"""The micro-benchmark behind the ``cpu`` target, run as a child process: prints fitted rates as one line of JSON.

One thread, process CPU time. All probes are run in several passes, and the least time of each counts: what else works
on the machine only ever adds time, and seldom to the same probe in every pass. Passes go on until the two least times
of nearly every probe agree. Only the probes import torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.backends import choose
from autoprec.backends.cpu.int8 import int8_sums
from autoprec.backends.cpu.library import library
from autoprec.cost.calibrate.cpu import GEMM_BYTES, ISA_VARIABLES
from autoprec.cost.calibrate.cpu_clock import best, fit, in_passes
from autoprec.cost.calibrate.cpu_steps import Stage, in_situ, stages
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import cpu_bf16_units
from autoprec.precision.recipes import BUILTIN_RECIPES

_SHAPES = ((256, 128, 128), (768, 64, 256), (512, 256, 768), (256, 512, 512), (768, 384, 384))
#: Tensors of pointwise work, and how many of each there are: a step's do not fit the caches.
_TENSORS, _COPIES = ((32, 128), (512, 256), (768, 1024)), 10
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Without units bf16 products are up to a hundred times slower than fp32 ones: no policy gains by them, and the time of
#: their probes would be most of all. One shape says how slow they are.
_HAS_BF16 = cpu_bf16_units() != ()


def _apart(runs: Sequence[Callable[[], Any]]) -> float:
    """Return the CPU time of one of several like calls, none of which finds its tensors in the caches.

    As in a step: each has memory of its own to read, and its result is kept while the others run.
    """
    return best(lambda: [run() for run in runs]) / len(runs)


def _integer_product() -> Callable[..., torch.Tensor]:
    """Return what INT8 layers multiply with here; without a C compiler they are emulated where there are no units."""
    return torch._int_mm if library() is None else int8_sums


def _gemms() -> dict[str, dict[str, list[float]]]:
    """Return format -> role -> seconds per (FLOP, byte moved, call)."""
    out: dict[str, dict[str, list[float]]] = {}
    for name, dtype in {**_DTYPES, "int8": torch.int8}.items():
        product: Callable[..., torch.Tensor] = _integer_product() if name == "int8" else torch.mm
        read, written = GEMM_BYTES[name]
        rows: list[list[float]] = []
        times: dict[str, list[float]] = {"fprop": [], "dgrad": [], "wgrad": []}
        for m, k, n in _SHAPES if _HAS_BF16 or name != "bf16" else _SHAPES[:1]:
            x, w, g = (torch.randn(*shape).mul_(16.0).to(dtype) for shape in ((m, k), (n, k), (m, n)))
            rows.append([2.0 * m * k * n, float(read * (m * k + k * n) + written * m * n), 1.0])
            for role, a, b in (("fprop", x, w.t()), ("dgrad", g, w), ("wgrad", g.t(), x)):
                times[role].append(best(functools.partial(product, a, b)))
        out[name] = {role: fit(rows, values) for role, values in times.items()}
    return out


def _operator_runs(x: torch.Tensor, grad: torch.Tensor) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return class -> (forward, backward) of a typical operator on ``x``.

    The backward kernels are called directly: through autograd a small one is lost in the engine's own time, which a
    step pays once and not once per operator.
    """
    aten, functional = torch.ops.aten, torch.nn.functional
    width = [x.shape[-1]]
    weight, bias = torch.ones(width, dtype=x.dtype), torch.zeros(width, dtype=x.dtype)
    _, mean, rstd = aten.native_layer_norm(x, width, weight, bias, 1e-5)
    soft = torch.softmax(x, -1)
    return {
        "pointwise": (lambda: x * 2.0, lambda: grad * 2.0),
        "activation": (lambda: functional.gelu(x), lambda: aten.gelu_backward(grad, x)),
        "norm": (
            lambda: functional.layer_norm(x, width, weight, bias),
            lambda: aten.native_layer_norm_backward(grad, x, width, mean, rstd, weight, bias, [True, True, True]),
        ),
        "softmax": (lambda: torch.softmax(x, -1), lambda: aten._softmax_backward_data(grad, soft, -1, x.dtype)),
    }


#: How many of its tensors a backward operator moves (gradient, what was saved, result).
_BACKWARD_TENSORS = {"pointwise": 2.0, "activation": 3.0, "norm": 3.0, "softmax": 3.0}


def _operators() -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return class -> format -> phase -> seconds per (byte moved, call) of typical operators."""
    out: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in _BACKWARD_TENSORS}
    for form, dtype in _DTYPES.items():
        sizes: list[float] = []
        spent: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in out}
        for shape in _TENSORS:
            copies = [_operator_runs(*(torch.randn(*shape).to(dtype) for _ in range(2))) for _ in range(_COPIES)]
            sizes.append(float(math.prod(shape) * dtype.itemsize))
            for name, phases in spent.items():
                for index, phase in enumerate(phases):
                    phase.append(_apart([copy[name][index] for copy in copies]))
        for name, (forward, backward) in spent.items():
            out[name][form] = {
                "forward": fit([[2.0 * size, 1.0] for size in sizes], forward),
                "backward": fit([[_BACKWARD_TENSORS[name] * size, 1.0] for size in sizes], backward),
            }
    return out


def _on_tensors(make: Callable[[torch.Tensor], Callable[[], Any]], dtype: torch.dtype, unit: int = 1) -> list[float]:
    """Return seconds per (``unit`` of a value, call) of what is made of tensors of three sizes."""
    rows, times = [], []
    for shape in _TENSORS:
        runs = [make(torch.randn(*shape).to(dtype)) for _ in range(_COPIES)]
        rows.append([float(math.prod(shape) * unit), 1.0])
        times.append(_apart(runs))
    return fit(rows, times)


def _reduction() -> dict[str, list[float]]:
    """Return format -> seconds per (byte, call) of summing rows, as bias gradients do."""
    return {
        form: _on_tensors(lambda x: functools.partial(torch.sum, x, 0), dtype, dtype.itemsize)
        for form, dtype in _DTYPES.items()
    }


def _casts() -> dict[str, list[float]]:
    """Return direction -> seconds per (value, call) of casts between fp32 and bf16."""
    low, high = torch.bfloat16, torch.float32
    return {
        "down": _on_tensors(lambda x: functools.partial(x.to, low), high),
        "up": _on_tensors(lambda x: functools.partial(x.to, high), low),
    }


def _layer(plan: LayerPlan | None, shape: tuple[int, int, int], *, low: bool = False) -> float:
    """Return seconds of a linear layer ``[m, k] x [k, n]``, both ways; ``low``: under autocast, its input in bf16."""
    m, k, n = shape
    layer = nn.Linear(k, n, bias=False)
    go: Any = layer
    if plan is not None:
        execution = choose("auto", "cpu").bind(plan, layer, name="probe", seed=0)
        go = functools.partial(execution, weight=layer.weight, bias=None)
    x, grad = (torch.randn(m, size).to(torch.bfloat16 if low else torch.float32) for size in (k, n))
    x.requires_grad_()

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = go(x)
        torch.autograd.grad(y, (x, layer.weight), grad)

    return best(run)


def _products(gemms: dict[str, dict[str, list[float]]], forms: Sequence[str], shape: tuple[int, int, int]) -> float:
    """Return the modelled seconds of a layer's three products, each in a format."""
    m, k, n = shape
    total = 0.0
    for form, (a, b, c), role in zip(
        forms, ((m, k, n), (m, n, k), (n, m, k)), ("fprop", "dgrad", "wgrad"), strict=True
    ):
        (flop, byte, call), (read, written) = gemms[form][role], GEMM_BYTES[form]
        total += flop * 2.0 * a * b * c + byte * (read * (a * b + b * c) + written * a * c) + call
    return total


def _integer(gemms: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return granularity -> seconds per (operand value, GEMM) that INT8 casts add to the products of a plain layer."""
    # sums are short, so that casts are a large part; and the tensors are as large as a step's, which are in no cache
    shapes = ((32, 32, 32), (512, 64, 1536), (1536, 96, 768))
    plain = _layer(None, shapes[0]) - _products(gemms, ["fp32"] * 3, shapes[0])
    rows = [[2.0 * (m * k + k * n + m * n), 3.0] for m, k, n in shapes]
    out = {}
    for granularity, recipe in (("row", "int8"), ("tensor", "int8_tensor")):
        plan = LayerPlan.uniform(BUILTIN_RECIPES[recipe])
        spent = [_layer(plan, shape) - _products(gemms, ["int8"] * 3, shape) for shape in shapes]
        out[granularity] = fit(rows, [max(1e-7, own - plain) for own in spent])
    return out


def _handling(rates: dict[str, Any]) -> dict[str, float]:
    """Return seconds that a layer takes beside a plain one whatever its size: Python, autograd, calls of casts.

    ``cast``: in bf16 between float32 tensors; ``autocast``: under autocast; ``mixed``: in INT8 with wgrad in 16 bits.
    """
    shape, gemms, bf16, int8 = ((32, 32, 32), rates["gemm"], BUILTIN_RECIPES["bf16"], BUILTIN_RECIPES["int8"])
    plain = _layer(None, shape) - _products(gemms, ["fp32"] * 3, shape)
    kinds: dict[str, tuple[LayerPlan | None, list[str], float]] = {
        "cast": (LayerPlan.uniform(bf16), ["bf16"] * 3, 0.0),
        "autocast": (None, ["bf16"] * 3, 0.0),
        "mixed": (
            LayerPlan(fprop=int8, dgrad=int8, wgrad=bf16),
            ["int8", "int8", "bf16"],
            2.0 * rates["integer"]["row"][1],
        ),
    }
    out = {}
    for name, (plan, forms, known) in kinds.items():
        spent = _layer(plan, shape, low=name == "autocast") - _products(gemms, forms, shape)
        out[name] = max(0.0, spent - plain - known)
    return out


def _recurrent(gemms: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Return format -> how much longer a recurrent layer takes than the products of its inputs and of its states."""
    steps, batch, width = 8, 32, 384
    out = {}
    for form in _DTYPES if _HAS_BF16 else ("fp32",):
        dtype = _DTYPES[form]
        layer = nn.LSTM(width, width).to(dtype)
        x, grad = (torch.randn(steps, batch, width).to(dtype) for _ in range(2))
        x.requires_grad_()

        def run(layer: nn.LSTM = layer, x: torch.Tensor = x, grad: torch.Tensor = grad) -> None:
            torch.autograd.grad(layer(x)[0], (x, *layer.parameters()), grad)

        shapes = ((steps * batch, width, 4 * width), (batch, width, 4 * width))
        plain = [_products(gemms, [form] * 3, shape) for shape in shapes]
        out[form] = max(0.5, min(20.0, best(run) / (plain[0] + steps * plain[1])))
    return {"bf16": out["fp32"]} | out


def _convolution(gemms: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Return format -> how much longer a 3x3 convolution takes than its three GEMMs would."""
    out = {}
    batch, channels, side = 4, 64, 16
    m, k, n = batch * side * side, 9 * channels, channels
    for form, dtype in _DTYPES.items():
        x = torch.randn(batch, channels, side, side).to(dtype).requires_grad_()
        w = torch.randn(n, channels, 3, 3).to(dtype).requires_grad_()
        grad = torch.randn(batch, n, side, side).to(dtype)

        def run(x: torch.Tensor = x, w: torch.Tensor = w, grad: torch.Tensor = grad) -> None:
            torch.autograd.grad(torch.nn.functional.conv2d(x, w, padding=1), (x, w), grad)

        plain = sum(2.0 * m * k * n * gemms[form][role][0] + gemms[form][role][2] for role in gemms[form])
        out[form] = max(0.5, min(20.0, best(run) / plain))
    return out


def _dispatch() -> float:
    """Return seconds of an operator that moves nothing, recorded for backward and run backward."""
    x = torch.zeros(4, 4, requires_grad=True)
    grad = torch.zeros(4, 4)

    def run() -> None:
        y = x
        for _ in range(20):
            y = y.t()
        torch.autograd.grad(y, x, grad)

    return best(run) / 40


#: batch, heads, seq, width of fused attention in each of the kernel's regimes.
_ATTENTION_SHAPES = {
    "short": ((4, 4, 64, 32), (1, 4, 96, 32), (2, 2, 128, 64)),
    "long": ((1, 2, 256, 64), (1, 4, 256, 32), (1, 4, 512, 32)),
}


def _attention() -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return format -> regime -> phase -> seconds per (FLOP, score, query row) of fused causal attention."""
    aten = torch.ops.aten
    out: dict[str, dict[str, dict[str, list[float]]]] = {}
    for form, dtype in _DTYPES.items():
        for regime, shapes in _ATTENTION_SHAPES.items():
            rows, forward, backward = [], [], []
            for batch, heads, seq, width in shapes:
                run, back = aten._scaled_dot_product_flash_attention_for_cpu, []
                ran = []
                for _ in range(3):  # heads are views of one projection, as in models
                    q, k, v, grad = (torch.randn(batch, seq, heads, width).to(dtype).transpose(1, 2) for _ in range(4))
                    ran.append(functools.partial(run, q, k, v, 0.0, True))
                    kept = (grad, q, k, v, *ran[-1]()[:2], 0.0, True)
                    back.append(functools.partial(aten._scaled_dot_product_flash_attention_for_cpu_backward, *kept))
                scores = float(batch * heads * seq * seq)
                rows.append([4.0 * scores * width, scores, float(batch * heads * seq)])
                forward.append(_apart(ran))
                backward.append(_apart(back))
            out.setdefault(form, {})[regime] = {"forward": fit(rows, forward), "backward": fit(rows, backward)}
    return out


def _optimizer(*, fused: bool) -> list[float]:
    """Return seconds per (parameter, tensor) of an AdamW step, in one kernel for all tensors or as is the default."""
    rows, times = [], []
    for count, size in ((20, 1_000), (4, 60_000), (2, 400_000)):
        values = [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]
        for value in values:
            value.grad = torch.randn(size)
        optimizer = torch.optim.AdamW(values, lr=1e-3, fused=fused)
        rows.append([float(size * count), float(count)])
        times.append(best(optimizer.step))
    return fit(rows, times)


def _rates(models: list[Stage]) -> dict[str, Any]:
    torch.manual_seed(0)
    gemms = _gemms()
    out = {
        "gemm": gemms,
        "operators": _operators(),
        "reduction": _reduction(),
        "casts": _casts(),
        "integer": _integer(gemms),
        "convolution": _convolution(gemms),
        "recurrent": _recurrent(gemms),
        "attention": _attention(),
        "optimizer": _optimizer(fused=False),
        "fused_optimizer": _optimizer(fused=True),
        "dispatch": _dispatch(),
    }
    out["handling"] = _handling(out)
    return out | in_situ(out, models)


def measure() -> dict[str, Any]:
    """Return the fitted rates of this machine's CPU, one thread."""
    torch.set_num_threads(1)
    start = time.process_time()
    found = in_passes(functools.partial(_rates, stages()))
    limits = {name: os.environ[name] for name in ISA_VARIABLES if name in os.environ}
    made = {"torch": torch.__version__, "instructions": limits, "date": time.strftime("%Y-%m-%d")}
    return {**found, **made, "seconds": time.process_time() - start}


def main() -> int:
    """Print the rates as one line of JSON."""
    print(json.dumps(measure()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
