"""Times whole linears by every installed backend, through the path that training takes: policy, layer, autograd.

Each backend has processes of its own, one for eager linears and one for compiled ones, so that a library that crashes,
hangs or spoils the CUDA context loses its own rows and nothing else. They compile side by side, which takes nearly all
of the time, and take turns with the device. A library's delayed scaling that breaks compiled graphs is timed as it
runs: between them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from autoprec.applying.policy import TorchPolicy
from autoprec.backends import BACKENDS, get
from autoprec.cost.calibrate.cuda_bench import CudaBench, queued
from autoprec.cost.calibrate.linears import LINEAR_SHAPES, NATIVE, Linear
from autoprec.errors import AutoPrecError
from autoprec.policy import OperatorPolicy
from autoprec.precision.hardware import Target
from autoprec.precision.recipes import BUILTIN_RECIPES

#: Recipes in the order of what searches of GPU scripts use most; bf16 is what they are beside.
_RECIPES = ("bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
#: Seconds for all backends together; what is not done by then keeps ``auto`` at native.
LIMIT_S = 150.0
#: Seconds of one measurement, and how often it is repeated.
_MEASURE_S, _REPEATS = 0.02, 5
#: Steps that are queued while the device sleeps, and clock cycles that it sleeps for a second of launches: two seconds.
_QUEUED, _CYCLES = 5, 4e9
#: Seconds of work after which a device that waited for a compiler has its clocks back.
_WARM_S = 0.2
#: What no format of the table is away from bf16: the kernel computes something else.
_GARBAGE = 0.5
_KEEP_ALL = OperatorPolicy.model_validate(dict.fromkeys(("softmax", "norm", "embedding", "loss", "output"), "keep"))


def plan(
    target: Target, backend: str, how: str, shapes: Sequence[tuple[int, int, int]] = LINEAR_SHAPES
) -> list[Linear]:
    """Return the rows to fill in for one backend, ``eager`` or ``compiled``, what matters most first."""
    names = [name for name in _RECIPES if target.can_run(BUILTIN_RECIPES[name]).ok]
    if backend != NATIVE:
        names.remove("bf16")  # plain casts are torch's own whoever runs the rest
    return [Linear(name, backend, how, shape) for shape in shapes for name in names]


def time_linear(
    row: Linear, device: torch.device, alone: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
) -> Linear:
    """Return the row with its time, or with why there is none.

    Weights ``[out_features, in_features]`` are float32 under bf16 autocast; input and gradient are bfloat16.

    Args:
        alone: entered for what is timed; the first step, which compiles, is not.
    """
    tokens, width, features = row.shape
    torch.manual_seed(0)
    layer = nn.Linear(width, features, bias=False, device=device)
    model = nn.Sequential(layer)
    policy = TorchPolicy.model_validate(
        {"recipes": {row.recipe: BUILTIN_RECIPES[row.recipe]}, "default": row.recipe, "operators": _KEEP_ALL}
    )
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, features, device=device, dtype=torch.bfloat16) * 1e-3
    policy.apply(model, backend=row.backend)
    if row.how == "compiled":
        torch.compiler.reset()
        counters.clear()
        model.compile(dynamic=False)

    def step() -> Tensor:
        x.grad = layer.weight.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            out: Tensor = model(x)
        out.backward(grad)  # type: ignore[no-untyped-call]
        return out

    step()
    with alone():
        for _ in range(2):  # chooses kernels, and lets delayed scales settle
            out = step()
        report = policy.audit(model)
        if not report.ok:
            return replace(row, failed=f"it ran something else: {report.mismatches[0].reason}"[:200])
        found = (out.detach(), x.grad, layer.weight.grad)
        error = max(_error(value, exact) for value, exact in zip(found, _in_bf16(x, layer.weight, grad), strict=True))
        if not error < _GARBAGE:
            return replace(row, failed=f"its results are {error:.2g} away from bf16's: wrong")
        seconds, spread = _clocked(step, device)
        device_s, host_s = _apart(step, device, seconds) if device.type == "cuda" else (0.0, 0.0)
        if row.how == "compiled" and counters["graph_break"]:  # in a model, too, its launches are its own
            device_s = seconds
    return replace(
        row, seconds=seconds, device_s=device_s, host_s=host_s, spread=round(spread, 4), error=round(error, 5)
    )


@torch.no_grad()
def _in_bf16(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = weight.to(torch.bfloat16)
    return F.linear(x, low), grad @ low, grad.t() @ x


def _error(value: Tensor | None, exact: Tensor) -> float:
    """Return the relative error of a result; infinite where there is none or it is not finite."""
    if value is None:
        return math.inf
    error = float((value.float() - exact.float()).norm() / exact.float().norm())
    return error if math.isfinite(error) else math.inf


def _clocked(step: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return the median seconds of a step called again and again, and the relative spread; host time counts as well."""
    cuda = device.type == "cuda"

    def elapsed(calls: int) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            step()
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    calls = max(2, min(100, math.ceil(_MEASURE_S / elapsed(2))))
    times = sorted(elapsed(calls) for _ in range(_REPEATS))
    median = statistics.median(times)
    return median, (times[-2] - times[1]) / median


