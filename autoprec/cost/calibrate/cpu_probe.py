"""The micro-benchmark behind the ``cpu`` target, run as a child process: prints fitted rates as one line of JSON.

One thread, process CPU time. All probes are run in several passes, and the least time of each counts: what else works
on the machine only ever adds time, and seldom to the same probe in every pass. Passes go on until the two least times
of nearly every probe agree. This is the only file of the cost model that imports torch.
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

import numpy as np
import torch
from torch import nn

from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.backends import choose
from autoprec.backends.cpu.int8 import int8_sums
from autoprec.backends.cpu.library import library
from autoprec.cost.calibrate.cpu import AGREES, GEMM_BYTES, ISA_VARIABLES
from autoprec.cost.model import CostModel
from autoprec.graph.recorder import StepRecorder
from autoprec.policy.matching import resolve
from autoprec.policy.schema import LayerPlan, Policy
from autoprec.precision.hardware import target
from autoprec.precision.recipes import BUILTIN_RECIPES

_SHAPES = ((256, 128, 128), (768, 64, 256), (512, 256, 768), (256, 512, 512), (768, 384, 384))
#: Tensors of pointwise work, and how many of each there are: a step's do not fit the caches.
_TENSORS, _COPIES = ((32, 128), (512, 256), (768, 1024)), 10
#: After so many seconds by the clock on the wall no further pass begins.
_PATIENCE_S = 40.0
#: A probe's calls take so long together (s), and there are so many passes.
_SHORTEST, _FEWEST_PASSES, _MOST_PASSES = 2e-4, 3, 6
_FAMILIES = {"fp8_row": "fp8_rowwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_INTEGER = {"row": "int8", "tensor": "int8_tensor"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Clock:
    """The two least times of every probe, which are known by their order: it is the same in every pass."""

    def __init__(self) -> None:
        self.least: list[tuple[float, float]] = []
        self._at = 0

    def begin(self) -> None:
        """Begin a pass."""
        self._at = 0

    def note(self, seconds: float) -> float:
        """Take one more time of the probe whose turn it is, and return its least."""
        at, self._at = self._at, self._at + 1
        if at == len(self.least):
            self.least.append((math.inf, math.inf))
        first, second = sorted((*self.least[at], seconds))[:2]
        self.least[at] = first, second
        return first

    def spread(self) -> float:
        """Return by how much the two least times of a probe differ (a share), exceeded by one probe in ten."""
        gaps = sorted(min(second / first - 1.0, 1.0) for first, second in self.least)
        return gaps[int(0.9 * len(gaps))] if gaps else 1.0

    def pace(self) -> float:
        """Return the mean logarithm of the least times: of two records of a machine the lower was disturbed less."""
        return sum(math.log(first) for first, _ in self.least) / max(1, len(self.least))


_clock = Clock()


def in_passes(take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run all probes again and again until they agree; return the last result, with how well they agree.

    ``take`` runs every probe once and fits the rates to the least times so far.
    """
    start = time.monotonic()
    _clock.least.clear()
    for number in range(1, _MOST_PASSES + 1):
        _clock.begin()
        found = take()
        if (number >= _FEWEST_PASSES and _clock.spread() <= AGREES) or time.monotonic() - start > _PATIENCE_S:
            break
    return {**found, "passes": number, "spread": _clock.spread(), "pace": _clock.pace()}


def _elapsed(run: Callable[[], Any], calls: int) -> float:
    """Return the CPU seconds of one of so many calls."""
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls


def _best(run: Callable[[], Any]) -> float:
    """Return the least CPU time of one call in seconds over this pass and those before (short calls are repeated)."""
    run()
    once = max(_elapsed(run, 1), 1e-7)
    return _clock.note(min(once, _elapsed(run, int(_SHORTEST / once))) if once < _SHORTEST / 2 else once)


def _apart(runs: Sequence[Callable[[], Any]]) -> float:
    """Return the CPU time of one of several like calls, none of which finds its tensors in the caches.

    As in a step: each has memory of its own to read, and its result is kept while the others run.
    """
    return _best(lambda: [run() for run in runs]) / len(runs)


