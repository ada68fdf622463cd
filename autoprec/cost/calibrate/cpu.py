"""The CPU as a target: rates of this machine, fitted by a short micro-benchmark in a child process, and cached.

On a CPU bf16 multiplications may be several times faster than fp32 (AMX, AVX512-BF16), and int8 ones faster still
(VNNI), or faster where bf16 has no units (AVX2). FP8 recipes are emulated (round, multiply in bf16) and therefore never
faster than bf16; casts, norms and attention do not gain. Rates are those of the instructions that the libraries use.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoprec.cost.kernels import LayerCost, kept_family
from autoprec.cost.rest import OTHER, PRODUCTS, RestCost, category, growth
from autoprec.cost.scale import CostScale, GemmWork, in_block, short_dtype
from autoprec.cost.widths import Widths
from autoprec.errors import AutoPrecError
from autoprec.graph.report import Operator
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import recipe_family
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm
from autoprec.support.files import cache_folder, write_json

_SCHEMA = 14
#: Limits of the instructions that the libraries use: rates under one are not those under another.
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
_PROBE_TIMEOUT_S = 120.0
#: Of a probe's times the two least may differ by so much (a share), in nine probes of ten: rates that were measured
#: beside other work are not kept for good. They are measured again, so many times at most unless it is quieter.
AGREES, _TRIES = 0.05, 3
#: Memory that is released stays with the process: whether the kernel has to hand it out again, which takes longer than
#: most operators do on it, depends on what else lies in the heap.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 26)}
#: Bytes of a value of a GEMM's operands, and of its result.
GEMM_BYTES = {"fp32": (4, 4), "bf16": (2, 2), "int8": (1, 4)}

UNCALIBRATED = "modelled, uncalibrated (the CPU micro-benchmark could not run)"
#: Used when the micro-benchmark cannot run: a plain AVX2 core without bf16 instructions.
FALLBACK: dict[str, Any] = {
    "gemm": {
        "fp32": {role: [1.5e-11, 5e-11, 2e-5] for role in ("fprop", "dgrad", "wgrad")},
        "bf16": {role: [1.5e-11, 5e-11, 3e-5] for role in ("fprop", "dgrad", "wgrad")},
        "int8": {role: [1e-11, 5e-11, 3e-5] for role in ("fprop", "dgrad", "wgrad")},
    },
    "operators": {
        name: {form: {phase: [1e-10, 5e-6] for phase in ("forward", "backward")} for form in ("fp32", "bf16")}
        for name in ("pointwise", "activation", "norm", "softmax")
    },
    "reduction": {"fp32": [5e-11, 5e-6], "bf16": [1e-10, 5e-6]},
    "casts": {"down": [8e-10, 4e-6], "up": [8e-10, 4e-6]},
    "integer": {"row": [1e-9, 3e-5], "tensor": [1e-9, 3e-5]},
    "convolution": {"fp32": 1.5, "bf16": 1.5},
    "recurrent": {"fp32": 1.0, "bf16": 1.0},
    "handling": {"cast": 1e-4, "autocast": 1e-4, "mixed": 1e-4},
    "attention": {
        form: {
            regime: {"forward": [2e-11, 1e-9, 1e-8], "backward": [5e-11, 3e-9, 1e-7]} for regime in ("short", "long")
        }
        for form in ("fp32", "bf16")
    },
    "optimizer": [5e-9, 7e-5],
    "fused_optimizer": [1e-9, 1e-5],
    "dispatch": 3e-6,
    "weights": {"fp32": 0.0, "bf16": 0.0, "int8": 0.0},
    "in_situ": {"fp32": 1.0, "rest": 1.0, "bf16": 1.0, "int8": 1.0, "optimizer": 1.0},
    "torch": "",
    "spread": 0.0,
    "pace": 0.0,
}

#: Recipe family -> seconds per (operand value, GEMM) of emulated casts, by which nothing gains: of one machine (Zen 4,
#: torch 2.13, 2026-11-27); not measured on others.
_EMULATED = {"fp8_row": (2e-9, 2.5e-4), "mxfp8": (3e-9, 4e-4), "nvfp4": (1e-8, 4e-4)}


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_file() -> Path:
    """Return where the rates of this CPU and this torch are cached."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "none"
    limits = [os.environ.get(name, "") for name in ISA_VARIABLES]
    key = hashlib.sha256("|".join([str(_SCHEMA), cpu_model(), torch_version, *limits]).encode()).hexdigest()[:16]
    return cache_folder() / f"cpu-{key}.json"


def _valid(document: Any) -> bool:
    return isinstance(document, dict) and all(key in document for key in FALLBACK)


