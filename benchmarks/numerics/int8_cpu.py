"""INT8 linear layers on this CPU over bf16 and fp32, forward and backward, casts included, by instruction set.

    python benchmarks/numerics/int8_cpu.py [--rounds 15] [--write]
    python benchmarks/numerics/int8_cpu.py --huge

One thread, process CPU time, medians of interleaved rounds: trust ratios, not milliseconds. fp32 tensors in and out.
Each row is a process of its own; ``ONEDNN_MAX_CPU_ISA`` limits oneDNN (and the casts of AVX2 rows), and fp32 is MKL's
with AVX-512 but in the last rows. The rows ``GEMM alone`` are the product of bf16 or int8 operands, no casts. The goals
over bf16 were set for AVX512_BF16; with AMX a bf16 GEMM is as fast as torch's int8 one, and they do not apply.
``--write`` keeps the table as ``benchmarks/results/DATE_int8_cpu.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

#: tokens, input features, output features
SHAPES = ((1024, 1024, 1024), (1024, 1024, 4096), (1024, 256, 1024))
#: (instructions of oneDNN, of MKL; mode of the script; what is compared with; goal by shape)
CASES: tuple[tuple[str, str, str, str, tuple[float, ...]], ...] = (
    ("", "", "eager", "bf16", (1.7, 1.8, 1.5)),
    ("", "", "compiled", "bf16", (1.9, 1.9, 1.5)),
    ("", "", "GEMM alone", "bf16", ()),
    ("AVX512_CORE_VNNI", "", "eager", "fp32", (2.8,)),
    ("AVX512_CORE", "", "eager", "fp32", ()),
    ("AVX2", "", "eager", "fp32", (1.3,)),
    ("AVX2", "AVX2", "eager", "fp32", (1.3,)),
)
#: on a machine that has AVX2 alone: nothing to limit, and bf16 takes 15 times as long as fp32
AVX2_CASES: tuple[tuple[str, str, str, str, tuple[float, ...]], ...] = (
    ("", "", "eager", "fp32", (1.3,)),
    ("", "", "compiled", "fp32", (1.3,)),
)


def medians(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of each run, rounds interleaved."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            run()
            found[name].append(time.process_time() - began)
    return {name: sorted(times)[rounds // 2] * 1e3 for name, times in found.items()}


def gemms(rounds: int) -> list[dict[str, float]]:
    """Time one product of each shape, without casts."""
    import torch

    torch.set_num_threads(1)
    out = []
    for tokens, inputs, outputs in SHAPES:
        x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs).t()
        codes = torch.randint(-127, 128, (tokens + outputs, inputs), dtype=torch.int8)
        runs = {
            "fp32": partial(torch.mm, x, weight),
            "bf16": partial(torch.mm, x.bfloat16(), weight.bfloat16()),
            "int8": partial(torch._int_mm, codes[:tokens], codes[tokens:].t()),
        }
        out.append(medians(runs, rounds))
    return out


def measure(mode: str, base: str, rounds: int) -> list[dict[str, float]]:
    """Time a layer of each shape in this process; return the milliseconds by recipe."""
    if mode == "GEMM alone":
        return gemms(rounds)
    import torch
    from torch import nn

    from autoprec.backends import choose
    from autoprec.policy import LayerPlan
    from autoprec.precision.recipes import BUILTIN_RECIPES

    torch.set_num_threads(1)
    torch.manual_seed(0)
    out = []
    for tokens, inputs, outputs in SHAPES:
        layer = nn.Linear(inputs, outputs, bias=False)
        x, grad = torch.randn(tokens, inputs, requires_grad=True), torch.randn(tokens, outputs)
        runs = {}
        for name in dict.fromkeys((base, "fp32", "int8_tensor", "int8")):
            execution = choose("auto", "cpu").bind(LayerPlan.uniform(BUILTIN_RECIPES[name]), layer, name="", seed=0)
            runs[name] = _run(execution, layer, x, grad, mode == "compiled")
        out.append(medians(runs, rounds))
    return out


def _run(execution: object, layer: object, x: object, grad: object, compiled: bool) -> Callable[[], None]:
    import torch

    names = {"execution": execution}
    exec("def call(x, weight): return execution(x, weight, None)", names)  # code of its own: Dynamo counts by code
    call = torch.compile(names["call"], fullgraph=True) if compiled else names["call"]

    def run() -> None:
        x.grad = layer.weight.grad = None
        call(x, layer.weight).backward(grad)

    return run


def child(case: tuple[str, str, str, str, tuple[float, ...]], rounds: int) -> list[dict[str, float]]:
    """Measure one case in a process whose libraries use these instructions."""
    isa, mkl, mode, base, _ = case
    limits = {"ONEDNN_MAX_CPU_ISA": isa, "MKL_ENABLE_INSTRUCTIONS": mkl}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: value for name, value in limits.items() if value}}
    command = [sys.executable, __file__, "--child", mode, base, "--rounds", str(rounds)]
    ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def table(rounds: int) -> list[str]:
    """Return the rows of the table, measuring as it goes."""
    lines = [
        "| oneDNN, MKL | script | tokens x in x out | fp32 ms | bf16 ms | int8_tensor ms | int8 ms "
        "| best over | goal | met |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    from autoprec.precision.hardware import cpu_int8_units

    amx = "AMX" in (cpu_int8_units() or ())
    for case in AVX2_CASES if cpu_int8_units() == () else CASES:
        isa, mkl, mode, base, goals = case
        for index, (shape, found) in enumerate(zip(SHAPES, child(case, rounds), strict=True)):
            gain = found[base] / min(found[name] for name in ("int8_tensor", "int8") if name in found)
            goal = goals[index] if index < len(goals) and not (amx and base == "bf16") else 0.0
            met = ("yes" if gain >= goal else "**no**") if goal else ""
            times = [f"{found[name]:.1f}" if name in found else "" for name in ("fp32", "bf16", "int8_tensor", "int8")]
            where = f"{isa or 'all'}, {mkl or 'all'}"
            cells = [where, mode, " x ".join(map(str, shape)), *times, f"{base} {gain:.2f}x"]
            lines.append(f"| {' | '.join([*cells, f'{goal:.1f}x' if goal else '', met])} |")
            print(lines[-1], flush=True)
    return lines


def huge() -> int:
    """Compare the products of an operand of more than 2**31 values with those of its parts; return how many differ.

    Takes 12 GB and a minute. Every part has the same largest value, so that a scale a tensor is the same for the whole.
    """
    import torch
    from torch import nn

    from autoprec.backends import choose
    from autoprec.policy import LayerPlan
    from autoprec.precision.recipes import BUILTIN_RECIPES

    tokens, inputs, outputs, part = 2**21 + 5, 1024, 64, 2**18
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=False).bfloat16()
    x = torch.empty(tokens, inputs, dtype=torch.bfloat16).uniform_(-1, 1)
    grad = torch.empty(tokens, outputs, dtype=torch.bfloat16).uniform_(-1, 1)
    starts = range(0, tokens, part)
    for start in starts:
        x[start, 0] = grad[start, 0] = 2.0
    wanted = torch.zeros(outputs, inputs)
    for start in starts:
        wanted += grad[start : start + part].float().t() @ x[start : start + part].float()
    differ = 0
    for name in ("int8", "int8_tensor"):
        execution = choose("auto", "cpu").bind(LayerPlan.uniform(BUILTIN_RECIPES[name]), layer, name="", seed=0)
        layer.weight.grad = None
        whole = execution(x, layer.weight, None)
        whole.backward(grad)
        error = float((layer.weight.grad.float() - wanted).norm() / wanted.norm())
        found = 0
        with torch.no_grad():
            for start in starts:
                alone = execution(x[start : start + part], layer.weight, None)
                found += not torch.equal(alone, whole[start : start + part])
        print(f"{name}: {x.numel()} values, {found} of {len(starts)} parts differ, error of wgrad {error:.4f}")
        differ += found
    return differ


def main() -> int:
    """Print the table, and with ``--write`` keep it; or see whether huge operands are multiplied right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--huge", action="store_true", help="an operand of more than 2**31 values instead")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        warnings.filterwarnings("ignore")
        print(json.dumps(measure(args.child[0], args.child[1], args.rounds)))
        return 0
    if args.huge:
        return int(huge() > 0)
    import torch

    from autoprec.cost.device.cpu import cpu_model
    from autoprec.precision.hardware import cpu_instructions

    day, load = time.strftime("%Y-%m-%d"), os.getloadavg()[0]
    lines = table(args.rounds)
    if args.write:
        text = [
            "# INT8 linear layers on a CPU",
            "",
            "`python benchmarks/numerics/int8_cpu.py --write`",
            "",
            f"{cpu_model()} ({cpu_instructions()}); torch {torch.__version__}; one thread, process CPU time, median of "
            f"{args.rounds} interleaved rounds, forward and backward, fp32 tensors in and out; load {load:.1f} at "
            f"the start; {day}.",
            "",
            *lines,
        ]
        (ROOT / "benchmarks" / "results" / f"{day}_int8_cpu.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
