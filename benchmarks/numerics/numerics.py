"""Figures of the numerics and backends: exactness against torch and torchao, CPU speed of the emulation, overheads.

    python benchmarks/numerics/numerics.py [--only PART,...] [--compiled] [--rounds 7] [--write]

The parts are exact, gemm, linear, overhead and gradients. ``--write`` keeps the table as
``benchmarks/results/DATE_numerics[_PARTS].md``, goals missed included. Times are process CPU time of one thread, taken
in interleaved rounds: trust ratios, not milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec import Policy  # noqa: E402
from autoprec.cost.device.cpu import cpu_model  # noqa: E402
from autoprec.numerics.linear import LinearExecution  # noqa: E402
from autoprec.numerics.quantize import (  # noqa: E402
    dequantize,
    quantize,
    spec_of,
)
from autoprec.numerics.rounding import STORAGE, encode  # noqa: E402
from autoprec.policy import LayerPlan  # noqa: E402
from autoprec.precision.recipes import BUILTIN_RECIPES as RECIPES  # noqa: E402
from autoprec.precision.recipes import GEMMS  # noqa: E402
from autoprec.support.optional import installed_version, is_available  # noqa: E402
from autoprec.trial.processes import read_if_there  # noqa: E402
from tests.conformance.backends import reference_gemms  # noqa: E402

Row = tuple[str, str, str, bool | None]


def times(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each, rounds interleaved."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            found[name].append(time.process_time() - start)
    gc.enable()
    return {name: sorted(values)[len(values) // 2] for name, values in found.items()}


def wide(count: int) -> Tensor:
    """Values of every size: 10^-38 to 10^38, subnormals, zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator) * torch.exp(torch.randn(count, generator=generator) * 10)
    x[::997], x[5::4999] = 0.0, 1e-41
    return x.reshape(-1, 256)


def exact(_args: argparse.Namespace) -> list[Row]:
    """Quantise-dequantise against torch's casts and torchao's tensors: how many of 10^7 values differ."""
    x = wide(39_168 * 256)
    rows: list[Row] = []

    def add(what: str, ours: Tensor, theirs: Tensor) -> None:
        equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
        wrong = int((~equal).sum())
        rows.append((f"{what}, {x.numel():,} values", "bit-exact", f"{wrong} differ", wrong == 0))

    for name, limit in (("e4m3", 448.0), ("e5m2", 57344.0)):
        infinite = x.clone()
        infinite[7, 3] = float("inf")
        theirs = infinite.clamp(-limit, limit).to(STORAGE[name]).float()
        add(f"{name} against torch's cast", encode(infinite, name).float(), theirs)
    if not is_available("torchao"):
        return [*rows, ("torchao's MX and NVFP4 tensors", "bit-exact", "torchao is not installed", None)]
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    for name in ("e4m3", "e5m2"):
        y = x.clone()
        y[7, 3], y[9, 40] = float("inf"), float("nan")
        recipe = RECIPES["mxfp8"].model_copy(
            update={"operands": RECIPES["mxfp8"].operands.model_copy(update={"input": name})}
        )
        theirs = MXTensor.to_mx(y, STORAGE[name], 32, ScaleCalculationMode.RCEIL).dequantize(torch.float32)
        add(f"MXFP8 {name} against torchao's", dequantize(quantize(y, spec_of(recipe, "fprop", "input"))), theirs)
    bounded = x.clamp(-1e30, 1e30)
    theirs = NVFP4Tensor.to_nvfp4(bounded, per_tensor_scale=per_tensor_amax_to_scale(bounded.abs().max()))
    ours = dequantize(quantize(bounded, spec_of(RECIPES["nvfp4_plain"], "fprop", "input")))
    add("NVFP4 against torchao's", ours, theirs.dequantize(torch.float32))
    return rows


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gemm(_args: argparse.Namespace) -> list[Row]:
    """The emulated product against ``torch._scaled_mm`` and torchao, in the same run."""
    from autoprec.backends import get

    torch.manual_seed(0)
    rows: list[Row] = []
    module, x, grad = nn.Linear(192, 256, bias=False), torch.randn(128, 192), torch.randn(128, 256)
    for name in ("fp8_tensorwise_e4m3", "fp8_rowwise"):
        plan = LayerPlan.uniform(RECIPES[name])
        results = {}
        for backend in ("emulated", "native", "torchao"):
            if backend == "torchao" and not is_available("torchao"):
                continue
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            run = get(backend).bind(plan, module, name="x", seed=0)
            run(leaf, module.weight, None).backward(grad)
            results[backend] = (run(leaf, module.weight, None).detach(), leaf.grad, module.weight.grad.clone())
        exact_output = reference_gemms(x, module.weight.detach(), grad, plan)
        rounding = relative(exact_output["fprop"].bfloat16(), exact_output["fprop"])
        for backend in [b for b in results if b != "emulated"]:
            worst = max(relative(a, b) for a, b in zip(results["emulated"], results[backend], strict=True))
            who = "torch._scaled_mm" if backend == "native" else "torchao float8"
            limit = 1.2 * rounding
            rows.append((f"emulated {name} vs {who}", f"<= {limit:.1e} (bf16 output)", f"{worst:.1e}", worst <= limit))
    return rows


