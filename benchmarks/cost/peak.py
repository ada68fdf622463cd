"""Modelled against measured: the peak of torch's allocator over a step on this CPU.

    python benchmarks/cost/peak.py --out benchmarks/results/<date>_peak.md

With ``--batches``: the largest batch that fits into a limit, by the model and by trying.

Twenty small models, each as written, all in bf16, all in INT8 and under a mixture, with and without activation
checkpointing of its blocks. What is measured is every allocation and release that torch's profiler sees over one step,
on top of what lives from step to step (weights, buffers, optimizer state), not the process's resident set. What is
modelled is what a search and ``autoprec estimate`` say, from one recorded step of the script as written.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.cost import CostModel
from autoprec.cost.device.cpu import cpu_model
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy
from autoprec.policy.space import load_space
from autoprec.precision.hardware import FITS, target
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.setup import ModelledSteps
from benchmarks.cost.models import Decoder, Encoder

GOAL, SHARE_GOAL = 0.08, 0.90
Row = dict[str, Any]


def allocator_peak(step: Callable[[], Any], lasting: Sequence[Tensor]) -> int:
    """Return the allocator's peak over a step in bytes, with the tensors that were there before it."""
    gc.collect()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in lasting}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step()
    now = most = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return sum(held.values()) + most


def lasting(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what lives from step to step: parameters, buffers, gradients that were not released, optimizer state."""
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    states = optimizer.state.values()
    return held + [value for state in states for value in state.values() if isinstance(value, Tensor)]


class Residual(nn.Module):
    """Norm, two layers and a residual; ``spatial``: convolutions and batch norm."""

    def __init__(self, width: int, inner: int, *, spatial: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        if spatial:
            self.body = nn.Sequential(
                nn.Conv2d(width, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )  # fmt: skip
        else:
            self.body = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Mixing(nn.Module):
    """MLP-mixer block: over tokens, then over features."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens, self.features = Residual(tokens, 2 * tokens), Residual(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(self.tokens(x.transpose(1, 2)).transpose(1, 2))


class Written(nn.Module):
    """Attention written out, with dropout of its scores, and a squared ReLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.heads, self.drop = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            heads,
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) * (w // self.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        y = self.drop(scores.softmax(-1)) @ v
        x = x + self.o(y.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.relu(self.up(self.ln2(x))).square())


class Stack(nn.Module):
    """An input layer, blocks, and a head over classes; ``pool``: dimensions that are averaged before the head."""

    def __init__(
        self, first: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, pool: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.first, self.h, self.head, self.pool = first, nn.ModuleList(blocks), head, pool

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.h:
            x = block(x)
        out = self.head(x.mean(self.pool) if self.pool else x)
        return F.cross_entropy(out.flatten(0, -2).float(), target.flatten())


class Recurrent(nn.Module):
    """One LSTM layer that returns its outputs alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def _ids(batch: int, seq: int, vocab: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocab, (batch, seq)), torch.randint(0, vocab, (batch, seq))


def _classes(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.randint(0, 10, (shape[0],))


def _text(vocab: int, width: int, blocks: Sequence[nn.Module]) -> Stack:
    return Stack(nn.Embedding(vocab, width), blocks, nn.Linear(width, vocab))


def _tied(width: int, vocab: int) -> Decoder:
    model = Decoder(width, 4, 4, vocab, 64)
    model.head.weight = model.embed.weight
    return model


def _encoder_layer(width: int, dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)


#: name -> (batch size -> model and batch, batch size)
MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, tuple[Tensor, Tensor]]], int]] = {
    "gpt 128x3": (lambda n: (Decoder(128, 3, 4, 256, 64), _ids(n, 64, 256)), 16),
    "gpt 256x4": (lambda n: (Decoder(256, 4, 4, 256, 128), _ids(n, 128, 256)), 8),
    "gpt 256x2 vocab 4096": (lambda n: (Decoder(256, 2, 4, 4096, 128), _ids(n, 128, 4096)), 8),
    "gpt long 128x2": (lambda n: (Decoder(128, 2, 4, 256, 512), _ids(n, 512, 256)), 4),
    "gpt deep 96x10": (lambda n: (Decoder(96, 10, 4, 256, 64), _ids(n, 64, 256)), 12),
    "gpt tied": (lambda n: (_tied(192, 2048), _ids(n, 64, 2048)), 12),
    "gpt wide 512x1": (lambda n: (Decoder(512, 1, 8, 512, 64), _ids(n, 64, 512)), 8),
    "llama 192x3": (lambda n: (Decoder(192, 3, 4, 1024, 128, gated=True), _ids(n, 128, 1024)), 6),
    "llama 384x2": (lambda n: (Decoder(384, 2, 8, 512, 64, gated=True), _ids(n, 64, 512)), 12),
    "vit 192x4": (lambda n: (Encoder(192, 4, 6, 192, 10), _classes(n, 64, 192)), 16),
    "vit 96x6": (lambda n: (Encoder(96, 6, 4, 48, 10), _classes(n, 100, 48)), 16),
    "attention written out": (lambda n: (_text(256, 128, [Written(128, 4) for _ in range(3)]), _ids(n, 128, 256)), 6),
    "encoder layers, dropout": (
        lambda n: (_text(512, 128, [_encoder_layer(128, 0.1) for _ in range(3)]), _ids(n, 64, 512)),
        12,
    ),
    "encoder layers": (lambda n: (_text(512, 192, [_encoder_layer(192, 0.0) for _ in range(2)]), _ids(n, 64, 512)), 12),
    "mlp 512x6": (
        lambda n: (
            Stack(nn.Linear(64, 512), [Residual(512, 512) for _ in range(6)], nn.Linear(512, 10)),
            _classes(n, 64),
        ),
        1024,
    ),
    "mlp dropout 256": (
        lambda n: (
            Stack(nn.Linear(32, 256), [Residual(256, 1024, dropout=0.1) for _ in range(3)], nn.Linear(256, 10)),
            _classes(n, 32),
        ),
        768,
    ),
    "mixer 128": (
        lambda n: (
            Stack(nn.Linear(48, 128), [Mixing(128, 64) for _ in range(3)], nn.Linear(128, 10), (1,)),
            _classes(n, 64, 48),
        ),
        16,
    ),
    "conv 48x3": (
        lambda n: (
            Stack(
                nn.Conv2d(3, 48, 3, padding=1),
                [Residual(48, 48, spatial=True) for _ in range(3)],
                nn.Linear(48, 10),
                (2, 3),
            ),
            _classes(n, 3, 24, 24),
        ),
        12,
    ),
    "conv 96x2": (
        lambda n: (
            Stack(
                nn.Conv2d(3, 96, 4, stride=4),
                [Residual(96, 192, spatial=True) for _ in range(2)],
                nn.Linear(96, 10),
                (2, 3),
            ),
            _classes(n, 3, 48, 48),
        ),
        16,
    ),
    "lstm 128": (
        lambda n: (_text(256, 128, [Recurrent(128), Residual(128, 512), Recurrent(128)]), _ids(n, 32, 256)),
        24,
    ),
}


