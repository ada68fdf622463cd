"""Which variants of a script's arguments are told from the same training, on a real script with real losses.

    python benchmarks/search/variants.py [--out FILE.md]

One small script trains with micro-batches and accumulation. Some variants take the same optimiser steps (another
micro-batch, checkpointed blocks, torch.compile), others do not: dropout or batch norm over other micro-batches, a last
batch that is not full, means taken over the wrong number, ... Each is put to `search --variant`'s own check.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.tuning.options import SearchOptions, versions
from autoprec.tuning.phases.variants import choose
from autoprec.tuning.workers.local import RunnerFactory

SCRIPT = """
import argparse, torch
from torch import nn
import torch.nn.functional as F
import torch.utils.checkpoint

parser = argparse.ArgumentParser()
for name, default in (("micro", 8), ("accum", 4), ("epoch", 4096), ("seed", 0)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=1e-3)
for name in ("bn", "sum", "clip-each", "masked", "checkpoint", "compile", "bf16"):
    parser.add_argument(f"--{name}", action="store_true")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if args.bn else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), args.dropout, self.training)


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if args.checkpoint else block(x)
        return self.last(x)


model = Net()
run = torch.compile(model) if args.compile else model
optimizer = torch.optim.AdamW(model.parameters(), args.lr)
data = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1))
target = (data @ torch.randn(32, 8, generator=torch.Generator().manual_seed(2))).argmax(-1)
order = torch.randperm(args.epoch, generator=torch.Generator().manual_seed(args.seed))
valid = torch.arange(4096) % 5 < 3


def batches():
    while True:
        for at in range(0, args.epoch, args.micro):  # the last one may not be full
            yield order[at : at + args.micro]


source = batches()
for step in range(60):
    for part in range(args.accum):
        rows = next(source)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            losses = F.cross_entropy(run(data[rows]).float(), target[rows], reduction="none")
        loss = losses[valid[rows]].mean() if args.masked else losses.mean()
        (loss if args.sum else loss / args.accum).backward()
        if args.clip_each:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
#: (what, arguments as given, arguments of the variant, is it the same training?)
CASES = (
    ("twice the micro-batch, half the accumulation", "", "--micro 16 --accum 2", True),
    ("the whole batch at once", "", "--micro 32 --accum 1", True),
    ("checkpointed blocks", "", "--checkpoint", True),
    ("torch.compile", "", "--compile", True),
    ("twice the micro-batch under bf16 autocast", "--bf16", "--micro 16 --accum 2", True),
    ("dropout over other micro-batches", "--dropout 0.1", "--micro 16 --accum 2", False),
    ("batch norm over other micro-batches", "--bn", "--micro 16 --accum 2", False),
    ("a last batch that is not full", "--epoch 200", "--micro 16 --accum 2", False),
    ("a sum over the accumulation in place of its mean", "", "--micro 16 --accum 2 --sum", False),
    ("a mean over the valid values of each micro-batch", "--masked", "--micro 16 --accum 2", False),
    ("gradients clipped at each micro-batch", "--clip-each", "--micro 16 --accum 2", False),
    ("the learning rate scaled with the micro-batch", "", "--micro 16 --accum 2 --lr 2e-3", False),
    ("another order of the data", "", "--micro 16 --accum 2 --seed 1", False),
    ("twice the batch", "", "--micro 16", False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = ["| variant | should be | is | divergence | limit | speed over as given |", "|---|---|---|--:|--:|--:|"]
    right, began = {True: 0, False: 0}, time.monotonic()

    def start(command: ScriptCommand, start_s: float) -> RunnerFactory:
        return lambda seed, folder: TrialRunner(command, run_dir=folder, seed_offset=seed, setup_timeout_s=start_s)

    for what, given, changed, same in CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "train.py").write_text(SCRIPT)
            asked = SearchOptions(command=("train.py",), variant=(f"it: {changed}",))
            command = ScriptCommand.parse(("train.py", *given.split()), folder)
            (row,) = choose(asked, command, start, folder / "hosts", lambda: math.inf)
        right[same] += (row["status"] == "accepted") == same
        gap, limit = (f"{100 * row[key]:.2g} %" if key in row else "-" for key in ("divergence", "limit"))
        speed = f"{row['speedup']:.2f}x" if "speedup" in row else "-"
        expected = "accepted" if same else "refused"
        lines.append(
            f"| {what} (`{given}` -> `{changed}`) | {expected} | {row['status']} | {gap} | {limit} | {speed} |"
        )
        print(lines[-1], row["reason"], flush=True)
    count = {same: sum(case[3] is same for case in CASES) for same in (True, False)}
    told = [
        f"variants that change the training, refused: {right[False]} of {count[False]}",
        f"variants that are the same training, accepted: {right[True]} of {count[True]}",
    ]
    versioned = ", ".join(f"{name} {version}" for name, version in versions().items())
    about = f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.0f}, {versioned}"
    head = [f"# Variants, {time.strftime('%Y-%m-%d')}", "", f"`python {' '.join(sys.argv)}`; {about}; "]
    head[-1] += f"{time.monotonic() - began:.0f} s. Losses are real (fp32, this CPU)."
    text = "\n".join([*head, "", *told, "", *lines]) + "\n"
    print("\n".join(told))
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