def _probe() -> dict[str, Any] | None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    environment |= _KEEP_MEMORY
    for name in [key for key in environment if key.startswith("AUTOPREC_")]:
        del environment[name]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "autoprec.cost.calibrate.cpu_probe"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        found = json.loads(ended.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return found if _valid(found) else None


def _load_average() -> float:
    """Return how many processes ran here in the last minute, on average; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _again(kept: Mapping[str, Any], load: float) -> bool:
    """Say whether a record was disturbed and another may be less so: it is quieter now, or it was not tried often."""
    apart, before = kept["spread"] > AGREES, kept.get("load", 0.0)
    return bool((load < 0.5 * before and before > 0.5) or (apart and kept.get("tries", 1) < _TRIES))


def _better(kept: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return the record that was disturbed less: its repeats agree, and then its probes took less time."""
    if kept is None:
        return new
    better = min(new, kept, key=lambda record: (record["spread"] > AGREES, record["pace"]))
    return {**better, "tries": kept.get("tries", 1) + 1, "load": min(kept.get("load", 0.0), new["load"])}


def kept_rates() -> dict[str, Any] | None:
    """Return the rates of this machine as they were measured earlier, or None: nothing is measured."""
    try:
        cached = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cached if _valid(cached) else None


def _label(rates: Mapping[str, Any], when: str = "") -> str:
    apart = f", whose repeats differ by {rates['spread']:.0%}" if rates["spread"] > AGREES else ""
    return f"modelled, rates of this CPU{when}{apart}"


@lru_cache(maxsize=4)
def _load(path: str, refresh: bool) -> tuple[dict[str, Any], str]:
    file, kept, load = Path(path), None if refresh else kept_rates(), _load_average()
    measured = _probe() if kept is None or _again(kept, load) else None
    if measured is None and kept is not None:
        return kept, _label(kept, f" (measured {kept.get('date', 'earlier')})")
    if measured is None:
        return FALLBACK, UNCALIBRATED
    rates = _better(kept, {**measured, "cpu": cpu_model(), "load": load, "tries": 1})
    with contextlib.suppress(AutoPrecError, OSError):  # a cache that cannot be written costs seconds, never a search
        write_json(file, rates)
    return rates, _label(rates)


def cpu_rates(*, refresh: bool = False) -> tuple[dict[str, Any], str]:
    """Return this machine's fitted rates and the label of figures that rest on them.

    They are measured once and kept, with how well their repeats agree; those that were measured beside other work are
    measured again later, and the better record of the two is kept.
    """
    if refresh:
        _load.cache_clear()
    return _load(str(cache_file()), refresh)


#: What is multiplied with what products in a hot loop would take, by the kind of a layer.
_FACTORS = {"conv": "convolution", "rnn": "recurrent"}
_OPERATOR = {"softmax": "softmax", "softmax_alone": "softmax", "loss": "softmax", "transcendental": "activation"}
#: Library kernels that read a whole row at once; norms written by hand are pointwise operators and reductions.
_FUSED_NORMS = ("layer_norm", "batch_norm", "group_norm", "rms_norm")
_ACTIVATIONS = ("gelu", "silu", "sigmoid", "tanh", "softplus", "mish", "elu", "exp", "log")


def _operator_kind(operator: Operator) -> str:
    if operator.cls == "norm":
        return "norm" if any(name in operator.op for name in _FUSED_NORMS) else "pointwise"
    if operator.cls in ("pointwise", "output") and any(name in operator.op for name in _ACTIVATIONS):
        return "activation"
    return _OPERATOR.get(operator.cls, "pointwise")


#: From this many query rows on, PyTorch's fused attention works on larger blocks (``q_split_size`` in
#: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp), which in bf16 makes its backward pass several times faster.
_LONG_ROWS = 192


def _fused_attention(operator: Operator) -> tuple[int, float, float, int] | None:
    """Return (sequence, query rows, scores, head width) of a fused attention operator; None for any other."""
    # the backward operator's first tensor is the gradient, which has the shape of the queries
    shapes = operator.shapes[: 3 if operator.phase == "backward" else 2]
    if len(shapes) < 2 or any(len(shape) != 4 for shape in shapes) or "bmm" in operator.op or "matmul" in operator.op:
        return None
    (batch, heads, seq, width), keys = shapes[0], shapes[-1][2]
    rows = float(batch * heads * seq)
    return seq, rows, rows * keys, width


class CpuCost:
    """Layer and step costs on this CPU, one thread, from fitted rates."""

    def __init__(self, rates: Mapping[str, Any]) -> None:
        self.rates = rates
        #: What a whole step takes longer than its operators alone in a hot loop (caches, memory allocation). An update
        #: of small tensors is Python and calls of kernels, so its factor is that of all that is not arithmetic.
        self.in_situ: Mapping[str, float] = rates["in_situ"]

    def gemm_seconds(self, form: str, role: str, m: int, k: int, n: int, batch: int = 1) -> float:
        """Return the time of one GEMM in fp32, bf16 or int8 (other formats run as one of the first two)."""
        native = form if form in ("bf16", "int8") else "fp32"
        per_flop, per_byte, fixed = self.rates["gemm"][native]["fprop" if role == "recompute" else role]
        moved = GEMM_BYTES[native][0] * (m * k + k * n) + GEMM_BYTES[native][1] * m * n
        return float(batch * (2.0 * m * k * n * per_flop + moved * per_byte) + fixed)

    def _cast(self, name: str, elements: float) -> float:
        per_value, fixed = self.rates["casts"][name]
        return float(elements * per_value + fixed) * self.in_situ["bf16"]

    def layer_cost(
        self,
        work: GemmWork,
        plan: LayerPlan,
        *,
        activations: str,
        script: str,
        kind: str = "linear",
        given: float = 0.0,
    ) -> LayerCost:
        """Return the time of one layer's GEMMs and casts under a plan; ``given``: bytes of a value of its input."""
        kept = kept_family(activations, script)
        wide = kept not in ("bf16", "fp16")
        # whether an operand is wider than 16 bits before it is cast, and its gradient afterwards
        widths = {"input": wide or given == 4.0, "weight": script not in ("bf16", "fp16"), "grad_output": wide}
        gemm_time, cast = 0.0, self._handling(plan, activations, kind)
        done: set[str] = set()
        for role in work.roles:
            gemm: Gemm = "fprop" if role == "recompute" else role  # type: ignore[assignment]
            recipe = plan.recipe(gemm)
            form = kept if recipe is None else recipe.format
            operands = GEMM_OPERANDS[gemm]
            if recipe is not None and recipe.scaling is not None and form == "int8":
                per_value, fixed = self.rates["integer"][recipe.scaling.granularity]
                gemm_time += self.gemm_seconds(form, role, *work.dims(role), work.batch) * self.in_situ[form]
                added = fixed * self.in_situ["optimizer"] + per_value * sum(map(work.elements, operands))
                added += work.elements("weight") * self.rates["weights"][form] if gemm == "wgrad" else 0.0
                cast += added * self.in_situ[form]
                result = "grad_output" if gemm == "fprop" else "input"
                if gemm != "wgrad" and not widths[result]:  # its float32 sums are narrowed
                    cast += self._cast("down", work.elements(result))
                if gemm == "fprop":  # to which a bias is added, in float32
                    per_byte, once = self.rates["operators"]["pointwise"]["fp32"]["forward"]
                    cast += once + 8.0 * per_byte * work.elements(result)
                    cast += 0.0 if wide else sum(self._cast(how, work.elements(result)) for how in ("up", "down"))
                continue
            emulated = recipe is not None and (recipe.scaled or form in ("fp16", "tf32"))
            low = form == "bf16" or emulated
            # the FP32 sums of 16-bit operands come from a float32 product here
            native = "bf16" if low and not (recipe is not None and recipe.output == "fp32") else "fp32"
            spent = self.gemm_seconds(native, role, *work.dims(role), work.batch)
            gemm_time += spent * self.rates[_FACTORS.get(kind, "in_situ")][native]
            if gemm == "wgrad":
                cast += work.elements("weight") * self.rates["weights"][native]
            if emulated and recipe is not None:
                per_value, fixed = _EMULATED.get(recipe_family(recipe), _EMULATED["fp8_row"])
                added = fixed + per_value * sum(work.elements(operand) for operand in operands)
                cast += added * self.in_situ["bf16"]
                continue
            if not low:
                continue
            for operand in operands:
                if widths[operand] and operand not in done:
                    done.add(operand)
                    cast += self._cast("down", self._size(work, operand, kind))
            result = {"fprop": "grad_output", "dgrad": "input", "wgrad": "weight"}[gemm]
            if widths[result]:
                cast += self._cast("up", self._size(work, result, kind))
        return LayerCost(gemm=gemm_time * work.copies, cast=cast * work.casts, kernels=0.0, error=0.15)

    def _handling(self, plan: LayerPlan, activations: str, kind: str) -> float:
        """Return what a layer takes beside a plain one, whatever its size: Python, autograd, calls of casts."""
        recipes = [recipe for recipe in plan.recipes if recipe is not None]
        formats = {recipe.format for recipe in recipes} - {"fp32"}
        emulated = any(recipe.scaled and recipe.format != "int8" for recipe in recipes)
        if kind == "rnn" or emulated or (not formats and activations == "keep"):
            return 0.0
        name = "cast" if activations == "keep" else "autocast"
        if "int8" in formats:
            if plan.fprop == plan.dgrad == plan.wgrad:
                return 0.0  # it is in the rate of its casts
            name = "mixed"
        return float(self.rates["handling"][name]) * self.in_situ["optimizer"]

    @staticmethod
    def _size(work: GemmWork, operand: str, kind: str) -> float:
        """Return the values of an operand; a convolution's input is not the patches its GEMM multiplies."""
        size = work.elements(operand)
        return size / 9.0 if kind == "conv" and operand == "input" else size

    def rest_cost(
        self,
        operators: Mapping[int, Operator],
        scale: CostScale,
        *,
        activations: str,
        attention: str,
        runs: Widths | None = None,
        views: int = 0,
    ) -> RestCost:
        """Return the time of what is not a layer's GEMM, in the dtype it runs in under the policy, and its casts.

        ``views``: operators that move nothing.
        """
        seconds = dict.fromkeys(OTHER, 0.0)
        for index, operator in operators.items():
            kind = category(operator.cls)
            depth = scale.depth if in_block(operator.module) else 1.0
            form = self._form(operator, activations, attention) if runs is None else ("fp32", "bf16")[index in runs.low]
            seconds[kind] += self._operator_seconds(operator, scale, depth, form)
            for values in runs.casts.get(index, ()) if runs else ():
                if values:  # forward, and the opposite in backward
                    values *= growth(operator, scale)[1]
                    seconds["pointwise"] += self._cast("up", values) + self._cast("down", values)
        seconds["other"] += views * scale.depth * self.rates["dispatch"] * self.in_situ["rest"]
        return RestCost(seconds, 0.0, 0.0)

    @staticmethod
    def _form(operator: Operator, activations: str, attention: str) -> str:
        kind = category(operator.cls)
        script = short_dtype(operator.dtypes[0]) if operator.dtypes else "fp32"
        low = kind in ("pointwise", *PRODUCTS) and operator.cls not in ("softmax", "transcendental")
        form = activations if activations != "keep" and low else script
        if kind == "attention" and attention != "keep":
            form = attention
        return "bf16" if form == "bf16" else "fp32"

    def _operator_seconds(self, operator: Operator, scale: CostScale, depth: float, form: str) -> float:
        kind = category(operator.cls)
        more_flops, more_bytes = growth(operator, scale)
        narrowed = form == "bf16" and bool(operator.dtypes) and short_dtype(operator.dtypes[0]) == "fp32"
        moved = operator.bytes * more_bytes * (0.5 if narrowed else 1.0)
        phase = "backward" if operator.phase == "backward" else "forward"
        if kind in PRODUCTS and operator.cls != "softmax" and operator.flops:
            spent = self._attention_seconds(operator, form, phase, more_flops, moved, depth)
            return spent * self.in_situ["rest"]
        if operator.cls == "reduction":
            per_byte, fixed = self.rates["reduction"][form]
        else:
            per_byte, fixed = self.rates["operators"][_operator_kind(operator)][form][phase]
        return float(moved * per_byte + fixed * depth) * self.in_situ["rest"]

    def _attention_seconds(
        self, operator: Operator, form: str, phase: str, more: float, moved: float, depth: float
    ) -> float:
        fused = _fused_attention(operator)
        if fused is None:  # written by hand: batched multiplications
            per_flop, per_byte, fixed = self.rates["gemm"][form]["fprop"]
            return float(operator.flops * more * per_flop + moved * per_byte + fixed * depth)
        seq, rows, scores, width = fused
        per_flop, per_score, per_row = self.rates["attention"][form]["short" if seq < _LONG_ROWS else "long"][phase]
        return float(more * (4.0 * scores * width * per_flop + scores * per_score + rows * per_row))

    def gain_of_int8(self) -> str:
        """Return what INT8 gains in a linear layer of 1024 x 1024 x 1024, both ways, its casts included."""
        work = GemmWork(1024, 1024, 1024, batch=1, copies=1.0, roles=GEMMS)
        spent = {}
        for name in ("fp32", "bf16", "int8"):
            plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
            spent[name] = self.layer_cost(work, plan, activations="keep", script="fp32").seconds
        other = min("fp32", "bf16", key=spent.__getitem__)
        return f"int8 gains {spent[other] / spent['int8']:.1f}x over {other} in a layer of 1024^3 (modelled)"

    def update_seconds(self, parameters: float, tensors: float, *, fused: bool) -> float:
        per_value, per_tensor = self.rates["fused_optimizer" if fused else "optimizer"]
        return float(parameters * per_value + tensors * per_tensor) * self.in_situ["optimizer"]
