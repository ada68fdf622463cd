"""The CPU as a target: rates of this machine, fitted by a short micro-benchmark in a child process, and cached.

On a CPU bf16 multiplications may be several times faster than fp32 (AMX, AVX512-BF16), 8-bit recipes are emulated
(round, multiply in bf16) and therefore never faster than bf16, and casts, norms and attention do not gain.
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
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoprec.cost.kernels import LayerCost, kept_family
from autoprec.cost.rest import OTHER, RestCost, category, growth
from autoprec.cost.scale import CostScale, GemmWork, in_block, short_dtype
from autoprec.errors import AutoPrecError
from autoprec.files import write_json
from autoprec.graph.report import Operator
from autoprec.hardware import recipe_family
from autoprec.policy.schema import LayerPlan
from autoprec.recipes import GEMM_OPERANDS, Gemm, Recipe

__all__ = ["FALLBACK", "CpuCost", "cache_file", "cpu_rates"]

_SCHEMA = 1
_PROBE_TIMEOUT_S = 60.0

#: Used when the micro-benchmark cannot run: a plain AVX2 core without bf16 instructions.
FALLBACK: dict[str, Any] = {
    "gemm": {
        "fp32": {role: [1.5e-11, 5e-11, 2e-5] for role in ("fprop", "dgrad", "wgrad")},
        "bf16": {role: [1.5e-11, 5e-11, 3e-5] for role in ("fprop", "dgrad", "wgrad")},
    },
    "operators": {
        name: {"fp32": [1e-10, 5e-6], "bf16": [2e-10, 5e-6]}
        for name in ("pointwise", "activation", "norm", "softmax", "reduction")
    },
    "casts": {name: [8e-10, 4e-6] for name in ("down", "up", "amax", "amax_row")} | {"round": [8e-9, 1e-5]},
    "attention": {form: {"forward": [2e-11, 1e-4], "backward": [5e-11, 4e-4]} for form in ("fp32", "bf16")},
    "optimizer": [5e-9, 7e-5],
    "torch": "",
}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_file() -> Path:
    """Return where the rates of this CPU and this torch are cached (``$XDG_CACHE_HOME/autoprec``)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "none"
    key = hashlib.sha256(f"{_SCHEMA}|{_cpu_model()}|{torch_version}".encode()).hexdigest()[:16]
    return root / "autoprec" / f"cpu-{key}.json"


def _valid(document: Any) -> bool:
    return isinstance(document, dict) and all(key in document for key in FALLBACK)


def _probe() -> dict[str, Any] | None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    for name in [key for key in environment if key.startswith("AUTOPREC_")]:
        del environment[name]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "autoprec.cost.cpu_probe"],
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


@lru_cache(maxsize=4)
def _load(path: str, refresh: bool) -> tuple[dict[str, Any], str]:
    file = Path(path)
    if not refresh:
        try:
            cached = json.loads(file.read_text(encoding="utf-8"))
            if _valid(cached):
                return cached, "modelled, rates of this CPU (cached)"
        except (OSError, ValueError):
            pass
    measured = _probe()
    if measured is None:
        return FALLBACK, "modelled, uncalibrated (the CPU micro-benchmark could not run)"
    with contextlib.suppress(AutoPrecError, OSError):  # a cache that cannot be written costs seconds, never a search
        write_json(file, {**measured, "cpu": _cpu_model()})
    return measured, "modelled, rates of this CPU"


def cpu_rates(*, refresh: bool = False) -> tuple[dict[str, Any], str]:
    """Return this machine's fitted rates and the label of figures that rest on them; measured once, then cached."""
    return _load(str(cache_file()), refresh)


_OPERATOR = {
    "norm": "norm",
    "softmax": "softmax",
    "loss": "softmax",
    "transcendental": "activation",
    "reduction": "reduction",
}


