"""Paired runs of a small model on text: how the scripts of this folder train their variants, and compare them.

Runs of one seed share weights, batches and learning rates; a gap is that to a base of the same seed, in the training
loss over the last tenth of the run and in the loss of the final weights on text that was not trained on.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Part of a run over which the training loss is averaged.
SCORED = 0.1
Row = dict[str, Any]


@dataclass(frozen=True)
class Batches:
    """What is drawn from a text ``[tokens]``: ``size`` windows of ``context`` tokens, and their next ones."""

    text: Tensor
    size: int
    context: int

    def draw(self, generator: torch.Generator, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        cut = len(self.text) * 9 // 10
        text = self.text[cut:] if held_out else self.text[:cut]
        starts = torch.randint(len(text) - self.context - 1, (self.size,), generator=generator)
        rows = torch.stack([text[start : start + self.context + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]


def train(model: nn.Module, batches: Batches, seed: int, steps: int, rate: float) -> float:
    """Train with a cosine of the learning rate; return the loss over the last part, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator, losses = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        warm = min(1.0, (step + 1) / (0.05 * steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        loss = model(*batches.draw(generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return statistics.fmean(losses[-max(1, round(SCORED * steps)) :])


def held_out(model: nn.Module, batches: Batches, count: int) -> float:
    """Return the mean loss of the weights over so many batches that were not trained on, in nats."""
    fixed = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return statistics.fmean(model(*batches.draw(fixed, held_out=True)).item() for _ in range(count))


def run(out: Path, todo: Iterable[tuple[int, str]], steps: int, one: Callable[[str, int], Row], unit: str) -> list[Row]:
    """Run each (seed, variant) that a file does not have, and keep it there; return all rows.

    Args:
        one: trains a variant under a seed; its row has ``train``, ``held_out`` and ``s`` (in ``unit``).
    """
    rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
    done = {(row["seed"], row["variant"]) for row in rows}
    for seed, name in (pair for pair in todo if pair not in done):
        found = one(name, seed)
        rows.append({"variant": name, "seed": seed, "steps": steps, **found})
        out.write_text(json.dumps(rows, indent=1))
        print(f"seed {seed}, {name}: {found['train']:.4f} {found['held_out']:.4f} {found['s']:.0f} {unit}", flush=True)
    return rows


def table(rows: Sequence[Row], variants: Iterable[str], base: str, what: str, *, spread: bool = False) -> str:
    """Return the gaps to ``base`` of the same seed, mean and range over seeds, in percent of the loss.

    Args:
        what: heads the column of variants.
        spread: say how far the base's own losses are apart.
    """
    known = {(row["variant"], row["seed"]): row for row in rows}
    lines = [f"| {what} | gap in training loss, % | gap in held-out loss, % | seeds |", "|---|---|---|---|"]
    for name in variants:
        cells, seeds = [], sorted(seed for variant, seed in known if variant == name and (base, seed) in known)
        for key in ("train", "held_out"):
            bases = [known[base, seed][key] for seed in seeds]
            gaps = [100 * (known[name, seed][key] / own - 1) for seed, own in zip(seeds, bases, strict=True)]
            if not gaps:
                cells.append("-")
            elif name == base:
                apart = 100 * statistics.stdev(bases) / statistics.fmean(bases) if len(bases) > 1 else math.nan
                cells.append(f"loss {statistics.fmean(bases):.4f}" + (f", between seeds {apart:.2f}" if spread else ""))
            else:
                cells.append(f"{statistics.fmean(gaps):+.2f} ({min(gaps):+.2f} to {max(gaps):+.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} | {len(seeds)} |")
    return "\n".join(lines)
