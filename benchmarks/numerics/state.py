"""Figures of low-precision weights, gradients and optimizer state (docs/state.md).

python benchmarks/numerics/state.py                          # everything; about five CPU minutes
python benchmarks/numerics/state.py --only bytes snr speed   # some sections
python benchmarks/numerics/state.py --write                  # also write benchmarks/results/<date>_state.json

Sections: bytes (counted on live tensors), snr (simulated all-reduce), speed (optimizer step), resume, guard, loss (toy
GPT, 300 steps, 3 seeds, paired with FP32 AdamW). Losses stay in whatever they are.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import logging
import math
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.optim.codecs import Codec  # noqa: E402
from autoprec.optim.communication import WIRE, _pack, _shares, _unpack  # noqa: E402
from autoprec.optim.monitors import StateMonitor, StateReport  # noqa: E402
from autoprec.optim.optimizer import runtime_of, skipped_steps, wrap_optimizer  # noqa: E402
from autoprec.optim.tensor import StoredTensor  # noqa: E402
from autoprec.policy import OptimizerPolicy  # noqa: E402
from autoprec.policy.library import published  # noqa: E402

CHART = {"amp-bf16": 16, "te": 16, "msamp-o1": 11, "msamp-o2": 6, "msamp-o3": 7, "bf16-sr-fp8": 6}
_MOMENTS: Any = {"exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"}
STATES = {
    "amp-bf16": OptimizerPolicy(),
    "te": OptimizerPolicy(),
    **{name: published(name).optimizer for name in ("msamp-o1", "msamp-o2", "msamp-o3")},
    "msamp-o1-exact": OptimizerPolicy(weights="fp16_scaled", gradients="e4m3"),
    "msamp-o2-exact": OptimizerPolicy(weights="fp16_scaled", gradients="e4m3", **_MOMENTS),
    "msamp-o3-exact": OptimizerPolicy(weights="e4m3_master", gradients="e4m3", **_MOMENTS),
    "bf16-sr": OptimizerPolicy(weights="bf16_stochastic", gradients="bf16"),
    "bf16-kahan": OptimizerPolicy(weights="bf16_kahan", gradients="bf16"),
    "bf16-sr-fp8": OptimizerPolicy(weights="bf16_stochastic", gradients="e4m3", **_MOMENTS),
    "e4m3 + int8_block": OptimizerPolicy(exp_avg="e4m3", exp_avg_sq="int8_block"),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        q, k, v = (
            part.view(batch, time_, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, symbols: int = 32, width: int = 64, layers: int = 2, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


def text(length: int, seed: int) -> Tensor:
    """A made-up language: 50 words of 2 to 7 letters, each followed by one of 8 words (Zipf), spaces between."""
    rng = torch.Generator().manual_seed(1234)
    words = [torch.randint(1, 27, (int(n),), generator=rng) for n in torch.randint(2, 8, (50,), generator=rng)]
    follow = torch.randint(0, 50, (50, 8), generator=rng)
    zipf = 1.0 / torch.arange(1, 9)
    draws = torch.multinomial(zipf, length, replacement=True, generator=torch.Generator().manual_seed(seed))
    out, word, count = [], 0, 0
    for draw in draws.tolist():
        word = int(follow[word, draw])
        out.append(torch.cat([words[word], torch.zeros(1, dtype=torch.long)]))
        count += len(out[-1])
        if count >= length:
            break
    return torch.cat(out)[:length]


def run_gpt(
    choice: OptimizerPolicy | None, seed: int, steps: int, data: tuple[Tensor, Tensor], perturb: bool = False
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = GPT()
    if perturb:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 20) * 0.5 * (1 + math.cos(math.pi * s / steps))
    )
    if choice is not None:
        wrap_optimizer(optimizer, choice, model)
    monitor = StateMonitor(optimizer, every=20)
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(data[0]) - 65, (16,), generator=order)
        chunk = torch.stack([data[0][s : s + 65] for s in starts])
        loss = nn.functional.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        held = data[1][: len(data[1]) // 65 * 65].view(-1, 65)
        value = nn.functional.cross_entropy(model(held[:, :-1]).flatten(0, 1), held[:, 1:].flatten())
    report = monitor.report()
    return {"train": loss.item(), "validation": value.item(), "state": report.to_json(), "report": report}


def update_factor(report: StateReport, reference: StateReport) -> float:
    """Return by how much updates are larger (or smaller) than the reference's, as a factor of at least 1."""
    if not (report.update_ratio > 0 and reference.update_ratio > 0):
        return 1.0
    factor = report.update_ratio / reference.update_ratio
    return max(factor, 1.0 / factor)