def _apart(step: Callable[[], Any], device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the median seconds of a step on the device alone, and on the host alone."""
    cycles = int(_CYCLES * _QUEUED * seconds)
    found = [queued([step] * _QUEUED, cycles, device) for _ in range(_REPEATS)]
    return statistics.median(device for device, _ in found), statistics.median(host for _, host in found)


def _filled(
    rows: Sequence[Linear],
    device: torch.device,
    alone: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[Linear]:
    """Time one row after the other; what fails says why. An error of the device ends the process."""
    for row in rows:
        try:
            yield time_linear(row, device, alone)
        except AutoPrecError as error:
            yield replace(row, failed=error.what)
        except Exception as error:
            if "CUDA error" in str(error):  # nothing on this device works any more, in this process
                raise
            said = (str(error).strip().splitlines() or [""])[0][:200]
            yield replace(row, failed=f"{type(error).__name__}: {said}")


def time_linears(
    target: Target, say: Callable[[str], None], *, device: str = "cuda", limit_s: float = LIMIT_S
) -> list[Linear]:
    """Time the linears of every installed backend, in about ``limit_s`` seconds.

    Args:
        target: the device, as the hardware table knows it.
        say: told what is measured, what fails and what is left out.
        limit_s: what is not done by then is left out.
    """
    names = [name for name in BACKENDS if name != "emulated"]
    here = {name: get(name).available(device) for name in names}
    for name in names:
        if not here[name]:
            say(f"linears by {name}: left out: {here[name].reason}")
    usable = [name for name in names if here[name]]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what was measured in this process needs its memory no more
    jobs = [plan(target, name, how) for how in ("compiled", "eager") for name in usable]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, len(jobs))) as pool:
        turns = Path(folder) / "turns"
        done = pool.map(lambda rows: _of_backend(rows, device, limit_s, say, turns), jobs)
        return [row for rows in done for row in rows]


def _of_backend(
    rows: list[Linear], device: str, limit_s: float, say: Callable[[str], None], turns: Path
) -> list[Linear]:
    """Time the rows of one backend, eager or compiled, in another process after each crash."""
    out: list[Linear] = []
    name, ends = f"{rows[0].backend}, {rows[0].how}", time.monotonic() + limit_s
    while rows and (left := ends - time.monotonic()) > 0:
        done, how = _process(rows, device, left, turns)
        out += done
        rows = rows[len(done) :]
        if how == "late":
            say(f"linears by {name}: stopped after {limit_s:.0f} s, {len(rows)} were not timed")
            break
        if rows:  # the process died in the first of those that are left
            out.append(replace(rows[0], failed=how))
            rows = [row for row in rows[1:] if row.recipe != rows[0].recipe]
    for row in out:
        if row.seconds:
            shape = "x".join(str(size) for size in row.shape)
            apart = f"the device alone {row.device_s * 1e6:.1f}, the host {row.host_s * 1e6:.1f}"
            say(f"linear {row.recipe} {shape} by {name}: {row.seconds * 1e6:.1f} us ({apart})")
    for recipe, failed in dict.fromkeys((row.recipe, row.failed) for row in out if row.failed):
        say(f"linear {recipe} by {name}: {failed}")
    return out


def _process(rows: Sequence[Linear], device: str, limit_s: float, turns: Path) -> tuple[list[Linear], str]:
    """Return the rows that a process filled in, and how it ended: ``late``, empty, or what it died of."""
    asked = json.dumps({"device": device, "turns": str(turns), "rows": [row.to_json() for row in rows]})
    words = [sys.executable, "-m", "autoprec.cost.calibrate.linear_bench"]
    with tempfile.TemporaryDirectory() as folder:
        told, log = Path(folder) / "rows", Path(folder) / "log"
        with log.open("w") as stream:  # a pipe would be held open by what a compiler leaves behind
            words.append(str(told))
            try:
                code = subprocess.run(
                    words, input=asked, text=True, stdout=stream, stderr=stream, timeout=limit_s, check=False
                ).returncode
                last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]
                how = f"its process ended with status {code}: {last}" if code else ""
            except subprocess.TimeoutExpired:
                how = "late"
        lines = told.read_text().split("\n")[:-1] if told.exists() else []  # what follows the last break was cut off
    return [Linear.from_json(json.loads(line)) for line in lines], how


def main(path: str) -> None:
    """Fill in the rows that standard input asks for, one line of ``path`` each."""
    asked = json.loads(sys.stdin.read())
    device = torch.device(asked["device"])

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        with Path(asked["turns"]).open("a") as turn:  # closed, it is free, however this process ends
            fcntl.flock(turn, fcntl.LOCK_EX)
            if device.type == "cuda":
                CudaBench(asked["device"]).warm(_WARM_S)
            yield

    with Path(path).open("w") as stream:
        for row in _filled([Linear.from_json(row) for row in asked["rows"]], device, alone):
            print(json.dumps(row.to_json()), file=stream, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
