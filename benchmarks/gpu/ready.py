"""What can be said about GPUs without one: code generated for a pretended card is counted, nothing is timed.

    python benchmarks/gpu/ready.py [--out FILE] [--only "compiled fp8_rowwise,compiled bf16"]

Prints one table: kernels and bytes of a compiled block, graph breaks, bytes per
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
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.search.planned import PLANNED, TOKENS, TRITON_S, planned, start_seconds  # noqa: E402

HOPPER = ("fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block")
BLACKWELL = ("mxfp8", "nvfp4")
WIDTH, HIDDEN = 768, 3072
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

    from autoprec.trial.inside.zygote import preload, preload_compiler

    preload()  # as a trial's process has before it is there
    preload_compiler()
    first = _compiled(recipe, backend)
    torch._dynamo.reset()
    again = _compiled(recipe, backend)["compile_cpu_s"]
    found = first | {"again_cpu_s": again}
    if backend == "native" and recipe in PLANNED:
        torch._dynamo.reset()
        found["each_cpu_s"] = round((_compiled(recipe, backend, blocks=3)["compile_cpu_s"] - again) / 2, 2)
    return found


def cached(recipe: str, backend: str) -> dict[str, Any]:
    """CPU seconds here until a block that torch's cache on disk holds could run: traced again, found, and read.

    ``hits`` of AOTAutograd's cache, with our layers in the graph. What Triton compiled is not there to be loaded.
    """
    from types import SimpleNamespace

    import torch
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import PyCodeCache

    from autoprec.applying.compiling import cache_graphs

    class ReachedError(Exception):
        pass

    def call(*_: Any) -> None:
        raise ReachedError

    cache_graphs()
    _compiled(recipe, backend)
    loaded = SimpleNamespace(call=call, __file__="x", benchmark_compiled_module=None)
    PyCodeCache.load_by_key_path = lambda *_, **__: loaded  # type: ignore[method-assign]
    seconds = []
    for _ in range(3):
        torch._dynamo.reset()
        began = time.process_time()
        with contextlib.suppress(ReachedError):
            _compiled(recipe, backend)
        seconds.append(time.process_time() - began)
    return {"cached_cpu_s": round(min(seconds), 2), "hits": counters["aot_autograd"]["autograd_cache_hit"]}


def _compiled(recipe: str, backend: str, blocks: int = 1, *, experts: bool = False) -> dict[str, Any]:
    import torch
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autoprec.applying.policy import apply_policy
    from autoprec.precision.recipes import BUILTIN_RECIPES
    from benchmarks.gpu.fake_cuda import Generated

    generated = Generated()
    generated.install()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        model = _mixture() if experts else _block(blocks)
        if backend == "torchao" and experts:
            from torchao.prototype.moe_training.config import Float8TrainingOpConfig
            from torchao.quantization import quantize_

            plain = Float8TrainingOpConfig(pad_token_groups_for_grouped_mm=False)
            quantize_(model.block.experts, plain, filter_fn=lambda *_: True)
        elif backend == "torchao" and recipe not in BUILTIN_RECIPES:  # torchao as its users call it
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


def scan() -> dict[str, Any]:
    """Peak bytes per parameter that the sensitivity scan without forks holds beside the script's own tensors."""
    import torch
    from torch import nn

    from autoprec.trial.inside.observe.discovery import Found
    from autoprec.trial.inside.observe.hooks import Hooks
    from autoprec.trial.inside.sensitivity.replay import Replay
    from autoprec.trial.protocol import Probe, TrialSpec
    from benchmarks.numerics.held import Held

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


def _child(what: str, recipe: str, backend: str, capability: str) -> dict[str, Any]:
    """Run one count in a process of its own: a pretended card cannot be taken out of torch again."""
    words = [sys.executable, str(Path(__file__)), "--one", what, recipe, backend, capability]
    with tempfile.TemporaryDirectory() as cache:
        own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | own)
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        return dict(json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "Exception" in line]
    return {"failed": (lines or done.stderr.splitlines() or ["no output"])[-1][:160]}


def _one(what: str, recipe: str, backend: str, capability: str) -> dict[str, Any]:
    if what == "scan":
        return scan()
    if what == "ragged":
        return ragged()
    from benchmarks.gpu.fake_cuda import pretend

    pretend((int(capability.split(".")[0]), int(capability.split(".")[1])), caches=what == "cached")
    return {"compiled": compiled, "cached": cached, "experts": experts}[what](recipe, backend)


def _text(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"fails: {found['failed']}"
    return ", ".join(f"{name} {value}" for name, value in found.items() if name != "by_kind")


def main() -> int:
    parser = argparse.ArgumentParser(description="what can be said about GPUs without one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="counts at a time")
    parser.add_argument("--only", default="", help="rows, as in 'compiled fp8_rowwise,compiled bf16'")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_one(*arguments.one)))
        return 0
    import importlib.metadata as metadata

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "torchao"))
    lines = [f"# Ready for a GPU, without one: {time.strftime('%Y-%m-%d')}", "", "`python benchmarks/gpu/ready.py`", ""]
    lines += [f"{versions}; Python {sys.version.split()[0]}; {os.cpu_count()} CPU cores, a pretended card.", ""]
    lines += ["| what | card | backend, recipe | counted |", "|---|---|---|---|"]
    asked = [("scan", "-", "-", "-"), ("ragged", "-", "-", "-")]
    asked += [("compiled", r, "native", "9.0") for r in ("bf16", *HOPPER)]
    asked += [("cached", r, "native", "9.0") for r in PLANNED]
    asked += [("experts", r, "native", "9.0") for r in ("bf16", "fp8_rowwise")]
    asked += [("experts", "mxfp8", "native", "10.0"), ("experts", "rowwise", "torchao", "9.0")]
    asked += [("compiled", r, "torchao", "9.0") for r in ("tensorwise", "rowwise")]
    asked += [("compiled", "fp8_block", "torchao", "9.0")]
    asked += [("compiled", r, "native", "10.0") for r in BLACKWELL]
    if arguments.only:
        asked = [row for row in asked if " ".join(row[:2]) in arguments.only.split(",")]
    compiled_s: dict[str, tuple[float, float, float]] = {}
    with ThreadPoolExecutor(arguments.processes) as pool:
        for row, found in zip(asked, pool.map(lambda row: _child(*row), asked), strict=True):
            what, recipe, backend, capability = row
            if what == "compiled" and "each_cpu_s" in found:
                first_s = found["compile_cpu_s"] + TRITON_S * found["kernels"]
                compiled_s[recipe] = first_s, found["again_cpu_s"], found["each_cpu_s"]
            lines.append(f"| {what} | {capability} | {backend}, {recipe} | {_text(found)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    if {*PLANNED} <= {*compiled_s}:
        lines += planned(compiled_s, *start_seconds())
    lines += [
        "",
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
