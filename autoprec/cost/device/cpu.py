"""This machine's CPU as a device of the roofline: how fast one thread multiplies fp32, bf16 and int8.

Three products are timed when a search or an estimate begins, in a child process. They say which format multiplies
faster here (AMX, AVX512-BF16, VNNI, or none of them), and no more: bandwidth and what a call takes are typical figures,
so times are rough and say so. What is searched on this machine is timed in trials and duels, which decide.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from autoprec.precision.hardware import Target

#: Formats whose products are timed; the others are computed in one of them.
FORMATS = ("fp32", "bf16", "int8")
#: FLOP/s of a plain AVX2 core, taken where no product can be timed.
UNMEASURED: Mapping[str, float] = {"fp32": 60e9, "bf16": 60e9, "int8": 90e9}
UNCALIBRATED = "modelled, uncalibrated (no product could be timed on this CPU)"
#: What a format without units is computed in: rounded first, then multiplied as bf16; TF32 is rounded fp32.
_COMPUTED_IN = {"fp8": "bf16", "mxfp8": "bf16", "nvfp4": "bf16", "fp16": "bf16", "tf32": "fp32", "fp64": "fp32"}
#: Sizes M, K, N of a timed product, seconds that its calls may take, and the most calls.
_SIZE, _FOR_S, _MOST_CALLS = (512, 1024, 1024), 0.25, 12
#: Seconds for all of it, the start of a process with PyTorch included, which takes tens of them on a busy machine.
_PATIENCE_S = 120.0
#: Bytes per second of one thread, in memory; rates.yaml has the shares that kernels reach.
BANDWIDTH = 10e9


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure() -> dict[str, float]:
    """Time one product of each format in this process, on one thread, and return FLOP/s by format.

    The least time of several calls counts: other work on the machine only adds time.
    """
    import torch

    from autoprec.backends.cpu.int8 import int8_sums
    from autoprec.backends.cpu.library import library

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    m, k, n = _SIZE
    product = {"int8": torch._int_mm if library() is None else int8_sums}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
    found = {}
    try:
        for name in FORMATS:
            x, w = (torch.randn(*shape).mul_(16.0).to(dtypes[name]) for shape in ((m, k), (n, k)))
            found[name] = 2.0 * m * k * n / _least_seconds(product.get(name, torch.mm), x, w.t())
    finally:
        torch.set_num_threads(threads)
    return found


def _least_seconds(product: object, *operands: object) -> float:
    least, began = float("inf"), time.process_time()
    for _ in range(_MOST_CALLS):
        start = time.process_time()
        product(*operands)  # type: ignore[operator]
        least = min(least, time.process_time() - start)
        if time.process_time() - began > _FOR_S:
            break
    return max(least, 1e-6)


@lru_cache(maxsize=1)
def cpu_rates() -> tuple[Mapping[str, float], str]:
    """Return FLOP/s by format on one thread of this CPU, and the label of figures that rest on them.

    Measured once in each process, by a child that imports torch.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AUTOPREC_")}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    code = "import json; from autoprec.cost.device.cpu import measure; print(json.dumps(measure()))"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=True,
        )
        found = json.loads(ended.stdout.strip().splitlines()[-1])
        rates = {name: float(found[name]) for name in FORMATS}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError, TypeError):
        return UNMEASURED, UNCALIBRATED
    return rates, f"modelled roughly, from three products timed on this CPU ({rates_text(rates)})"


def rates_text(rates: Mapping[str, float]) -> str:
    """Return the rates for people, e.g. ``fp32 85, bf16 170, int8 340 GFLOP/s on one thread``."""
    return ", ".join(f"{name} {rates[name] / 1e9:.3g}" for name in FORMATS) + " GFLOP/s on one thread"


def on_this_cpu(target: Target, rates: Mapping[str, float]) -> Target:
    """Return the target ``cpu`` with the peaks that were measured; formats without units have those they run in."""
    peaks = {**rates, **{name: rates[other] for name, other in _COMPUTED_IN.items()}}
    peaks["fp64"] = 0.5 * rates["fp32"]
    return replace(target, peaks={name: rate / 1e12 for name, rate in peaks.items()}, units=1, bandwidth=BANDWIDTH)