def _fit(rows: list[list[float]], times: list[float]) -> list[float]:
    """Return non-negative coefficients of ``times ~ rows @ c`` by least squares on relative errors."""
    weight = 1.0 / np.asarray(times)
    matrix = np.asarray(rows) * weight[:, None]
    active = list(range(matrix.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(matrix[:, active], np.ones(len(times)), rcond=None)
        if (solution >= 0).all() or len(active) == 1:
            break
        active = [index for index, value in zip(active, solution, strict=True) if value >= 0] or active[:1]
    out = [0.0] * matrix.shape[1]
    for index, value in zip(active, solution, strict=True):
        out[index] = max(0.0, float(value))
    return out


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
        for m, k, n in _SHAPES:
            x, w, g = (torch.randn(*shape).mul_(16.0).to(dtype) for shape in ((m, k), (n, k), (m, n)))
            rows.append([2.0 * m * k * n, float(read * (m * k + k * n) + written * m * n), 1.0])
            for role, a, b in (("fprop", x, w.t()), ("dgrad", g, w), ("wgrad", g.t(), x)):
                times[role].append(_best(functools.partial(product, a, b)))
        out[name] = {role: _fit(rows, values) for role, values in times.items()}
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
        "softmax": (
            lambda: torch.softmax(x, -1),
            lambda: aten._softmax_backward_data(grad, soft, -1, x.dtype),
        ),
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
                "forward": _fit([[2.0 * size, 1.0] for size in sizes], forward),
                "backward": _fit([[_BACKWARD_TENSORS[name] * size, 1.0] for size in sizes], backward),
            }
    return out


def _reduction() -> dict[str, list[float]]:
    """Return format -> seconds per (byte, call) of summing rows, as bias gradients do."""
    out = {}
    for form, dtype in _DTYPES.items():
        rows, times = [], []
        for shape in _TENSORS:
            copies = [torch.randn(*shape).to(dtype) for _ in range(_COPIES)]
            rows.append([float(math.prod(shape) * dtype.itemsize), 1.0])
            times.append(_apart([functools.partial(torch.sum, x, 0) for x in copies]))
        out[form] = _fit(rows, times)
    return out


def _casts() -> dict[str, list[float]]:
    """Return direction -> seconds per (value, call) of casts between fp32 and bf16."""
    out: dict[str, list[float]] = {}
    for name, source, dtype in (("down", torch.float32, torch.bfloat16), ("up", torch.bfloat16, torch.float32)):
        rows, times = [], []
        for shape in _TENSORS:
            copies = [torch.randn(*shape).to(source) for _ in range(_COPIES)]
            rows.append([float(math.prod(shape)), 1.0])
            times.append(_apart([functools.partial(x.to, dtype) for x in copies]))
        out[name] = _fit(rows, times)
    return out


def _scaled(
    gemms: dict[str, dict[str, list[float]]], families: dict[str, str], product: str, *, larger: int = 1
) -> dict[str, list[float]]:
    """Return family -> seconds per (operand value, GEMM) that its casts add to the multiplications of a layer.

    Args:
        families: family -> the recipe that is timed.
        product: format in which it multiplies.
        larger: multiplies the sizes.
    """
    out: dict[str, list[float]] = {}
    per_value, per_result = GEMM_BYTES[product]
    for family, recipe in families.items():
        execution = choose("auto", "cpu").bind(
            LayerPlan.uniform(BUILTIN_RECIPES[recipe]), nn.Linear(1, 1), name=family, seed=0
        )
        rows, times = [], []
        for m, k, n in ((128, 128, 128), (192 * larger, 256 * larger, 384 * larger)):
            x, w = torch.randn(m, k).requires_grad_(), torch.randn(n, k).requires_grad_()
            grad = torch.randn(m, n)

            def run(x: torch.Tensor = x, w: torch.Tensor = w, grad: torch.Tensor = grad, go: Any = execution) -> None:
                torch.autograd.grad(go(x, w, None), (x, w), grad)

            rows.append([2.0 * (m * k + k * n + m * n), 3.0])
            plain = 0.0
            for a, b, c, role in ((m, k, n, "fprop"), (m, n, k, "dgrad"), (n, m, k, "wgrad")):
                flop, byte, call = gemms[product][role]
                moved = per_value * (a * b + b * c) + per_result * a * c
                plain += flop * 2.0 * a * b * c + byte * moved + call
            times.append(max(1e-7, _best(run) - plain))
        out[family] = _fit(rows, times)
    return out


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
        out[form] = max(0.5, min(20.0, _best(run) / plain))
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

    return _best(run) / 40


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
            out.setdefault(form, {})[regime] = {"forward": _fit(rows, forward), "backward": _fit(rows, backward)}
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
        times.append(_best(optimizer.step))
    return _fit(rows, times)


class _Reference(nn.Module):
    """A small transformer: what a real step costs beside its operators alone."""

    def __init__(self, width: int = 256, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp_norm": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last block's output; ``x`` is ``[batch, seq, width]``."""
        batch, seq, width = x.shape
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](x)).view(batch, seq, 3, 4, width // 4)  # type: ignore[index]
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).reshape(batch, seq, width))  # type: ignore[index]
            x = x + block["down"](nn.functional.gelu(block["up"](block["mlp_norm"](x))))  # type: ignore[index]
        return x


_IN_SITU: tuple[tuple[str, str, str], ...] = (
    ("fp32", "keep", "keep"),
    ("bf16", "bf16", "bf16"),
    ("int8", "int8_tensor", "keep"),
    ("emulated", "fp8_rowwise", "bf16"),
)


