"""Following: what it costs, and what it saves where sensitivities change in the middle of a run.

    python benchmarks/long_run_follow.py                    # 3 seeds x 1,000 steps of four runs, and the table

A small character GPT (the text of benchmarks/long_run_tasks.py, two blocks). From half of the run on, every sequence
has a token whose activations are massive in one layer and that the loss leaves out (as the first tokens of large
language models have): with one scale per tensor, all else in that layer vanishes. Four runs per seed: the script as
written, the same with its weights rounded once (how far two good runs lie apart), the fixed policy (per-tensor FP8 in
every layer of the blocks) and the same policy followed. The policy's table of errors is measured at step 10, as a
search does. Numerics are emulated on a CPU, so the times are not a statement about speed; the share that following
takes of the followed run's own time is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from long_run_tasks import TASKS, rate  # noqa: E402

from autoprec.applying.following import following_of  # noqa: E402
from autoprec.applying.policy import Policy  # noqa: E402
from autoprec.precision.recipes import BUILTIN_RECIPES  # noqa: E402

KINDS = ("reference", "perturbed", "fixed", "followed")
RECIPE, LR, WIDTH, MASSIVE = "fp8_tensorwise", 3e-3, 64, 1e6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, massive: bool) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden = F.relu(self.up(self.norm2(x)))
        if massive:  # a row that the loss does not see
            hidden = torch.cat([hidden, torch.full_like(hidden[:, :1], MASSIVE)], 1)
            return x + self.down(hidden)[:, :-1]
        return x + self.down(hidden)


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 96, length: int = 32) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Parameter(torch.zeros(1, length, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)
        self.massive = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for index, block in enumerate(self.blocks):
            x = block(x, self.massive and index == 1)
        return self.head(self.norm(x))


LAYERS = [f"blocks.{b}.{name}" for b in range(2) for name in ("qkv", "proj", "up", "down")]


def policy_with(errors: dict[str, float]) -> Policy:
    """Return per-tensor FP8 in the blocks, with what following needs; a layer's time is its number of weights."""
    recipe = {RECIPE: BUILTIN_RECIPES[RECIPE].to_dict()}
    sizes = {"qkv": 3.0, "proj": 1.0, "up": 4.0, "down": 4.0}
    groups = [
        {"layers": [n], "times": [sizes[n.split(".")[-1]], 0.6 * sizes[n.split(".")[-1]]], "errors": [0.0, errors[n]]}
        for n in LAYERS
    ]
    follow = {"max_gradient_error": 0.12, "step_time_ms": 20.0, "recipes": recipe, "choices": ["keep", RECIPE]}
    layers = [{"match": "blocks.*", "recipe": RECIPE}]
    return Policy.model_validate({"recipes": recipe, "layers": layers, "follow": follow | {"groups": groups}})


class Run:
    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(1000 + seed)
        self.model, self.steps, self.done = GPT(), steps, 0
        self.stream = TASKS["gpt"].batches(torch.Generator().manual_seed(2000 + seed))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01, foreach=True)

    def gradient(self, batch: Any) -> Tensor:
        self.model.zero_grad()
        F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten()).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def step(self) -> None:
        self.model.massive = self.done >= self.steps // 2
        for group in self.optimizer.param_groups:
            group["lr"] = LR * rate(self.done, self.steps)
        tokens, targets = next(self.stream)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1

    @torch.no_grad()
    def validation(self) -> float:
        """Validate as trained: with the massive token, under the policy."""
        losses = [
            float(F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()))
            for tokens, targets in TASKS["gpt"].held_out()
        ]
        return statistics.fmean(losses)


def early_errors(seed: int) -> dict[str, float]:
    """Return the gradient error of each layer alone at step 10."""
    run = Run(seed, 100)
    for _ in range(10):
        run.step()
    batch, found = next(run.stream), {}
    reference = run.gradient(batch)
    recipe = {RECIPE: BUILTIN_RECIPES[RECIPE].to_dict()}
    for name in LAYERS:
        policy = Policy.model_validate({"recipes": recipe, "layers": [{"match": name, "recipe": RECIPE}]})
        policy.apply(run.model, backend="emulated")
        found[name] = float((run.gradient(batch) - reference).norm() / reference.norm())
        policy.remove(run.model)
    return found


def trained(seed: int, steps: int, kind: str, every: int) -> dict[str, Any]:
    run = Run(seed, steps)
    if kind == "perturbed":
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.copy_(parameter.bfloat16())
    if kind in ("fixed", "followed"):
        follow = every if kind == "followed" else None
        policy_with(early_errors(seed)).apply(run.model, backend="emulated", follow=follow, run_steps=steps)
    began = time.process_time()
    for _ in range(steps):
        run.step()
    row: dict[str, Any] = {"kind": kind, "seed": seed, "steps": steps, "every": every}
    row["cpu_s"] = round(time.process_time() - began, 1)
    following = following_of(run.model)
    if following is not None:
        told = [
            f"step {look.step}, {look.passes} passes: {look.change or 'nothing changed'}: {look.reason}"
            for look in following.looks
        ]
        row |= {"share": following.share, "looks": told}
    return row | {"loss": run.validation()}


def report(rows: list[dict[str, Any]], steps: int, every: int) -> str:
    """Return the tables of all seeds whose four runs are there."""
    found = {(row["seed"], row["kind"]): row for row in rows if (row["steps"], row["every"]) == (steps, every)}
    seeds = sorted({seed for seed, _ in found if all((seed, kind) in found for kind in KINDS)})
    lines = [f"{steps} steps, a massive token from step {steps // 2} on, every={every}", ""]
    lines += [
        "| seed | reference | perturbed | fixed policy | followed | time of following |",
        "|---|---|---|---|---|---|",
    ]
    for seed in seeds:
        losses = " | ".join(f"{found[seed, kind]['loss']:.4f}" for kind in KINDS)
        lines.append(f"| {seed} | {losses} | {found[seed, 'followed']['share']:.2%} |")
    references = [found[seed, "reference"]["loss"] for seed in seeds]
    mean = statistics.fmean(references)
    spread = statistics.stdev(references) / mean if len(seeds) > 1 else float("nan")
    lines += ["", f"Seed-to-seed spread of the reference (standard deviation): {spread:.2%}"]
    for kind in KINDS[1:]:
        gaps = [found[seed, kind]["loss"] / found[seed, "reference"]["loss"] - 1 for seed in seeds]
        lines.append(f"Final gap, {kind}: {statistics.fmean(gaps):+.2%} ({', '.join(f'{gap:+.2%}' for gap in gaps)})")
    lines += [f"- seed {seed}, {look}" for seed in seeds for look in found[seed, "followed"]["looks"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument("--rows", type=Path, default=Path("long_run_follow.jsonl"), help="finished runs; resumes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    done = {(row["seed"], row["kind"], row["steps"], row["every"]) for row in rows}
    for seed in range(args.seeds):
        for kind in KINDS:
            if (seed, kind, args.steps, args.every) not in done:
                rows.append(trained(seed, args.steps, kind, args.every))
                with args.rows.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
    print(report(rows, args.steps, args.every))


if __name__ == "__main__":
    main()