def section_loss(steps: int, seeds: int, levels: list[str]) -> dict[str, Any]:
    data = text(60_000, 0), text(16_000, 1)
    rows: dict[str, list[dict[str, Any]]] = {}
    names: dict[str, tuple[OptimizerPolicy | None, bool]] = {"fp32": (None, False), "fp32 perturbed": (None, True)}
    names |= {name: (choice, False) for name, choice in STATES.items() if name in levels}
    for seed in range(seeds):
        for name, (choice, perturb) in names.items():
            rows.setdefault(name, []).append(run_gpt(choice, seed, steps, data, perturb))
            print(f"  seed {seed} {name:20s} {rows[name][-1]['validation']:.4f}", flush=True)
    out = {}
    for name, runs in rows.items():
        gaps = [run["validation"] - base["validation"] for run, base in zip(runs, rows["fp32"], strict=True)]
        reference = [base["report"] for base in rows["fp32"]]
        out[name] = {
            "validation": [round(run["validation"], 5) for run in runs],
            "gap": [round(gap, 5) for gap in gaps],
            "mean_gap": round(statistics.mean(gaps), 5),
            "update_factor": round(max(update_factor(r["report"], f) for r, f in zip(runs, reference, strict=True)), 4),
            "problems": [problem for run in runs for problem in run["report"].problems()],
        }
    return out


def stored_bytes(tensor: Tensor | None) -> int:
    """Return the bytes a live tensor holds: of its parts when it is a StoredTensor, 0 for None."""
    if tensor is None:
        return 0
    parts = tensor.parts if isinstance(tensor, StoredTensor) else (tensor,)
    return sum(part.numel() * part.element_size() for part in parts)


def compressed_mean(gradients: Sequence[Tensor], how: Codec) -> Tensor:
    """Return the mean over ranks that the hook computes, for all ranks' flat gradients held in one process.

    Same arithmetic, no process group: for simulation and tests.
    """
    ranks = len(gradients)
    shares = torch.stack([_shares(g.reshape(-1), ranks) for g in gradients])
    length = shares.shape[2]
    received = torch.stack([_unpack(_pack(rank, how), length, how) for rank in shares])
    mean = received.sum(0).div_(ranks)
    out = torch.cat([_unpack(_pack(share[None], how), length, how) for share in mean], dim=0)
    return out.view(-1)[: gradients[0].numel()].view(gradients[0].shape)


def section_bytes() -> dict[str, Any]:
    out = {}
    for name, expected in CHART.items():
        model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
        optimizer = torch.optim.AdamW(model.parameters())
        wrap_optimizer(optimizer, STATES[name], model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 1024)).square().mean().backward()
            optimizer.step()
        held = total = 0
        for weight in (model[0].weight, model[2].weight):
            parts = [weight, weight.grad, *(v for k, v in optimizer.state[weight].items() if k != "step")]
            held += sum(stored_bytes(part) for part in parts)
            total += weight.numel()
        out[name] = {"chart": expected, "live": round(held / total, 3)}
    return out


def section_snr() -> dict[str, Any]:
    """Heavy-tailed gradients: log-normal scales per 64 values, a part common to all ranks and a part of each."""
    out: dict[str, Any] = {"wire_ratio_fp32_to_fp8": round(32.0 / WIRE["fp8"].bits, 3)}
    for ranks in (2, 4, 8, 16, 32, 64):
        rng = torch.Generator().manual_seed(ranks)
        scale = torch.exp(1.5 * torch.randn(1 << 10, 1, generator=rng)).expand(-1, 64).reshape(-1)
        common = torch.randn(scale.shape, generator=rng) * scale
        made = [common + 2 * torch.randn(scale.shape, generator=rng) * scale for _ in range(ranks)]
        true = torch.stack(made).double().mean(0)
        row = {}
        for name in ("bf16", "fp8"):
            how = WIRE[name]
            assert how is not None
            error = compressed_mean(made, how).double() - true
            row[name] = round(float(10 * torch.log10(true.square().sum() / error.square().sum())), 2)
        out[str(ranks)] = row
    return out


def _matrices() -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((384, 1536), (1536, 384), (384, 1152), (384, 384))
    made = [nn.Parameter(torch.randn(shape, generator=rng) * 0.02) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=rng) * 1e-3
    return made


