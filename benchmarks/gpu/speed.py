"""How fast a device multiplies in FP8, and trains four blocks in each precision that can be had; no search.

    python benchmarks/gpu/speed.py products [--out DIR]   _scaled_mm: tensor and row scales, fast and full accumulation
    python benchmarks/gpu/speed.py blocks [--out DIR]     4 blocks of width 4096, forward and backward

``blocks`` has bf16 autocast, torchao's recipes, ours by the ``native`` backend, Transformer Engine's, and FP8 in blocks
by torchao's products, each eager and compiled (block by block), one process per precision. Rows that are
done are kept in ``DIR`` and not run again.
``--tiny`` rehearses the same on a CPU, with stand-ins for the device's clocks: the path, not the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.parts import Parts, environment

#: What matters most first: the time may run out.
FIRST = ("bf16", "native-fp8_rowwise", "torchao-rowwise", "native-fp8_tensorwise", "torchao-tensorwise")
NAMES = (
    *(*FIRST, "te-current", "te-delayed", "native-fp8_delayed"),
    *("native-fp8_block", "torchao-fp8_block"),
)
#: Recipes of a library, and ours that quantise the same way.
SAME = {
    "torchao-rowwise": "native-fp8_rowwise",
    "torchao-tensorwise": "native-fp8_tensorwise",
    "te-current": "native-fp8_tensorwise",
    "te-delayed": "native-fp8_delayed",
    "torchao-fp8_block": "native-fp8_block",
}
WARMUP, STEPS = 6, 20
#: A cold device runs at low clocks: steps are not timed before it has worked so long.
WARM_S = 2.0
#: Seconds after which one precision, eager and compiled, is ended.
LIMIT = 150.0


def products(*, tiny: bool) -> list[str]:
    """Return the table of products: bf16, and FP8 by scales and accumulation, in TFLOP/s by shape (M, K, N)."""
    from benchmarks.gpu.products import GEMM_SHAPES

    bench, shapes = (_cpu_bench(), ((64, 128, 32),)) if tiny else (_cuda_bench(), GEMM_SHAPES)
    rows = [("bf16", False), *((family, fast) for family in ("fp8_tensor", "fp8_row") for fast in (False, True))]
    lines = ["| product | " + " | ".join("x".join(map(str, shape)) for shape in shapes) + " |"]
    lines += ["|---|" + "--:|" * len(shapes)]
    for family, fast in rows:
        cells = []
        for m, k, n in shapes:
            try:
                seconds = bench.gemm(family, m, k, n, fast=fast)
                cells.append("-" if seconds is None else f"{2 * m * k * n / seconds / 1e12:.3g}")
            except Exception as error:  # what one kernel cannot do is told, the others go on
                cells.append(f"{type(error).__name__}: {error}".splitlines()[0][:60])
        what = family if family == "bf16" else f"{family}, {'fast' if fast else 'full'} accumulation"
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return ["TFLOP/s:", "", *lines]


def _cuda_bench() -> Any:
    from benchmarks.gpu.products import ProductBench

    bench = ProductBench()
    bench.warm()
    return bench


def _cpu_bench() -> Any:
    from benchmarks.gpu.products import ProductBench

    class OnCpu(ProductBench):
        def _sets(self, _size: int) -> int:
            return 1

        def _time(self, runs: list[Callable[[], Any]]) -> float:
            began = time.perf_counter()
            runs[0]()
            return time.perf_counter() - began

    return OnCpu("cpu")


def block_row(name: str, how: str, *, tiny: bool) -> dict[str, Any]:
    """Time one step (forward and backward, no optimizer) of the blocks in one precision, ``eager`` or ``compiled``."""
    import torch
    from torch._dynamo.utils import counters

    import autoprec
    from autoprec.precision.recipes import BUILTIN_RECIPES
    from benchmarks.gpu.ready import uniform
    from benchmarks.gpu.train_transformer import Block, Shape, convert

    if not tiny:  # what ran before in this process, eager, must not count as this one's memory
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    shape = Shape(64, 2, 2, 32, 2, 0) if tiny else Shape(4096, 4, 32, 2048, 4, 0)
    device = "cpu" if tiny else "cuda"
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block(shape, causal=True) for _ in range(shape.depth)]).to(device)
    around, policy = contextlib.nullcontext, None
    backend, _, recipe = name.partition("-")
    if recipe in BUILTIN_RECIPES:
        policy = autoprec.Policy.model_validate(uniform(recipe))
        policy.apply(model, backend=backend)
    else:
        around = convert(model, name)
    for block in model if how == "compiled" else ():
        block.compile()
    x = torch.randn(shape.batch, shape.context, shape.width, device=device, requires_grad=True)

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        x.grad = None
        with torch.autocast(device, torch.bfloat16), around():
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        return loss

    counters.clear()
    loss = step()
    gradient = float(x.grad.norm())  # type: ignore[union-attr]
    times = _cpu_times(step) if tiny else _cuda_times(step)
    row = {"step_ms": statistics.median(times), "loss": float(loss.detach()), "gradient": gradient}
    row |= {"breaks": sum(counters["graph_break"].values())}
    row |= {} if tiny else {"memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    if policy is not None:
        report = policy.audit(model)
        row["executed"] = "as asked" if report.ok else str(report.mismatches)[:200]
    return row


def _cuda_times(step: Callable[[], Any]) -> list[float]:
    """Return milliseconds of steps on the device, with the host's launches where they are what takes longest."""
    import torch

    began, steps = time.monotonic(), 0
    while steps < WARMUP or time.monotonic() - began < WARM_S:
        step()
        torch.cuda.synchronize()
        steps += 1
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def _cpu_times(step: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(2):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def one(name: str, *, tiny: bool) -> dict[str, Any]:
    """Return the rows of one precision, which a process of its own makes, so that what fails takes nothing along."""
    words = [sys.executable, str(Path(__file__)), "blocks", "--one", name, *(["--tiny"] if tiny else [])]
    try:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace").splitlines()
        return _last(said) | {"compiled": {"failed": f"not done after {LIMIT:.0f} s"}}
    found = _last(done.stdout.splitlines())
    return found or {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:300]}


