"""The ablations of the NVFP4 paper (arXiv 2509.25149, appendix D) on a GPT of this machine's size, emulated.

    python benchmarks/numerics/nvfp4_ablations.py --steps 100 --seeds 3 --out FILE.json
    python benchmarks/numerics/nvfp4_ablations.py --out FILE.json --table

The paper says: most of the loss gap comes from the forward; fprop in bf16 for the last 18 % of the run removes most of
it, dgrad and wgrad alone nothing; the last blocks are worth keeping, the first alone are not. Here each GEMM is taken
back to bf16 at equal cost (one of three GEMMs in every layer; as many blocks at one end as at the other). Runs of one
seed share weights, batches and learning rates; a gap is that to bf16 of the same seed, in the training loss over the
last tenth of the run and in the loss of the final weights on text that was not trained on, both without a policy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES
from examples.train_gpt import GPT, read_text

WIDTH, DEPTH, HEADS, CONTEXT, BATCH, RATE = 64, 6, 4, 64, 4, 4e-3
#: Of the run: the tail of the paper, and the part over which the training loss is averaged.
TAIL, SCORED = 0.82, 0.1


def _policy(gemms: dict[str, str], kept: tuple[int, ...] = (), tail: dict[str, str] | None = None) -> dict[str, Any]:
    """NVFP4 in every block but ``kept``, single GEMMs in bf16, others in the tail; the head in bf16."""

    def rules(overrides: dict[str, str]) -> list[dict[str, Any]]:
        own = [{"match": f"blocks.{block}.*", "recipe": "bf16"} for block in kept]
        low = {"match": "blocks.*", "recipe": "nvfp4", "gemms": overrides}
        return [*own, {"match": "head", "recipe": "bf16"}, low]

    recipes = {name: BUILTIN_RECIPES[name].to_dict() for name in ("bf16", "nvfp4")}
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": rules(gemms), "activations": "bf16"}
    return document | ({"phases": [{"from": TAIL, "layers": rules(tail)}]} if tail else {})


BF16 = {"schema": "autoprec.policy/1", "activations": "bf16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "nvfp4": _policy({}),
    "fprop bf16": _policy({"fprop": "bf16"}),
    "dgrad bf16": _policy({"dgrad": "bf16"}),
    "wgrad bf16": _policy({"wgrad": "bf16"}),
    "last block bf16": _policy({}, kept=(DEPTH - 1,)),
    "first block bf16": _policy({}, kept=(0,)),
    "tail: fprop bf16": _policy({}, tail={"fprop": "bf16"}),
    "tail: dgrad, wgrad bf16": _policy({}, tail={"dgrad": "bf16", "wgrad": "bf16"}),
}


def train(document: dict[str, Any], seed: int, steps: int, text: torch.Tensor) -> dict[str, Any]:
    """Train one run; return its training loss over the last part and the held-out loss of its weights, in nats."""
    torch.manual_seed(seed)
    model = GPT(WIDTH, DEPTH, HEADS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    batches, began = torch.Generator().manual_seed(seed), time.monotonic()
    train_text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    policy = policy_from_dict(document)
    apply_policy(policy, model, run_steps=steps)
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
    remove_policy(model)
    fixed = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = [model(*_batch(held_out, fixed)).item() for _ in range(32)]
    scored = losses[-max(1, round(SCORED * steps)) :]
    return {"train": statistics.fmean(scored), "held_out": statistics.fmean(found), "s": time.monotonic() - began}


def _batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the gaps to bf16 of the same seed, mean and range over seeds, in percent of the loss."""
    known = {(row["variant"], row["seed"]): row for row in rows}
    lines = ["| variant | gap in training loss, % | gap in held-out loss, % | seeds |", "|---|---|---|---|"]
    for name in VARIANTS:
        cells, seeds = [], sorted(seed for variant, seed in known if variant == name and ("bf16", seed) in known)
        for key in ("train", "held_out"):
            bases = [known["bf16", seed][key] for seed in seeds]
            gaps = [100 * (known[name, seed][key] / base - 1) for seed, base in zip(seeds, bases, strict=True)]
            if name == "bf16":
                cells.append(f"loss {statistics.fmean(bases):.4f}" if bases else "-")
            else:
                cells.append(f"{statistics.fmean(gaps):+.2f} ({min(gaps):+.2f} to {max(gaps):+.2f})" if gaps else "-")
        lines.append(f"| {name} | {' | '.join(cells)} | {len(seeds)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="runs; those that it has are not done again")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, train nothing")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    text = read_text(1_000_000)
    first = ("bf16", "nvfp4", "fprop bf16", "wgrad bf16")  # what the question is about, of all seeds
    order = sorted(VARIANTS, key=lambda name: name not in first)
    todo = [(seed, name) for part in (order[:4], order[4:]) for seed in range(args.seeds) for name in part]
    done = {(row["seed"], row["variant"]) for row in rows}
    for seed, name in [] if args.table else [one for one in todo if one not in done]:
        found = train(VARIANTS[name], seed, args.steps, text)
        rows.append({"variant": name, "seed": seed, "steps": args.steps, **found})
        args.out.write_text(json.dumps(rows, indent=1))
        print(f"seed {seed}, {name}: {found['train']:.4f} {found['held_out']:.4f} {found['s']:.0f} s", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