def linear(args: argparse.Namespace) -> list[Row]:
    """Forward and backward of one layer, 2048 tokens, 768 to 3072."""
    torch.manual_seed(0)
    x = torch.randn(2048, 768, requires_grad=True)
    module, grad = nn.Linear(768, 3072), torch.randn(2048, 3072)
    low = copy.deepcopy(module).bfloat16()
    x_low, grad_low = x.detach().bfloat16().requires_grad_(), grad.bfloat16()

    def both(forward: Callable[[], Tensor], g: Tensor = grad) -> Callable[[], None]:
        def run() -> None:
            x.grad = module.weight.grad = x_low.grad = low.weight.grad = None
            forward().backward(g)

        return run

    def planned(name: str, compiled: bool = False) -> Callable[[], None]:
        layer: Callable[..., Tensor] = LinearExecution(LayerPlan.uniform(RECIPES[name]))
        layer = torch.compile(layer) if compiled else layer
        return both(lambda: layer(x, module.weight, module.bias))

    def narrow(name: str, compiled: bool = False) -> Callable[[], None]:
        layer: Callable[..., Tensor] = LinearExecution(LayerPlan.uniform(RECIPES[name]))
        layer = torch.compile(layer) if compiled else layer
        return both(lambda: layer(x_low, low.weight, low.bias), grad_low)

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float()

    runs = {"fp32 nn.Linear": both(lambda: module(x)), "bf16 autocast": both(autocast)}
    runs["bf16 nn.Linear"] = both(lambda: low(x_low), grad_low)
    eager = ("fp8_tensorwise", "fp8_tensorwise_e4m3", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4_plain", "nvfp4")
    runs |= {name: planned(name) for name in eager} | {"int8 on bf16": narrow("int8")}
    if is_available("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        wrapped = nn.Sequential(copy.deepcopy(module))
        theirs = convert_to_float8_training(wrapped, config=Float8LinearConfig(emulate=True))
        runs["torchao emulate"] = both(lambda: theirs(x))
    if args.compiled:
        runs |= {f"{name}, compiled": planned(name, True) for name in ("fp8_block", "mxfp8", "nvfp4_plain")}
        runs["int8 on bf16, compiled"] = narrow("int8", True)
    found = times(runs, args.rounds)
    base = found["fp32 nn.Linear"]
    rows: list[Row] = []
    goals = {"fp8_tensorwise": 0.6, "fp8_block": 3.0, "mxfp8": 3.0, "nvfp4_plain": 3.0, "nvfp4": 3.0}
    goals |= {f"{name}, compiled": 1.0 for name in ("fp8_block", "mxfp8", "nvfp4_plain")}
    for name, value in found.items():
        limit = goals.get(name)
        ratio = value / base
        wanted = "" if limit is None else f"<= {limit} x fp32"
        rows.append(
            (f"linear fwd+bwd: {name}", wanted, f"{ratio:.2f} x fp32", None if limit is None else ratio <= limit)
        )
    if "torchao emulate" in found:
        ratio = found["fp8_tensorwise"] / found["torchao emulate"]
        rows.append(("fp8_tensorwise vs torchao emulate=True", "<= 0.4 x", f"{ratio:.2f} x", ratio <= 0.4))
    speed = found["bf16 nn.Linear"] / found["int8 on bf16"]
    rows.append(("int8 vs bf16, eager", "said", f"{speed:.2f} x the speed", None))
    if args.compiled:
        speed = found["bf16 nn.Linear"] / found["int8 on bf16, compiled"]
        rows.append(("int8 vs bf16, compiled", ">= 1.2 x the speed", f"{speed:.2f} x", speed >= 1.2))
    return rows


def overhead(args: argparse.Namespace) -> list[Row]:
    """What the swap costs per layer call at 64 x 64, against the same casts written by hand."""
    x = torch.randn(64, 64)
    plain = nn.Linear(64, 64)
    rows: list[Row] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        swapped = copy.deepcopy(plain)
        recipe = RECIPES[name]
        holder = nn.Sequential(swapped)
        Policy.model_validate({"recipes": {"r": recipe}, "default": "r"}).apply(holder)

        def by_hand(dtype: torch.dtype = dtype) -> None:
            for _ in range(1000):
                y = F.linear(x.to(dtype), plain.weight.to(dtype), plain.bias.to(dtype)).to(x.dtype)
                del y

        def through_the_swap(swapped: nn.Module = swapped) -> None:
            for _ in range(1000):
                y = swapped(x)
                del y

        found = times({"hand": by_hand, "swap": through_the_swap}, args.rounds)
        micro = (found["swap"] - found["hand"]) * 1e3
        rows.append((f"overhead of the swap per call at 64x64, {name}", "<= 20 us", f"{micro:.1f} us", micro <= 20))
    return rows + [_beside_operators(name, args.rounds) for name in ("int8", "fp8_tensorwise")]


def _beside_operators(name: str, rounds: int) -> Row:
    """What the mode that computes norms in float32 costs a quantised layer, whose casts are none of its business."""

    def steps(operators: dict[str, str]) -> Callable[[], None]:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        document = {"recipes": {"r": RECIPES[name]}, "default": "r", "activations": "bf16", "operators": operators}
        Policy.model_validate(document).apply(model, backend="native")
        x = torch.randn(64, 64, requires_grad=True)

        def run() -> None:
            for _ in range(50):
                model(x).float().sum().backward()

        return run

    keep = dict.fromkeys(("softmax", "norm", "embedding", "loss", "output"), "keep")
    found = times({"without": steps(keep), "with": steps({})}, rounds)
    ratio = found["with"] / found["without"]
    micro = found["with"] * 1e6 / 200  # steps of four layers, fifty of them
    said = f"{ratio:.2f}x ({micro:.0f} us)"
    return f"step of an eager {name} layer at 64x64 beside norms in float32", "<= 1.10x", said, ratio <= 1.1


def gradients(_args: argparse.Namespace) -> list[Row]:
    """Every deterministic recipe against float64 sums of the same quantised operands."""
    rows: list[Row] = []
    torch.manual_seed(0)
    x, weight, grad = torch.randn(96, 160), torch.randn(112, 160) * 0.05, torch.randn(96, 112) * 1e-3
    for name, recipe in RECIPES.items():
        if recipe.stochastic_rounding:
            continue
        plan = LayerPlan.uniform(recipe)
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = LinearExecution(plan)(a, b, None)
        out.backward(grad)
        wanted = reference_gemms(x, weight, grad, plan)
        found = dict(zip(GEMMS, (out.detach(), a.grad, b.grad), strict=True))
        worst = max(relative(found[gemm], wanted[gemm]) for gemm in GEMMS)
        limit = (
            1e-6 if name in ("fp32", "tf32", "fp8_block_fp32_scales", "int8") else 4e-4 if name == "fp16" else 2.5e-3
        )
        rows.append((f"gradients of {name} vs float64", f"<= {limit:.0e}", f"{worst:.1e}", worst <= limit))
    return rows


def processor() -> str:
    """Name the processor, and the matrix units that decide what a GEMM costs."""
    flags = read_if_there("/proc/cpuinfo").decode(errors="replace").replace("\n", " ")
    units = [unit for unit in ("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8") if f" {unit} " in flags]
    return f"{cpu_model()} ({', '.join(units) or 'no matrix instructions'})"


PARTS = {f.__name__: f for f in (exact, gemm, linear, overhead, gradients)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile'd layers (minutes)")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, torchao {installed_version('torchao') or 'not installed'}"
    lines = [
        "# Numerics and backends on a CPU",
        "",
        f"`{' '.join(['python', 'benchmarks/numerics/numerics.py', *sys.argv[1:]])}`",
        "",
        f"{processor()}; {versions}; one thread, process CPU time, median of {args.rounds} interleaved rounds; "
        f"torch's kernels use {torch.backends.cpu.get_cpu_capability()} (ATEN_CPU_CAPABILITY=avx2 asks for less); "
        f"load average {os.getloadavg()[0]:.1f} at the start; {time.strftime('%Y-%m-%d')}.",
        "",
        "| what | goal | found | met |",
        "|---|---|---|---|",
    ]
    missed = 0
    for part in args.only.split(","):
        for what, goal, found, met in PARTS[part](args):
            missed += met is False
            lines.append(f"| {what} | {goal} | {found} | {'' if met is None else 'yes' if met else '**no**'} |")
            print(lines[-1], flush=True)
    if args.write:
        parts = "" if args.only == parser.get_default("only") else "_" + args.only.replace(",", "_")
        path = Path(__file__).resolve().parents[1] / "results" / f"{time.strftime('%Y-%m-%d')}_numerics{parts}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"written to {path.name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
