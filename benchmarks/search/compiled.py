"""What a search says of the speed of a script that compiles its model, against whole models timed in one process.

    python benchmarks/search/compiled.py gpt6 conv vit --search --out FILE.md
    python benchmarks/search/compiled.py gpt6 --policy policy.yaml

The scripts are those of ``benchmarks/scripts/by_hand``, with ``--compile``. The truth has a copy of the model for each
contender, each compiled as a whole by ``torch.compile(model)``: the script as written, ``torch.autocast("cpu",
bfloat16)``, every layer in bf16, and the policy. They train in one process, blocks of a few steps in random order, in
as many threads as trials have (with ``OMP_NUM_THREADS=1`` in CPU time); of each round the ratio of two blocks is taken,
and the median of these has a 95 % interval. Nothing of the product takes part but ``autoprec.load``, ``apply`` and
``wrap_optimizer``.

With ``--search`` the policy is what ``autoprec search`` adopts, and its claims stand beside the truth: of its answer,
and of autocast and all bf16 where their loss is within the budget. A claim is right where its interval overlaps the
true one, and an answer is wrong where such an autocast by hand is surely faster.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import autoprec
from autoprec.applying.policy import TorchPolicy
from benchmarks.search.by_hand import ALL_BF16, FOLDER, TRAIN, Interval, over, search, seconds, text

BY_HAND = WRITTEN, AUTOCAST, BF16 = "script", "autocast", "all bf16"
#: What the rows of a search are called that say the same.
ROWS = {AUTOCAST: "bf16 autocast", BF16: "all bf16"}
ADOPTED = "adopted"
#: Steps of a contender that go by before the first block, and before each other; steps of a block.
SETTLING, AGAIN, STEPS = 4, 1, 2
#: A claim so close to the truth is right, whatever the intervals; the divergence that a search allows by default.
CLOSE, BUDGET = 0.03, 0.0025


@dataclass(frozen=True)
class Row:
    """One claim: of the answer, or of what is done by hand; without an interval it is of trials, and says "about"."""

    script: str
    what: str
    claimed: Interval
    truth: Interval

    @property
    def apart(self) -> float:
        """How far the claim is from the truth."""
        return self.claimed[0] / self.truth[0] - 1.0

    @property
    def overlap(self) -> str:
        both = self.claimed[1] <= self.truth[2] and self.truth[1] <= self.claimed[2]
        return "-" if math.isnan(self.claimed[1]) else "yes" if both else "no"


def contender(name: str, policy: TorchPolicy | None, *, autocast: bool) -> Callable[[], None]:
    """Return what takes one step of a script's compiled model."""
    task = import_module("train").make(name)
    optimizer = task.optimizer
    if policy is not None:
        policy.apply(task.model)
        optimizer = policy.wrap_optimizer(optimizer, task.model)
    model = torch.compile(task.model) if policy is None or policy.execution == "keep" else task.model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = task.loss_of(model, task.batch())
        loss.backward()
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), task.clip)
        optimizer.step()

    return step


def interleaved(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each contender, round by round."""
    for step in steps.values():
        for _ in range(SETTLING):
            step()
    times: dict[str, list[float]] = {who: [] for who in steps}
    for number in range(rounds):
        for who in random.Random(number).sample(list(steps), len(steps)):
            for _ in range(AGAIN):
                steps[who]()
            began = seconds()
            for _ in range(STEPS):
                steps[who]()
            times[who].append((seconds() - began) / STEPS * 1e3)
    return times


def truth(name: str, policy: Path | None, rounds: int) -> dict[str, list[float]]:
    """Time a script's contenders in this process."""
    asked: dict[str, tuple[TorchPolicy | None, bool]] = {WRITTEN: (None, False), AUTOCAST: (None, True)}
    asked |= {BF16: (ALL_BF16, False)} | ({ADOPTED: (autoprec.load(policy), False)} if policy is not None else {})
    return interleaved({who: contender(name, own, autocast=cast) for who, (own, cast) in asked.items()}, rounds)


def claimed(row: dict[str, Any]) -> Interval:
    """Return the speed-up of a row of a search's result; without an interval where it was not timed in a duel."""
    low, high = row.get("intervals", {}).get("speedup", (math.nan, math.nan))
    return row["speedup"], low, high


def claims(name: str, result: dict[str, Any], times: dict[str, list[float]]) -> list[Row]:
    """Return each claim of a search beside the truth; what its loss rejects is not a choice, and not timed again."""
    rows = {row["name"]: row for row in result["presets"] if (row.get("divergence") or 0.0) <= BUDGET}
    asked = {who: rows.get(named) for who, named in ROWS.items()}
    asked |= {ADOPTED: result["best"]} if ADOPTED in times else {}
    return [Row(name, who, claimed(row), over(times[who], times[WRITTEN])) for who, row in asked.items() if row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", help="models of benchmarks/scripts/by_hand/train.py")
    parser.add_argument("--policy", type=Path, help="time this file")
    parser.add_argument("--search", action="store_true", help="search first, and compare the claims with the truth")
    parser.add_argument("--options", default="", help="options of the searches, e.g. '--trials 6'")
    parser.add_argument("--work", type=Path, default=Path("autoprec-runs/compiled"), help="answers here are kept")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the table into this file as well")
    args = parser.parse_args()
    sys.path[:0] = [str(FOLDER)]
    rows, slower, took = list[Row](), list[str](), list[str]()
    for name in args.scripts:
        folder = args.work.resolve() / name
        script = (str(TRAIN), name, "--compile", "--steps", "100000")
        result = search(name, folder, args.options.split(), script) if args.search else {"verdict": "", "presets": []}
        own = folder / "policy.yaml" if result["verdict"] == "adopt" else args.policy
        times = truth(name, own, args.rounds)
        for who, ms in times.items():
            print(f"{name:8}{who:10}{statistics.median(ms):9.1f} ms  {text(over(ms, times[WRITTEN]))}", flush=True)
        if not args.search:
            continue
        rows += (own_rows := claims(name, result, times))
        took.append(f"{name} {result['verdict']} {result['seconds']:.0f} s")
        beside = over(times[ADOPTED if ADOPTED in times else WRITTEN], times[AUTOCAST])
        slower += [f"{name} {text(beside)}"] if beside[2] < 1.0 and AUTOCAST in {row.what for row in own_rows} else []
    if not args.search:
        return
    off, both = [row for row in rows if abs(row.apart) > CLOSE], [row.overlap for row in rows]
    lines = [
        "# What a search claims of a script that compiles its model, and the truth",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{datetime.now():%Y-%m-%d}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores; torch "
        f"{torch.__version__}; {torch.get_num_threads()} threads, {args.rounds} rounds; "
        f"load average {os.getloadavg()[0]:.1f}.",
        "",
        "| script | what | claimed | truth | apart | overlap |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = f"about {row.claimed[0]:.2f}x" if row.overlap == "-" else text(row.claimed)
        cells = [row.script, row.what, said, text(row.truth), f"{row.apart:+.1%}", row.overlap]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"claims whose interval overlaps the truth's: {both.count('yes')} of {len(both) - both.count('-')}",
        f"claims off by more than {CLOSE:.0%}: {len(off)} of {len(rows)}",
        f"answers slower than compiled autocast by hand: {len(slower)} of {len(args.scripts)}; {', '.join(slower)}",
        f"searches: {', '.join(took)}",
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