def _last(said: list[str]) -> dict[str, Any]:
    """Return the last rows that a process told, whatever ended it."""
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        return dict(json.loads(said[-1]))
    return {}


def _one(name: str, *, tiny: bool) -> dict[str, Any]:
    import torch

    rows: dict[str, Any] = {}
    for how in ("eager", "compiled"):
        torch._dynamo.reset()
        try:
            rows[how] = block_row(name, how, tiny=tiny)
        except Exception as error:
            rows[how] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        if "failed" not in rows[how]:
            print(json.dumps(rows), flush=True)  # what is known if the rest takes too long
    if all("failed" in row for row in rows.values()):
        return {"failed": rows["eager"]["failed"]}
    return rows


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table of blocks: times beside bf16's of the same kind, and what differs from it."""
    titles = "precision | how | step ms | bf16 / it | memory GB | breaks | loss / bf16's | gradient / bf16's | executed"
    lines = [f"| {titles} |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|---|"]
    for name, found in rows.items():
        if "failed" in found:
            lines.append(f"| {name} | | failed: {found['failed'][:120]} | | | | | | |")
            continue
        for how, row in found.items():
            if "failed" in row:
                lines.append(f"| {name} | {how} | failed: {row['failed'][:120]} | | | | | | |")
                continue
            beside = rows.get("bf16", {}).get(how, {})
            ratios = [
                row[key] / beside[key] if key in beside else float("nan") for key in ("step_ms", "loss", "gradient")
            ]
            memory = f"{row['memory_gb']:.2f}" if "memory_gb" in row else "-"
            lines.append(
                f"| {name} | {how} | {row['step_ms']:.2f} | {1 / ratios[0]:.3f} | {memory} | {row['breaks']} | "
                f"{ratios[1]:.3f} | {ratios[2]:.3f} | {row.get('executed', '')} |"
            )
    return [*lines, "", *beside_libraries(rows)]


def beside_libraries(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each recipe that a library runs, too: its step time over that of the ``native`` backend."""
    lines = []
    for library, ours in SAME.items():
        for how in ("eager", "compiled"):
            times = [rows.get(name, {}).get(how, {}).get("step_ms") for name in (library, ours)]
            if None not in times:
                lines.append(f"- {library} / {ours}, {how}: {times[0] / times[1]:.3f}")
    return lines


def main() -> None:
    """Print one of the tables; ``--out`` keeps its rows, and the table as ``products.md`` or ``blocks.md``."""
    parser = argparse.ArgumentParser(description="FP8 products and blocks on a GPU")
    parser.add_argument("what", choices=("products", "blocks"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--names", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: the path, not the figures")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_one(arguments.one, tiny=arguments.tiny)))
        return
    out = arguments.out or Path(tempfile.mkdtemp(prefix="gpu-speed-"))
    parts = Parts(out)
    if arguments.what == "products":
        lines = parts.get("products", lambda: {"lines": products(tiny=arguments.tiny)})["lines"]
    else:
        rows: dict[str, dict[str, Any]] = {}
        for name in arguments.names.split(","):
            rows[name] = parts.get(name, lambda n=name: one(n, tiny=arguments.tiny))
            print(f"{name}: {json.dumps(rows[name])[:300]}", flush=True)  # what is known if the rest takes too long
        lines = table(rows)
    if arguments.tiny:
        lines = ["A CPU rehearses the path; the figures say nothing of a GPU.", "", *lines]
    print("\n".join(lines))
    (out / f"{arguments.what}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
