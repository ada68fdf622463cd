"""The micro-benchmark behind the ``cpu`` target, run as a child process: prints fitted rates as one line of JSON.

One thread, process CPU time, best of a few repetitions, a time budget. This is the only file of the cost model that
imports torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["main", "measure"]

_SHAPES = ((256, 128, 128), (1024, 64, 256), (512, 256, 512), (768, 512, 512))
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _best(run: Callable[[], Any], repeats: int = 3, floor: float = 1e-4) -> float:
    """Return the shortest CPU time of one call in seconds (short calls are timed in batches)."""
    run()
    start = time.process_time()
    run()
    once = max(time.process_time() - start, 1e-7)
    inner = max(1, int(floor / once))
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(inner):
            run()
        best = min(best, (time.process_time() - start) / inner)
    return best


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


def _gemms() -> dict[str, dict[str, list[float]]]:
    """Return format -> role -> seconds per (FLOP, byte moved, call)."""
    out: dict[str, dict[str, list[float]]] = {}
    for name, dtype in _DTYPES.items():
        size = dtype.itemsize
        rows: list[list[float]] = []
        times: dict[str, list[float]] = {"fprop": [], "dgrad": [], "wgrad": []}
        for m, k, n in _SHAPES:
            x, w, g = (torch.randn(*shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
            rows.append([2.0 * m * k * n, float(size * (m * k + k * n + m * n)), 1.0])
            times["fprop"].append(_best(lambda x=x, w=w: torch.nn.functional.linear(x, w)))  # type: ignore[misc]
            times["dgrad"].append(_best(lambda g=g, w=w: g @ w))  # type: ignore[misc]
            times["wgrad"].append(_best(lambda g=g, x=x: g.t() @ x))  # type: ignore[misc]
        out[name] = {role: _fit(rows, values) for role, values in times.items()}
    return out


def _operators() -> dict[str, dict[str, list[float]]]:
    """Return class -> format -> seconds per (byte moved, call) of typical operators."""
    functional = torch.nn.functional
    runs: dict[str, Callable[[torch.Tensor], Any]] = {
        "pointwise": lambda x: x + x,
        "activation": lambda x: functional.gelu(x),
        "norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
        "softmax": lambda x: torch.softmax(x, -1),
        "reduction": lambda x: x.sum(),
    }
    out: dict[str, dict[str, list[float]]] = {}
    for name, run in runs.items():
        for form, dtype in _DTYPES.items():
            rows, times = [], []
            for shape in ((64, 256), (1024, 256), (1024, 1024)):
                x = torch.randn(*shape).to(dtype)
                moved = x.numel() * dtype.itemsize * (1.0 if name == "reduction" else 2.0)
                rows.append([moved, 1.0])
                times.append(_best(lambda x=x, run=run: run(x)))  # type: ignore[misc]
            out.setdefault(name, {})[form] = _fit(rows, times)
    return out


def _casts() -> dict[str, list[float]]:
    """Return what -> seconds per (value, call) of casts and of quantising to 8 bits."""
    runs: dict[str, Callable[[torch.Tensor], Any]] = {
        "down": lambda x: x.to(torch.bfloat16),
        "up": lambda x: x.to(torch.bfloat16).to(torch.float32),
        "amax": lambda x: x.abs().amax(),
        "amax_row": lambda x: x.abs().amax(-1, keepdim=True),
        "round": lambda x: (x * 3.0).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.bfloat16),
    }
    out: dict[str, list[float]] = {}
    for name, run in runs.items():
        rows, times = [], []
        for shape in ((64, 256), (1024, 256), (1024, 512)):
            x = torch.randn(*shape)
            rows.append([float(x.numel()), 1.0])
            times.append(_best(lambda x=x, run=run: run(x)))  # type: ignore[misc]
        out[name] = _fit(rows, times)
    out["up"] = [max(0.0, up - down) for up, down in zip(out["up"], out["down"], strict=True)]
    return out


def _attention() -> dict[str, dict[str, list[float]]]:
    """Return format -> phase -> seconds per (FLOP, call) of fused attention."""
    out: dict[str, dict[str, list[float]]] = {}
    for form, dtype in _DTYPES.items():
        rows, forward, backward = [], [], []
        for batch, heads, seq, width in ((4, 4, 64, 32), (4, 4, 128, 64)):
            q, k, v = (torch.randn(batch, heads, seq, width).to(dtype).requires_grad_() for _ in range(3))
            out_grad = torch.randn(batch, heads, seq, width).to(dtype)

            def run(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            def both(run: Callable[[], torch.Tensor] = run, grad: torch.Tensor = out_grad) -> None:
                torch.autograd.backward(run(), grad)

            rows.append([4.0 * batch * heads * seq * seq * width, 1.0])
            forward.append(_best(run))
            backward.append(max(1e-7, _best(both) - forward[-1]))
        out[form] = {"forward": _fit(rows, forward), "backward": _fit(rows, backward)}
    return out


def _optimizer() -> list[float]:
    """Return seconds per (parameter, tensor) of a default AdamW step."""
    rows, times = [], []
    for count, size in ((20, 1_000), (4, 60_000), (2, 400_000)):
        values = [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]
        for value in values:
            value.grad = torch.randn(size)
        optimizer = torch.optim.AdamW(values, lr=1e-3)
        rows.append([float(size * count), float(count)])
        times.append(_best(optimizer.step, repeats=2))
    return _fit(rows, times)


def measure() -> dict[str, Any]:
    """Return the fitted rates of this machine's CPU, one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.process_time()
    out = {
        "gemm": _gemms(),
        "operators": _operators(),
        "casts": _casts(),
        "attention": _attention(),
        "optimizer": _optimizer(),
    }
    return {**out, "torch": torch.__version__, "seconds": time.process_time() - start}


def main() -> int:
    """Print the rates as one line of JSON."""
    print(json.dumps(measure()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
