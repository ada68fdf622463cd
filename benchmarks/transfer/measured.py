"""Is what a transferred policy predicts what the big run measures? ``examples/train_gpt.py``, width 256 to 1,024, CPU.

    autoprec search --no-mlflow -o small.yaml examples/train_gpt.py --width 256 --heads 4
    autoprec transfer small.yaml -o big.yaml --to examples/train_gpt.py --width 1024 --heads 16
    autoprec check --policy big.yaml --sensitivity 8 --json examples/train_gpt.py --width 1024 --heads 16 > spot.json
    python benchmarks/transfer/measured.py --small small.yaml --big big.yaml --spot spot.json

The first three are what a user types; the last sets their predictions beside measurements. It trains the big model
from one seed, on the script's data: as written, with weights rounded once to bf16 (a benign perturbation), all in bf16,
under the small model's policy as it is, and under the transferred one, step by step in turn; process CPU time of one
thread, native backend. Losses are paired and judged as a search judges them: the learning rate ends in a cosine, and
the divergence is of the last half of the steps.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from train_gpt import GPT, read_text  # noqa: E402

from autoprec.applying.policy import apply_policy  # noqa: E402
from autoprec.optim.optimizer import wrap_optimizer  # noqa: E402
from autoprec.policy import Policy, load_policy  # noqa: E402
from autoprec.precision.recipes import BUILTIN_RECIPES  # noqa: E402
from autoprec.trial.inside.observe.loop import annealed  # noqa: E402
from autoprec.tuning.decide.metrics import divergence, signed_gap  # noqa: E402
from benchmarks.long_run.long_run import rounded_once  # noqa: E402

WIDTH, HEADS, DEPTH, BATCH, CONTEXT = 1024, 16, 3, 8, 64  # the script's, but for the width and the heads
WARMUP = 3  # steps that are not timed
SCRIPT, ROUNDED, BF16 = "script as written", "weights rounded once", "all bf16"
SMALL, BIG = "as searched", "transferred"


class Run:
    """The big model under one policy, as the script trains it."""

    def __init__(self, policy: Policy, rate: float, *, rounded: bool = False) -> None:
        torch.manual_seed(0)
        self.model, self.rate = GPT(WIDTH, DEPTH, HEADS, CONTEXT), rate
        if rounded:
            rounded_once(self.model)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
        apply_policy(policy, self.model)
        wrap_optimizer(self.optimizer, policy, model=self.model)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, window: torch.Tensor, steps: int) -> None:
        """Take one step of so many, with the script's warm-up of ten and the cosine of a trial."""
        done = len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (done + 1) / 10) * annealed(done, steps)
        began = time.process_time()
        loss = self.model(window[:, :-1], window[:, 1:])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.seconds.append(time.process_time() - began)
        self.losses.append(float(loss.detach()))


def measured(policies: dict[str, Policy], steps: int, rate: float) -> dict[str, Run]:
    """Train under every policy, in turn."""
    torch.set_num_threads(1)
    text = read_text(4_000_000)
    runs = {name: Run(policy, rate, rounded=name == ROUNDED) for name, policy in policies.items()}
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = text[starts + torch.arange(CONTEXT + 1)]
        for run in runs.values():
            run.step(window, steps)
    return runs


def table(runs: dict[str, Run], evidence: dict[str, Any]) -> list[str]:
    """Return measured times and losses of every run, then predicted against measured."""
    lines = ["| run | step ms | over all bf16 | divergence | signed | loss at the end |", "|---|---|---|---|---|---|"]
    times = {name: statistics.median(run.seconds[WARMUP:]) * 1e3 for name, run in runs.items()}
    losses, script = {name: run.losses for name, run in runs.items()}, runs[SCRIPT].losses
    for name, own in losses.items():
        over, end = times[BF16] / times[name], statistics.fmean(own[-5:])
        gaps = f"{divergence(own, script):.3%} | {signed_gap(own, script):+.3%}"
        lines.append(f"| {name} | {times[name]:.0f} | {over:.2f}x | {gaps} | {end:.4f} |")
    pairs = [b / a for a, b in zip(runs[BIG].seconds[WARMUP:], runs[BF16].seconds[WARMUP:], strict=True)]
    low, middle, high = (statistics.quantiles(pairs, n=20)[i] for i in (0, 9, 18))
    ends = evidence["speedup_over_16bit_low"], evidence["speedup_over_16bit_high"]
    found = f"{evidence['speedup_over_16bit']:.2f}x [{ends[0]:.2f}, {ends[1]:.2f}]"
    small = evidence["transferred_from"]["evidence"]["divergence"]
    return [
        *lines,
        "",
        "| transferred policy | predicted | measured |",
        "|---|---|---|",
        f"| step over all bf16 | {found} | {middle:.2f}x, steps {low:.2f} to {high:.2f} |",
        f"| divergence | none; the small model's: {small:.3%} | {divergence(losses[BIG], script):.3%} |",
    ]


def error_lines(spot: dict[str, Any]) -> list[str]:
    """Return predicted and measured gradient errors, of the whole policy and of its segments, as the check has them."""
    check = spot["sensitivity"]
    rows = [
        (f"gradient error, {row['name'].replace('|', ': ')}", f"{row['predicted']:.2%}", f"{row['measured']:.2%}")
        for row in check["rows"]
    ]
    limit = f"at most {check['limit']:.2%}"
    rows.append(("the same, whole policy, limit of the check", limit, "within" if check["within"] else "**beyond**"))
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, required=True, help="the policy that was searched")
    parser.add_argument("--big", type=Path, required=True, help="the one that was transferred")
    parser.add_argument("--spot", type=Path, help="JSON of `autoprec check --sensitivity`")
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    bf16 = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, default="bf16")
    big = load_policy(args.big)
    policies = {SCRIPT: Policy(), ROUNDED: Policy(), BF16: bf16, SMALL: load_policy(args.small), BIG: big}
    for line in table(measured(policies, args.steps, args.lr), dict(big.evidence)):
        print(line)
    if args.spot:
        for line in error_lines(json.loads(args.spot.read_text())):
            print(line)


if __name__ == "__main__":
    main()
