"""What can be said about GPUs without one: code generated for a pretended card is counted, nothing is timed.

    python benchmarks/gpu_ready.py [--out FILE] [--only "eager fp8_rowwise,compiled bf16"]

Prints one table: operators of an eager linear layer, kernels and bytes of a compiled block, graph breaks, bytes per
parameter of the sensitivity scan, and which share of a hand-written MoE's and a ViT's FLOPs may run in FP8 on an H100.
Every row is counted on this machine by this command. Kernels are Triton kernels and library calls in Inductor's output
for compute capability 9.0 (10.0 for MX and NVFP4); bytes are its scheduler's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HOPPER = ("fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block")
BLACKWELL = ("mxfp8", "nvfp4")
#: What the planned search compiles: the script as written, and one recipe for every trial.
PLANNED = ("bf16", "fp8_rowwise")
TOKENS, WIDTH, HIDDEN = 16384, 768, 3072
EXPERTS, EXPERT_HIDDEN = 8, 1536


def uniform(recipe: str, match: str = "*") -> dict[str, Any]:
    """Return the policy document that gives the layers of a glob one built-in recipe, under bf16 autocast."""
    from autoprec.precision.recipes import BUILTIN_RECIPES

    recipes = {recipe: BUILTIN_RECIPES[recipe].model_dump(exclude_none=True)}
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": [{"match": match, "recipe": recipe}]}
    return document | {"activations": "bf16"}


def _policy(recipe: str, match: str = "*") -> Any:
    from autoprec.policy import policy_from_dict

    return policy_from_dict(uniform(recipe, match))


def _block(blocks: int) -> Any:
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Several(nn.Module):  # Dynamo does not start in the forward of nn.Sequential, but in each of its blocks
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block() if blocks == 1 else Several()

        def forward(self, x: Any) -> Any:
            return self.block(x)

    return Model()


def _mixture() -> Any:
    """Return a block with experts in 3-D weights: norm, router, tokens sorted by expert, grouped products, residual."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, EXPERT_HIDDEN, WIDTH))
            self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, EXPERT_HIDDEN))

        def forward(self, x: Any, ends: Any) -> Any:
            up, down = (weight.bfloat16().transpose(1, 2) for weight in (self.up, self.down))
            return torch._grouped_mm(F.silu(torch._grouped_mm(x, up, offs=ends)), down, offs=ends)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

        def forward(self, x: Any) -> Any:
            tokens = self.norm(x).reshape(-1, WIDTH)
            weight, chosen = self.router(tokens).float().softmax(-1).topk(2, -1)
            order = chosen.flatten().argsort(stable=True)
            ends = (chosen.reshape(-1, 1) == torch.arange(EXPERTS, device=x.device)).sum(0).cumsum(0, dtype=torch.int32)
            out = self.experts(tokens[order // 2].bfloat16(), ends) * weight.flatten()[order].unsqueeze(1)
            return x + torch.zeros_like(tokens, dtype=out.dtype).index_add(0, order // 2, out).reshape(x.shape)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Any) -> Any:
            return self.block(x)

    return Model()


def experts(recipe: str, backend: str) -> dict[str, Any]:
    """Compile one block of experts (:func:`_mixture`), those in a recipe, the rest under bf16 autocast."""
    found = _compiled(recipe, backend, experts=True)
    return {key: found[key] for key in ("kernels", "MB", "graphs", "breaks", "by_kind")}


def compiled(recipe: str, backend: str) -> dict[str, Any]:
    """Compile one block (norm, two linears, GELU, residual) under a recipe; count a step that is not the first.

    ``compile_cpu_s`` are CPU seconds here of the first compilation of a process (Inductor imported), ``again_cpu_s`` of
    one more block, and ``each_cpu_s`` of every block more in a graph of several; the last for what the planned search
    compiles.
    """
    import torch
    import torch._inductor.compile_fx  # as a trial's process has before it is there

    first = _compiled(recipe, backend)
    torch._dynamo.reset()
    again = _compiled(recipe, backend)["compile_cpu_s"]
    found = first | {"again_cpu_s": again}
    if backend == "native" and recipe in PLANNED:
        torch._dynamo.reset()
        found["each_cpu_s"] = round((_compiled(recipe, backend, blocks=3)["compile_cpu_s"] - again) / 2, 2)
    return found


def _compiled(recipe: str, backend: str, blocks: int = 1, *, experts: bool = False) -> dict[str, Any]:
    import torch
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autoprec.applying.policy import apply_policy
    from benchmarks.fake_cuda import Generated

    generated = Generated()
    generated.install()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        model = _mixture() if experts else _block(blocks)
        if backend == "torchao" and experts:
            from torchao.prototype.moe_training.config import Float8TrainingOpConfig
            from torchao.quantization import quantize_

            plain = Float8TrainingOpConfig(pad_token_groups_for_grouped_mm=False)
            quantize_(model.block.experts, plain, filter_fn=lambda *_: True)
        elif backend == "torchao":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
        elif recipe != "bf16":
            policy = _policy(recipe, "block.experts.*") if experts else _policy(recipe)
            apply_policy(policy, model, backend=backend)
        model.block.compile()
        x = torch.randn(16, TOKENS // 16, WIDTH, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # Dynamo traces a default device with every operator, for seconds
        began = time.process_time()
        for _ in range(2 if recipe == "fp8_delayed" else 1):  # a first step without a history is traced apart
            generated.clear()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(x)
            out.float().sum().backward()
    kernels = dict(generated.kernels)
    return {
        "kernels": sum(kernels.values()),
        "MB": round(generated.bytes / 1e6),
        "graphs": generated.graphs,
        "breaks": sum(counters["graph_break"].values()),
        "compile_cpu_s": round(time.process_time() - began, 1),
        "by_kind": kernels,
    }


def eager(recipe: str, backend: str) -> dict[str, Any]:
    """Count what one linear layer launches, forward and backward, without a compiler."""
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autoprec.applying.policy import apply_policy
    from autoprec.backends import fused
    from benchmarks.fake_cuda import counter

    launched: list[
        int
    ] = []  # a Triton kernel is not an operator: what starts it is counted, with the bytes it is given
    fused.launch = lambda _name, _grid, arguments, _constants: launched.append(
        sum(x.numel() * x.element_size() for x in {id(x): x for x in arguments if isinstance(x, torch.Tensor)}.values())
    )
    fused._agrees = lambda *_: True  # nothing is computed here
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        layer = nn.Sequential(nn.Linear(WIDTH, HIDDEN))
        if recipe != "bf16":
            apply_policy(_policy(recipe), layer, backend=backend)
        execution = layer[0]
        x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for model in (layer, layer, execution):  # what the model does before its forward is not the layer's
            x.grad = None
            layer.zero_grad()
            launched.clear()
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                counted = counter()
                with counted:
                    out = model(x)
            gradient = torch.randn_like(out)
            with counted:
                out.backward(gradient)
    found = {"operators": sum(counted.operators.values()) + len(launched), "fused kernels": len(launched)}
    return found | {"MB": round((counted.bytes + sum(launched)) / 1e6)}


def scan() -> dict[str, Any]:
    """Peak bytes per parameter that the sensitivity scan without forks holds beside the script's own tensors."""
    import torch
    from torch import nn

    from autoprec.trial.inside.observe.discovery import Found
    from autoprec.trial.inside.observe.hooks import Hooks
    from autoprec.trial.inside.replay import Replay
    from autoprec.trial.protocol import Probe, TrialSpec
    from benchmarks.held import Held

    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    hooks, held, ended = Hooks(), Held(), []
    hooks.install()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 1024)).square().mean().backward()
        optimizer.step()

    step()
    probes = tuple(Probe(name, _policy(name).to_dict()) for name in ("fp8_rowwise", "fp8_tensorwise"))
    spec = TrialSpec(kind="sensitivity", probes=probes)
    with held:
        replay = Replay(spec, Found([model], [optimizer], parameters), hooks, ended.append)
        hooks.watch(lambda module, args, kwargs: (hooks.unwatch(), replay.start(module, args, kwargs)))
        while not ended:
            step()
    hooks.remove()
    own = 4.0  # gradients that zero_grad dropped before the scan, made anew by the script itself
    return {"bytes_per_parameter": round(held.peak / sum(p.numel() for p in parameters) - own, 1)}


def ragged() -> dict[str, Any]:
    """Share of the tunable FLOPs that an H100 may run in FP8: experts with 37 tokens each, a ViT with 65 tokens."""
    import torch
    from torch import nn

    from autoprec.cost import CostModel
    from autoprec.graph.recorder import record_step
    from autoprec.precision.hardware import TARGETS
    from autoprec.precision.recipes import BUILTIN_RECIPES

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(64, 128) for _ in range(4))
            self.down = nn.ModuleList(nn.Linear(128, 64) for _ in range(4))

        def forward(self, x: Any) -> Any:
            parts = x.split([37, 5, 59, 27])
            return torch.cat([d(u(p).relu()) for p, u, d in zip(parts, self.up, self.down, strict=True)])

    vit = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64))
    out = {}
    for name, model, x in (("moe", Experts(), torch.randn(128, 64)), ("vit", vit, torch.randn(1, 65, 64))):
        report = record_step(model, lambda m=model, x=x: m(x).square().mean().backward())
        cost = CostModel(report, TARGETS["h100"])
        flops = {layer.name: sum(work.flops for work in cost.works(layer.name)) for layer in report.tunable}
        runs = [n for n in flops if cost.can_run(n, BUILTIN_RECIPES["fp8_rowwise"])[0]]
        out[name] = round(sum(flops[n] for n in runs) / sum(flops.values()), 3)
    return out