class _Stage:
    """A small model, its recorded step, and what the step takes under a policy."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.AdamW(model.parameters())
        with StepRecorder(model, optimizers=(self.optimizer,)) as recorder:
            self.compute()
        self.report = recorder.report()
        self.parameters = sum(p.numel() for p in model.parameters())

    def compute(self) -> None:
        """Run forward and backward."""
        torch.autograd.backward(self.model(self.x).float().square().mean())

    def measured(self, policy: Policy) -> tuple[float, float]:
        """Return the least CPU times of forward and backward, and of the update behind them, as in a real loop."""
        apply_policy(policy, self.model)
        self.compute()
        self.optimizer.step()
        times = []
        for _ in range(2):
            self.optimizer.zero_grad()
            times.append((_elapsed(self.compute, 1), _elapsed(self.optimizer.step, 1)))
        remove_policy(self.model)
        computed, updated = (min(column) for column in zip(*times, strict=True))
        return _clock.note(computed), _clock.note(updated)

    def modelled(self, policy: Policy, rates: dict[str, Any]) -> float:
        plans = resolve(policy, [layer.name for layer in self.report.tunable])
        cost = CostModel(self.report, target("cpu"), cpu=rates)
        return cost.estimate(plans, activations=policy.activations).time_ms / 1e3


_NOTHING = {"fp32": 0.0, "rest": 0.0, "bf16": 0.0, "int8": 0.0, "emulated": 0.0}


def _stages() -> list[_Stage]:
    """Return models that are ruled by activations, by weights and by what is not a layer."""
    wide = nn.Sequential(nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 512))
    return [
        _Stage(_Reference(), torch.randn(4, 96, 256)),
        _Stage(wide, torch.randn(48, 512)),
        _Stage(_Reference(64), torch.randn(16, 96, 64)),
    ]


def _in_situ(rates: dict[str, Any], stages: list[_Stage]) -> dict[str, Any]:
    """Return how much longer whole steps take than their operators in a hot loop, and what weights cost beside them.

    Three models give three unknowns under fp32: a factor on layers, one on the rest (in every precision), and seconds
    per weight value (casts, gradients in fresh memory); each of the other policies has its own first and last.
    """
    updates = []
    factors, weights = dict(_NOTHING), dict(_NOTHING)
    for name, recipe, activations in _IN_SITU:
        recipes = {} if recipe == "keep" else {recipe: BUILTIN_RECIPES[recipe]}
        policy = Policy(recipes=recipes, default=recipe, activations=activations)
        wanted = [name, "rest"] if name == "fp32" else [name]
        rows, missing = [], []
        for stage in stages[: len(wanted) + 1]:
            alone = [{**_NOTHING, part: 1.0, "optimizer": 0.0} for part in wanted]
            bare = [stage.modelled(policy, {**rates, "in_situ": part, "weights": _NOTHING}) for part in alone]
            known = {**rates, "in_situ": {**factors, "optimizer": 0.0}, "weights": weights}
            rows.append([*bare, float(stage.parameters)])
            computed, updated = stage.measured(policy)
            updates += [updated] if stage is stages[0] else []
            missing.append(max(1e-6, computed - stage.modelled(policy, known)))
        *found, weights[name] = _fit(rows, missing)
        # below 1 is the noise of other work on the machine: a step finds less in the caches than a hot loop does
        factors |= {part: max(1.0, min(4.0, factor)) for part, factor in zip(wanted, found, strict=True)}
    per_value, per_tensor = rates["optimizer"]
    first = stages[0]
    alone_s = per_value * first.parameters + per_tensor * len(list(first.model.parameters()))
    return {
        "in_situ": {**factors, "optimizer": max(0.5, min(4.0, min(updates) / alone_s))},
        "weights": weights,
    }


def _rates(stages: list[_Stage]) -> dict[str, Any]:
    torch.manual_seed(0)
    gemms = _gemms()
    out = {
        "gemm": gemms,
        "operators": _operators(),
        "reduction": _reduction(),
        "casts": _casts(),
        "emulated": _scaled(gemms, _FAMILIES, "bf16"),
        "integer": _scaled(gemms, _INTEGER, "int8", larger=3),
        "convolution": _convolution(gemms),
        "attention": _attention(),
        "optimizer": _optimizer(fused=False),
        "fused_optimizer": _optimizer(fused=True),
        "dispatch": _dispatch(),
    }
    return out | _in_situ(out, stages)


def measure() -> dict[str, Any]:
    """Return the fitted rates of this machine's CPU, one thread."""
    torch.set_num_threads(1)
    start = time.process_time()
    found = in_passes(functools.partial(_rates, _stages()))
    limits = {name: os.environ[name] for name in ISA_VARIABLES if name in os.environ}
    made = {"torch": torch.__version__, "instructions": limits, "date": time.strftime("%Y-%m-%d")}
    return {**found, **made, "seconds": time.process_time() - start}


def main() -> int:
    """Print the rates as one line of JSON."""
    print(json.dumps(measure()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