def _peers() -> dict[str, Callable[[], torch.optim.Optimizer]]:
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {}
    try:
        import torchao.optim as ao

        makers["torchao AdamWFp8 (eager)"] = lambda: ao.AdamWFp8(_matrices())
        makers["torchao AdamW8bit (eager)"] = lambda: ao.AdamW8bit(_matrices())
    except ImportError as error:
        print(f"  torchao left out: {error}")
    try:
        import bitsandbytes

        makers["bitsandbytes AdamW8bit"] = lambda: bitsandbytes.optim.AdamW8bit(_matrices())
    except ImportError as error:
        print(f"  bitsandbytes left out: {error}")
    return makers


def section_speed(rounds: int = 12) -> dict[str, Any]:
    """Process CPU time of one step over 1.77 M weights, one thread, measured in turns; the best of ``rounds``."""
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "torch AdamW fused": lambda: torch.optim.AdamW(_matrices(), fused=True),
        "torch AdamW foreach": lambda: torch.optim.AdamW(_matrices(), foreach=True),
        **_peers(),
    }
    for name, choice in STATES.items():
        makers[name] = lambda c=choice: wrap_optimizer(torch.optim.AdamW(_matrices()), c)  # type: ignore[misc]
    best = {}
    made = {name: make() for name, make in makers.items()}
    with torch.compiler.set_stance("force_eager"):
        for _ in range(rounds):
            for name, optimizer in made.items():
                start = time.process_time()
                optimizer.step()
                best[name] = min(best.get(name, math.inf), time.process_time() - start)
    out: dict[str, Any] = {name: {"ms": round(1e3 * seconds, 2)} for name, seconds in best.items()}
    for name, row in out.items():
        row["x_fused"] = round(row["ms"] / out["torch AdamW fused"]["ms"], 2)
        if name == "e4m3 + int8_block" and "torchao AdamW8bit (eager)" in out:
            row["x_torchao_AdamW8bit"] = round(row["ms"] / out["torchao AdamW8bit (eager)"]["ms"], 2)
    return out


def section_resume() -> dict[str, Any]:
    """Losses of a run that is saved and resumed half-way, against the run that was not."""
    data, out = text(8_000, 0), {}
    for name, choice in STATES.items():

        def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
            losses = []
            for step in range(first, last):
                starts = torch.randint(0, len(data) - 33, (4,), generator=torch.Generator().manual_seed(step))
                chunk = torch.stack([data[s : s + 33] for s in starts])
                loss = nn.functional.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        def make(choice: OptimizerPolicy = choice) -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model = GPT(width=32, layers=1)
            return model, wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), choice, model)

        model, optimizer = make()
        steps(model, optimizer, 0, 10)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = steps(model, optimizer, 10, 20)
        again, resumed = make()
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        found = steps(again, resumed, 10, 20)
        out[name] = {"largest_loss_difference": max(abs(a - b) for a, b in zip(expected, found, strict=True))}
    return out


def section_guard() -> dict[str, Any]:
    """A gradient that is infinite at step 5 and one of 1000 times the usual norm at step 40."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), STATES["msamp-o2-exact"], model)
    guard = runtime_of(optimizer).guard
    assert guard is not None
    guard.outlier = 20.0
    losses = []
    for step in range(80):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :8]).square().mean()
        optimizer.zero_grad()
        (loss * {5: math.inf, 40: 1000.0}.get(step, 1.0)).backward()
        optimizer.step()
        losses.append(loss.item())
    return {"skipped": skipped_steps(optimizer), "first_loss": losses[0], "last_loss": losses[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=["bytes", "snr", "speed", "resume", "guard", "loss"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--levels", nargs="*", default=list(STATES), choices=list(STATES), help="of the loss section")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "bytes": section_bytes,
        "snr": section_snr,
        "speed": section_speed,
        "resume": section_resume,
        "guard": section_guard,
        "loss": lambda: section_loss(options.steps, options.seeds, options.levels),
    }
    results: dict[str, Any] = {}
    for name in options.only or sections:
        print(f"{name}:", flush=True)
        results[name] = sections[name]()
        for key, value in results[name].items():
            print(f"  {key:28s} {json.dumps(value)}", flush=True)
    if options.write:
        path = Path(__file__).resolve().parents[1] / "results" / f"{datetime.date.today().isoformat()}_state.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        command = "python benchmarks/numerics/state.py " + " ".join(sys.argv[1:])
        machine = {
            "commands": {**known.get("machine", {}).get("commands", {}), **dict.fromkeys(results, command)},
            "torch": torch.__version__,
            "processor": platform.machine(),
            "threads": 1,
            "device": "cpu",
        }
        path.write_text(json.dumps({**known, **results, "machine": machine}, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