def planned(compiled_s: dict[str, tuple[float, float, float]], setup_s: float, start_s: float) -> list[str]:
    """Return table rows: seconds of a 30-trial search of gpt2-124M on one H100, by the schedule of a search.

    Args:
        compiled_s: CPU seconds here, by recipe: the first compilation of one block of this file (half a block of the
            model), one more, and every one more in the same graph.
        setup_s, start_s: seconds here until its script is at its first step, started anew, and as a trial.
    """
    from autoprec.cost import CostModel
    from autoprec.cost.transformer import PRESETS, decoder_report
    from autoprec.precision.hardware import TARGETS
    from autoprec.tuning.options import SearchOptions
    from autoprec.tuning.paired import TIMED_SHARE, fit_together
    from autoprec.tuning.schedule import Pace, schedule

    report = decoder_report(PRESETS["gpt2"], batch=TOKENS // 1024, seq=1024)
    step = CostModel(report, TARGETS["h100"], compiled=True).estimate({}, activations="bf16")
    step_s = step.time_ms / 1e3
    # what a process compiles first takes longer, whatever it is: that belongs to its start, less what a trial's process
    # has imported before it is there
    paces = [
        Pace(start_s + first - again, step_s, 24 * each, blocks=12, timed_share=TIMED_SHARE)
        for first, again, each in (compiled_s[recipe] for recipe in PLANNED)
    ]
    asked = SearchOptions(command=("train.py",))
    both = ((True, "as searches usually end"), (False, "upper bound: nothing converges"))
    rows = []
    ways = [(1, "")] + [(2, ", --workers 2")] * fit_together(2, step.memory_bytes, TARGETS["h100"].memory_bytes)
    for workers, way, usual, what in [(*way, *end) for way in ways for end in both]:
        how: dict[str, Any] = {"setup_s": setup_s, "host_s": start_s, "workers": workers, "shared": workers > 1}
        found = schedule(asked, *paces, **how, usual=usual)
        counted = (
            f"{found.total_s:.0f} s: {found.trials} trials {found.trials_s:.0f}, {found.runs} further runs "
            f"{found.finalists_s:.0f}, {found.whole} of the whole model {found.whole_s:.0f}, "
            f"reference {found.reference_s:.0f}, gradient errors {found.scan_s:.0f}"
        )
        rows.append(f"| planned search, --trials 30{way}, compiled gpt2-124M | h100 | {what} (modelled) | {counted} |")
    started = f"started anew {setup_s:.1f} s, a trial {start_s:.1f} s"
    rows.append(f"| gpt2-124M's script at its first step | - | without a GPU's own start | {started} |")
    return rows


def _start_seconds() -> tuple[float, float]:
    """Return the seconds until gpt2-124M's script is at its first step: started anew, and as trials start on a GPU.

    Those are forks of a copy that has its imports done (:mod:`autoprec.trial.inside.zygote`), the least of six. What
    the process waited for a core of this machine is taken off.
    """
    import tempfile

    from autoprec.trial.command import ScriptCommand
    from autoprec.trial.driver.runner import TrialRunner

    script = ROOT / "benchmarks" / "gpu" / "train_transformer.py"
    command = ScriptCommand.parse([str(script), "--model", "gpt2-124m", "--device", "cpu"])
    seconds = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for seed in range(7):  # the first leaves the copy behind
            runner = stack.enter_context(TrialRunner(command, run_dir=Path(folder), seed_offset=seed, launch="zygote"))
            with _waited(runner) as waited:
                setup_s = runner.start().setup_s
                seconds.append(setup_s - waited(setup_s))
    return seconds[0], min(seconds[1:])


@contextlib.contextmanager
def _waited(runner: Any) -> Iterator[Callable[[float], float]]:
    """Give what tells how many of its first seconds a runner's host waited for a core."""
    from autoprec.trial.progress import tree_usage

    found, began, ended = [(0.0, 0.0)], time.monotonic(), threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            usage = tree_usage(runner.host_pid).get(runner.host_pid) if runner.host_pid else None
            if usage is not None and usage.waited_s:
                found.append((time.monotonic() - began, usage.waited_s))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda first_s: max(waited for at_s, waited in found if at_s <= first_s)
    finally:
        ended.set()
        thread.join()


def _child(what: str, recipe: str, backend: str, capability: str) -> dict[str, Any]:
    """Run one count in a process of its own: a pretended card cannot be taken out of torch again."""
    words = [sys.executable, str(Path(__file__)), "--one", what, recipe, backend, capability]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        return dict(json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "Exception" in line]
    return {"failed": (lines or done.stderr.splitlines() or ["no output"])[-1][:160]}


def _one(what: str, recipe: str, backend: str, capability: str) -> dict[str, Any]:
    if what == "scan":
        return scan()
    if what == "ragged":
        return ragged()
    from benchmarks.fake_cuda import pretend

    pretend((int(capability.split(".")[0]), int(capability.split(".")[1])))
    return {"compiled": compiled, "eager": eager, "experts": experts}[what](recipe, backend)


def _text(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"fails: {found['failed']}"
    return ", ".join(f"{name} {value}" for name, value in found.items() if name != "by_kind")


def main() -> int:
    parser = argparse.ArgumentParser(description="what can be said about GPUs without one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="counts at a time")
    parser.add_argument("--only", default="", help="rows, as in 'eager fp8_rowwise,compiled bf16'")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_one(*arguments.one)))
        return 0
    import importlib.metadata as metadata

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "torchao"))
    lines = [f"# Ready for a GPU, without one: {time.strftime('%Y-%m-%d')}", "", "`python benchmarks/gpu_ready.py`", ""]
    lines += [f"{versions}; Python {sys.version.split()[0]}; {os.cpu_count()} CPU cores, a pretended card.", ""]
    lines += ["| what | card | backend, recipe | counted |", "|---|---|---|---|"]
    asked = [("scan", "-", "-", "-"), ("ragged", "-", "-", "-")]
    asked += [("eager", r, "native", "9.0") for r in ("bf16", *HOPPER)]
    asked += [("compiled", r, "native", "9.0") for r in ("bf16", *HOPPER)]
    asked += [("experts", r, "native", "9.0") for r in ("bf16", "fp8_rowwise")]
    asked += [("experts", "mxfp8", "native", "10.0"), ("experts", "rowwise", "torchao", "9.0")]
    asked += [("compiled", r, "torchao", "9.0") for r in ("tensorwise", "rowwise")]
    asked += [("compiled", r, "native", "10.0") for r in BLACKWELL]
    if arguments.only:
        asked = [row for row in asked if " ".join(row[:2]) in arguments.only.split(",")]
    compiled_s: dict[str, tuple[float, float, float]] = {}
    with ThreadPoolExecutor(arguments.processes) as pool:
        for row, found in zip(asked, pool.map(lambda row: _child(*row), asked), strict=True):
            what, recipe, backend, capability = row
            if what == "compiled" and "each_cpu_s" in found:
                compiled_s[recipe] = found["compile_cpu_s"], found["again_cpu_s"], found["each_cpu_s"]
            lines.append(f"| {what} | {capability} | {backend}, {recipe} | {_text(found)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    if {*PLANNED} <= {*compiled_s}:
        lines += planned(compiled_s, *_start_seconds())
    lines += [
        "",
        "eager: one linear of 768 to 3072 with 16,384 tokens, operators that start a kernel, forward and backward.",
    ]
    lines += [
        "compiled: norm, two linears, GELU, residual, as one compiled block. scan: beside the script's own tensors.",
        "experts: norm, router, 8 experts in 3-D weights behind grouped products, residual, as one compiled block.",
    ]
    lines += ["ragged: share of tunable FLOPs that may run in FP8: experts of 37, 5, 59 and 27 tokens; 65 tokens."]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