@contextmanager
def under(model: nn.Module, policy: Policy | None) -> Iterator[None]:
    """Have a policy on a model for a while; none leaves the model as it is."""
    if policy is not None:
        apply_policy(policy, model)
    try:
        yield
    finally:
        if policy is not None:
            remove_policy(model)


class Script:
    """One training script on a batch of ``size`` samples, its blocks checkpointed or not, and its recorded step."""

    def __init__(self, name: str, *, recompute: bool, size: int = 0) -> None:
        torch.manual_seed(0)
        make, usual = MODELS[name]
        self.model, self.batch = make(size or usual)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for block in self.model.h if recompute else ():
            block.forward = _checkpointed(block.forward)
        self.step()

    def report(self) -> GraphReport:
        self.optimizer.zero_grad()
        with StepRecorder(self.model, optimizers=(self.optimizer,)) as recorder:
            self.model(*self.batch).backward()
        return recorder.report()

    def step(self) -> None:
        self.model(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self, policy: Policy | None) -> int:
        with under(self.model, policy):
            self.step()
            return allocator_peak(self.step, lasting(self.model, self.optimizer))


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def points(problem: Problem, seed: int) -> dict[str, dict[str, Any]]:
    """Return the policies that a model is measured under, as points of the space."""
    rng = random.Random(seed)
    fits = {"attention": "fp32"} if "attention" in problem.parameters else {}
    mixed = problem.params_of("bf16", activations="bf16", **fits)
    for name, values in ((n, d.choices) for n, d in problem.distributions().items()):
        if name.startswith("layer:"):
            mixed[name] = rng.choice([value for value in values if "int8" in str(value)] or list(values))
    return {
        "bf16": problem.params_of("bf16", activations="bf16"),
        "int8": problem.params_of("int8"),
        "mixed": mixed,
    }


def cases(names: Sequence[str]) -> Iterator[Row]:
    """Yield a row of every model, with and without checkpointing, under every policy."""
    for number, name in enumerate(names):
        for recompute in (False, True):
            script = Script(name, recompute=recompute)
            report = script.report()
            cost = CostModel(report, target("cpu"))
            problem = Problem.build(report, load_space("cpu"), cost.can_run)
            modelled = ModelledSteps(cost, problem)
            rows = {"script": (None, modelled.script())}
            rows |= {n: (problem.policy(p), modelled.of(p)) for n, p in points(problem, number).items()}
            script.optimizer.zero_grad()
            for policy, (document, found) in rows.items():
                row = {"model": name, "recompute": recompute, "policy": policy}
                yield row | {"measured": script.peak(document), "modelled": found.memory_bytes}