class CpuCost:
    """Layer and step costs on this CPU, one thread, from fitted rates."""

    def __init__(self, rates: Mapping[str, Any]) -> None:
        self.rates = rates

    def gemm_seconds(self, form: str, role: str, m: int, k: int, n: int, batch: int) -> float:
        """Return the time of one GEMM in fp32 or bf16 (other formats run as one of the two)."""
        native = "bf16" if form == "bf16" else "fp32"
        per_flop, per_byte, fixed = self.rates["gemm"][native]["fprop" if role == "recompute" else role]
        size = 2 if native == "bf16" else 4
        moved = size * (m * k + k * n + m * n)
        return float(batch * (2.0 * m * k * n * per_flop + moved * per_byte) + fixed)

    def _cast(self, name: str, elements: float) -> float:
        per_value, fixed = self.rates["casts"][name]
        return float(elements * per_value + fixed)

    def _quantise(self, recipe: Recipe, elements: float, passes: int) -> float:
        """Return the time to round one operand to 8 bits or fewer, as the emulation runs it."""
        family = recipe_family(recipe)
        amax = "amax" if family in ("fp8_tensor", "fp8_delayed") else "amax_row"
        factor = {"nvfp4": 2.5, "mxfp8": 1.5, "fp8_block": 1.3}.get(family, 1.0)
        return passes * factor * (self._cast(amax, elements) + self._cast("round", elements))

    def layer_cost(self, work: GemmWork, plan: LayerPlan, *, activations: str, script: str) -> LayerCost:
        """Return the time of one layer's GEMMs and casts under a plan."""
        kept = kept_family(activations, script)
        wide = kept not in ("bf16", "fp16")
        gemm_time = cast = 0.0
        done: set[tuple[str, str]] = set()
        for role in work.roles:
            gemm: Gemm = "fprop" if role == "recompute" else role  # type: ignore[assignment]
            recipe = plan.recipe(gemm)
            form = kept if recipe is None else recipe.format
            low = form == "bf16" or (recipe is not None and recipe.scaled)
            gemm_time += self.gemm_seconds("bf16" if low else "fp32", role, *work.dims(role), work.batch)
            for operand in GEMM_OPERANDS[gemm]:
                elements = work.elements(operand)
                source_wide = wide if operand != "weight" else script not in ("bf16", "fp16")
                if recipe is not None and recipe.scaled:
                    per_tensor = recipe_family(recipe) in ("fp8_tensor", "fp8_delayed")
                    key = (operand, recipe.describe() if per_tensor else f"{recipe.describe()}|{gemm}")
                    if key not in done:
                        done.add(key)
                        cast += self._quantise(recipe, elements, 1)
                elif low and source_wide and (operand, "bf16") not in done:
                    done.add((operand, "bf16"))
                    cast += self._cast("down", elements)
            result = {"fprop": "grad_output", "dgrad": "input", "wgrad": "weight"}[gemm]
            result_wide = wide if result != "weight" else script not in ("bf16", "fp16")
            if low and result_wide:
                cast += self._cast("up", work.elements(result))
        return LayerCost(gemm=gemm_time * work.copies, cast=cast * work.copies, kernels=0.0, error=0.15)

    def rest_cost(
        self, operators: Iterable[Operator], scale: CostScale, *, activations: str, attention: str
    ) -> RestCost:
        """Return the time of what is no layer's GEMM, in the dtype it runs in under the policy."""
        seconds = dict.fromkeys(OTHER, 0.0)
        count = 0.0
        for operator in operators:
            kind = category(operator.cls)
            script = short_dtype(operator.dtypes[0]) if operator.dtypes else "fp32"
            low = kind in ("pointwise", "attention") and operator.cls not in ("softmax", "transcendental")
            form = activations if activations != "keep" and low else script
            if kind == "attention" and attention != "keep":
                form = attention
            form = "bf16" if form == "bf16" else "fp32"
            more_flops, more_bytes = growth(operator, scale)
            moved = operator.bytes * more_bytes * (0.5 if form == "bf16" and script == "fp32" else 1.0)
            depth = scale.depth if in_block(operator.module) else 1.0
            per_byte, fixed = self.rates["operators"][_OPERATOR.get(operator.cls, "pointwise")][form]
            time = moved * per_byte + fixed * depth
            if kind == "attention" and operator.cls != "softmax" and operator.flops:
                phase = "backward" if operator.phase == "backward" else "forward"
                per_flop, fixed = self.rates["attention"][form][phase]
                time = operator.flops * more_flops * per_flop * (0.4 if phase == "backward" else 1.0) + fixed * depth
            seconds[kind] += time
            count += depth
        return RestCost(seconds, 0.0, count)

    def update_seconds(self, parameters: float, tensors: float) -> float:
        """Return the time of one AdamW step."""
        per_value, per_tensor = self.rates["optimizer"]
        return float(parameters * per_value + tensors * per_tensor)
