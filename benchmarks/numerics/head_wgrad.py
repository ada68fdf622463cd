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
import functools
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.numerics.paired_runs import Batches, Row, held_out, run, table, train
from examples.train_gpt import Block, read_text

WIDTH, DEPTH, HEADS, CONTEXT, BATCH, RATE, WORDS = 64, 2, 4, 32, 64, 3e-3, 2048
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


def trained(name: str, seed: int, steps: int, batches: Batches) -> Row:
    """Train one run; return its training loss over the last part and the held-out loss of its weights, in nats."""
    torch.manual_seed(seed)
    model = Model(VARIANTS[name])
    if name == "harmless":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    began = time.process_time()
    loss = train(model, batches, seed, steps, RATE)
    return {"train": loss, "held_out": held_out(model, batches, 16), "s": time.process_time() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path, required=True, help="runs; those that it has are not done again")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, train nothing")
    args = parser.parse_args()
    todo = [] if args.table else [(seed, name) for seed in range(args.seeds) for name in args.variants.split(",")]
    one = functools.partial(trained, steps=args.steps, batches=Batches(words(), BATCH, CONTEXT))
    rows = run(args.out, todo, args.steps, one, "s CPU")
    print(table(rows, VARIANTS, "fp32", "sum", spread=True))


if __name__ == "__main__":
    main()