class Fits:
    """Whether a step of so many samples stays within a limit, measured once for each size."""

    def __init__(self, name: str, policy: Policy | None, limit: int) -> None:
        self.name, self.policy, self.limit = name, policy, limit
        self.known: dict[int, bool] = {}

    def __call__(self, size: int) -> bool:
        if size not in self.known:
            self.known[size] = Script(self.name, recompute=False, size=size).peak(self.policy) <= self.limit
        return self.known[size]


def batches(names: Sequence[str]) -> Iterator[Row]:
    """Yield the largest batch that is modelled to fit into 2.5 times a script's peak, and the largest that does."""
    for number, name in enumerate(names):
        script = Script(name, recompute=False)
        report, limit = script.report(), int(2.5 * script.peak(None))
        cost = CostModel(report, target("cpu"))
        problem = Problem.build(report, load_space("cpu"), cost.can_run)
        own = points(problem, number)
        for policy in ("script", "bf16", "int8"):
            document = problem.policy(own[policy]) if policy in own else None
            plans = problem.plans(own[policy]) if policy in own else {}
            activations = document.activations if document else "keep"
            wide = [
                kind
                for kind in ("attention", "norm", "softmax")
                if document and getattr(document.operators, kind) == "fp32"
            ]
            most, usable = (
                cost.most_samples(plans, share * limit, activations=activations, fp32_operators=wide) or 0
                for share in (1.0, FITS)
            )
            fits = Fits(name, document, limit)
            found = most
            while fits(found + max(1, found // 50)):
                found += max(1, found // 50)
            while not fits(found):
                found -= max(1, found // 50)
            row = {"model": name, "policy": policy, "limit": limit, "predicted": most, "found": found}
            yield row | {"usable": usable, "fits": fits(most), "usable_fits": fits(usable)}


def batch_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| model | policy | limit | predicted | found | | fits | with the margin | fits |",
        "|---|---|--:|--:|--:|--:|---|--:|---|",
    ]
    for row in rows:
        cells = [
            row["model"],
            row["policy"],
            f"{row['limit'] / 2**20:.0f} MiB",
            str(row["predicted"]),
            str(row["found"]),
        ]
        cells += [f"{row['predicted'] / row['found'] - 1.0:+.1%}", "yes" if row["fits"] else "NO", str(row["usable"])]
        lines.append(f"| {' | '.join([*cells, 'yes' if row['usable_fits'] else 'NO'])} |")
    near = sum(abs(row["predicted"] / row["found"] - 1.0) <= 0.05 for row in rows)
    fit, usable = (sum(row[key] for row in rows) for key in ("fits", "usable_fits"))
    return [
        *lines,
        "",
        f"Within 5 %: {near} of {len(rows)}; at the one that is named: {fit} fit, with the margin {usable}.",
    ]


def error(row: Row) -> float:
    return float(row["modelled"] / row["measured"] - 1.0)


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line a model, and one a policy."""
    kinds = [(policy, again) for again in (False, True) for policy in ("script", "bf16", "int8", "mixed")]
    heads = [f"{policy}{', checkpointed' if again else ''}" for policy, again in kinds]
    lines = [f"| model | script's peak | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 2)]
    for name in dict.fromkeys(row["model"] for row in rows):
        own = {(row["policy"], row["recompute"]): row for row in rows if row["model"] == name}
        cells = [f"{error(own[kind]):+.1%}" for kind in kinds]
        lines.append(f"| {name} | {own['script', False]['measured'] / 2**20:.0f} MiB | {' | '.join(cells)} |")
    lines += ["", f"| what | rows | within ± {GOAL:.0%} | median error | worst |", "|---|--:|--:|--:|--:|"]
    chosen = {
        head: [r for r in rows if (r["policy"], r["recompute"]) == kind]
        for head, kind in zip(heads, kinds, strict=True)
    }
    for head, own_rows in {**chosen, "all": list(rows)}.items():
        errors = [error(row) for row in own_rows]
        inside, worst = sum(abs(e) <= GOAL for e in errors) / len(errors), max(errors, key=abs)
        lines.append(f"| {head} | {len(errors)} | {inside:.0%} | {statistics.median(errors):+.1%} | {worst:+.1%} |")
    return [*lines, "", f"Goal: {SHARE_GOAL:.0%} within ± {GOAL:.0%}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", action="store_true", help="the largest batch within a limit of memory, instead")
    parser.add_argument("--rows", type=Path, help="write the rows into this JSON file")
    parser.add_argument("--out", type=Path, help="write the tables into this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list((batches if args.batches else cases)(args.models))
    if args.rows:
        args.rows.write_text(json.dumps(rows))
    lines = ["# Peak of the allocator, modelled against measured", "", f"`python {' '.join(sys.argv)}`", ""]
    where = f"{cpu_model()}; Python {platform.python_version()}, torch {torch.__version__}; one thread"
    lines += [f"{where}; {datetime.now():%Y-%m-%d}. A percentage is modelled over measured, less one.", ""]
    lines += batch_table(rows) if args.batches else table(rows)
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
