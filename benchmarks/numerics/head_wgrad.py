"""Does a sum of the output layer's weight gradient in bf16 end worse than one in FP32? A small GPT, emulated.

    python benchmarks/numerics/head_wgrad.py --steps 200 --seeds 3 --out FILE.json
    python benchmarks/numerics/head_wgrad.py --out FILE.json --table

Words of Python's standard library as tokens: a large vocabulary, most of it rare. The gradient of the head's weight is
summed over as many parts of the batch as a script has micro-batches, in a buffer that is rounded to bf16 after each, as
the gradient of a bf16 Parameter is; all else is FP32. ``rounded once`` is what a head in bf16 does on an FP32 Parameter
(AutoPrec's ``bf16`` against ``wgrad: bf16_fp32_output``). ``harmless`` is FP32 from weights rounded to bf16 at the
start: what a change that means nothing moves. Runs of one seed share weights, batches and learning rates; a gap is to
``fp32`` of the same seed, in the training loss over the last tenth and on text that was not trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.train_gpt import Block, read_text

WIDTH, DEPTH, HEADS, CONTEXT, BATCH, RATE, WORDS = 64, 2, 4, 32, 64, 3e-3, 2048
SCORED = 0.1
#: variant -> into how many parts the sum is cut, each rounded to bf16; 0 for FP32.
VARIANTS = {"fp32": 0, "harmless": 0, "rounded once": 1, "64 parts": 64, "512 parts": 512}


class Product(torch.autograd.Function):
    """A head without bias whose weight gradient is summed part by part in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: int) -> Tensor:
        """Multiply ``[tokens, in]`` by ``[out, in]`` in FP32."""
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        total = torch.zeros_like(weight)
        for mine, seen in zip(grad.chunk(max(1, ctx.parts)), x.chunk(max(1, ctx.parts)), strict=True):
            total.addmm_(mine.t(), seen)
            if ctx.parts:
                total.copy_(total.bfloat16())
        return grad @ weight, total, None


class Model(nn.Module):
    """The GPT of examples/ with words for bytes."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        for weight in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of ``[batch, context]`` tokens, in nats."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits = Product.apply(self.norm(self.blocks(x)).flatten(0, 1), self.head.weight, self.parts)
        return F.cross_entropy(logits, targets.flatten())


def words() -> Tensor:
    """Return the tokens of the text: its most frequent words, and 0 for all others."""
    found = re.findall(r"\w+|[^\w\s]|\n", bytes(read_text(2_000_000).tolist()).decode(errors="replace"))
    known = {word: at for at, (word, _) in enumerate(Counter(found).most_common(WORDS - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in found])


def _batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def train(name: str, seed: int, steps: int, text: Tensor) -> dict[str, Any]:
    """Train one run; return its training loss over the last part and the held-out loss of its weights, in nats."""
    torch.manual_seed(seed)
    model = Model(VARIANTS[name])
    if name == "harmless":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    batches, began = torch.Generator().manual_seed(seed), time.process_time()
    train_text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    losses = []
    for step in range(steps):
        warm = min(1.0, (step + 1) / (0.05 * steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        loss = model(*_batch(train_text, batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    fixed = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = [model(*_batch(held_out, fixed)).item() for _ in range(16)]
    scored = losses[-max(1, round(SCORED * steps)) :]
    return {"train": statistics.fmean(scored), "held_out": statistics.fmean(found), "s": time.process_time() - began}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the gaps to ``fp32`` of the same seed, mean and range over seeds, in percent of the loss."""
    known = {(row["variant"], row["seed"]): row for row in rows}
    lines = ["| sum | gap in training loss, % | gap in held-out loss, % | seeds |", "|---|---|---|---|"]
    for name in VARIANTS:
        cells, seeds = [], sorted(seed for variant, seed in known if variant == name and ("fp32", seed) in known)
        for key in ("train", "held_out"):
            bases = [known["fp32", seed][key] for seed in seeds]
            gaps = [100 * (known[name, seed][key] / base - 1) for seed, base in zip(seeds, bases, strict=True)]
            if name == "fp32":
                spread = 100 * statistics.stdev(bases) / statistics.fmean(bases) if len(bases) > 1 else math.nan
                cells.append(f"loss {statistics.fmean(bases):.4f}, between seeds {spread:.2f}" if bases else "-")
            else:
                cells.append(f"{statistics.fmean(gaps):+.2f} ({min(gaps):+.2f} to {max(gaps):+.2f})" if gaps else "-")
        lines.append(f"| {name} | {' | '.join(cells)} | {len(seeds)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path, required=True, help="runs; those that it has are not done again")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, train nothing")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    done = {(row["seed"], row["variant"]) for row in rows}
    todo = [] if args.table else [(seed, name) for seed in range(args.seeds) for name in args.variants.split(",")]
    text = words()
    for seed, name in (one for one in todo if one not in done):
        found = train(name, seed, args.steps, text)
        rows.append({"variant": name, "seed": seed, "steps": args.steps, **found})
        args.out.write_text(json.dumps(rows, indent=1))
        print(f"seed {seed}, {name}: {found['train']:.4f} {found['held_out']:.4f} {found['s']:.0f} s CPU", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
