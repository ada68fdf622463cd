"""What a search says of a script's speed against the truth, and against what a person does by hand.

    python benchmarks/search/by_hand.py conv tab lstm unet gpt --search --repeats 3 --out FILE.md
    python benchmarks/search/by_hand.py all --search --options "--budget 15m" --out FILE.md     # hours
    python benchmarks/search/by_hand.py conv --policy policy.yaml

By hand are the script as written, the script under ``torch.autocast("cpu", bfloat16)``, and every layer in bf16. They
and each policy train copies of one model in one process, in blocks of a few steps in random order; a block's CPU time
on one thread (which trials have as well) is divided by that of another's block of the same round. The median of these
ratios has a 95 % interval. Nothing of the product takes part but ``autoprec.load``, ``apply`` and ``wrap_optimizer``,
which is what a user writes.

With ``--search`` the policies are what ``autoprec search`` adopts, script after script (answers that are in ``--work``
already are not searched again), and the gain of each answer over the fastest by hand is said. A row is wrong where the
interval it claims and the true one have nothing in common, or where autocast by hand is surely faster than what was
adopted (than the script, where the answer is to stay).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import autoprec
from autoprec.applying.policy import TorchPolicy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.intervals import FEWEST, median_interval

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "scripts" / "by_hand"
TRAIN = FOLDER / "train.py"
_MODELS = (
    "conv",
    "tab",
    "lstm",
    "unet",
    "moe",
    "dlrm",
    "seq2seq",
    "vit",
    "convnext",
    "mixer",
    "bert",
    "gpt2",
    "whisper",
)
#: What is searched, as the words of a command line.
SCRIPTS = {name: (str(TRAIN), name) for name in _MODELS}
_GPT = str(ROOT / "examples" / "train_gpt.py")
SCRIPTS |= {
    "gpt": (_GPT,),
    "gpt-768": (_GPT, "--width", "768", "--heads", "12"),
    "gpt2-autocast": (str(TRAIN), "gpt2", "--autocast"),
}
#: The contenders that are there without a policy.
WRITTEN, AUTOCAST, BF16, ADOPTED = "script", "autocast by hand", "all bf16", "adopted"
ALL_BF16 = TorchPolicy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, default="bf16")
#: Steps of a block that are timed, and that go by before.
BLOCK, SETTLING = 3, 1
Step = Callable[[], None]
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Row:
    """What a search claimed of one script, and what is true."""

    script: str
    verdict: str
    claimed: Interval | None
    truth: Interval
    autocast: Interval
    bf16: Interval
    paired: Interval
    by_hand: str
    gain: Interval
    seconds: float

    @property
    def wrong(self) -> str:
        """Return what is wrong; empty where nothing is."""
        if self.paired[2] < 1.0:
            return "autocast by hand is faster"
        if self.claimed is not None and (self.claimed[2] < self.truth[1] or self.truth[2] < self.claimed[1]):
            return "the claim and the truth are apart"
        return ""


def make(name: str) -> tuple[Any, ...]:
    """Return a script's model, optimizer, what draws a batch, the loss of one, and the largest norm of its gradient."""
    if name not in ("gpt", "gpt-768"):
        task = import_module("train").make(SCRIPTS[name][1])
        return task.model, task.optimizer, task.batch, task.loss_of, task.clip
    module = import_module("examples.train_gpt")  # its loop is its main(): the same model, sizes and optimizer here
    torch.manual_seed(0)
    width, heads = (768, 12) if name == "gpt-768" else (384, 6)
    model, text = module.GPT(width, 3, heads, 64), module.read_text(4_000_000)
    shapes = [[p for p in model.parameters() if (p.ndim >= 2) is many] for many in (True, False)]
    groups = [{"params": shapes[0], "weight_decay": 0.1}, {"params": shapes[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def batch() -> Any:
        return text[torch.randint(len(text) - 65, (8, 1)) + torch.arange(65)]

    return model, optimizer, batch, lambda model, window: model(window[:, :-1], window[:, 1:]), 1.0


def contender(name: str, policy: Path | TorchPolicy | None = None, *, autocast: bool = False) -> Step:
    """Return one training step of a script of its own, under a policy or the autocast that a person adds."""
    model, optimizer, batch, loss_of, clip = make(name)
    autocast = autocast or "--autocast" in SCRIPTS[name]
    if policy is not None:
        loaded = autoprec.load(policy) if isinstance(policy, Path) else policy
        loaded.apply(model)
        optimizer = loaded.wrap_optimizer(optimizer, model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def race(contenders: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of CPU time per step, one for each round."""
    for step in contenders.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            for _ in range(SETTLING):
                contenders[name]()
            began = time.process_time()
            for _ in range(BLOCK):
                contenders[name]()
            times[name].append((time.process_time() - began) / BLOCK * 1e3)
    return times


def over(times: Sequence[float], base: Sequence[float]) -> Interval:
    """Return the speed-up of one contender over another: median of the rounds' ratios, and its 95 % interval."""
    return median_interval([b / own for own, b in zip(times, base, strict=True)])


def text(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}x [{interval[1]:.2f}, {interval[2]:.2f}]"


def search(name: str, folder: Path, words: Sequence[str]) -> None:
    """Search a script, unless its folder has an answer from before."""
    if (folder / "result.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "autoprec", "search", "--json", "--no-mlflow", "-o", "policy.yaml", *words]
    command += ["--study", name, *SCRIPTS[name]]
    with (folder / "search.log").open("w") as log:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"the search of {name} ended with {done.returncode}, no answer: {folder}/search.log")
    (folder / "result.json").write_bytes(done.stdout)


def by_hand(name: str) -> dict[str, Step]:
    """Return what a person has without a search."""
    return {
        WRITTEN: contender(name),
        AUTOCAST: contender(name, autocast=True),
        BF16: contender(name, ALL_BF16),
    }


def judged(name: str, folder: Path, rounds: int) -> Row:
    """Time what a search adopted against the script and autocast by hand."""
    result = json.loads((folder / "result.json").read_text())
    adopted = result["verdict"] == "adopt"
    contenders = by_hand(name)
    if adopted:
        contenders[ADOPTED] = contender(name, folder / "policy.yaml")
    times = race(contenders, rounds)
    fastest = min((WRITTEN, AUTOCAST, BF16), key=lambda who: statistics.median(times[who]))
    best, claimed = result["best"], None
    if adopted:
        low, high = best.get("intervals", {}).get("speedup", (best["speedup"], best["speedup"]))
        claimed = (best["speedup"], low, high)
    answer = times[ADOPTED if adopted else WRITTEN]
    return Row(
        name,
        result["verdict"],
        claimed,
        over(answer, times[WRITTEN]),
        over(times[AUTOCAST], times[WRITTEN]),
        over(times[BF16], times[WRITTEN]),
        over(answer, times[AUTOCAST]),
        fastest,
        over(answer, times[fastest]),
        result["seconds"],
    )


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| script | verdict | claimed | truth | autocast by hand | all bf16 | answer over autocast by hand "
        "| fastest by hand | answer over it | search | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [text(found) for found in (row.claimed, row.truth, row.autocast, row.bf16, row.paired)]
        end = [row.by_hand, text(row.gain), f"{row.seconds:.0f} s", row.wrong or "no"]
        cells = [row.script, row.verdict, *figures, *end]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", choices=[*SCRIPTS, "all"], help="vit to whisper need timm, transformers")
    parser.add_argument("--policy", type=Path, action="append", default=[], help="time this file; may be repeated")
    parser.add_argument("--search", action="store_true", help="search first, and compare the claim with the truth")
    parser.add_argument("--options", default="", help="options of the searches, e.g. '--steps 10 --trials 6'")
    parser.add_argument("--work", type=Path, default=Path("autoprec-runs/by-hand"), help="answers here are kept")
    parser.add_argument("--repeats", type=int, default=1, help="searches of each script")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the table into this file as well")
    args = parser.parse_args()
    if args.rounds < FEWEST:
        parser.error(f"--rounds: an interval takes {FEWEST} at least")
    args.scripts = list(SCRIPTS) if "all" in args.scripts else args.scripts
    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT), str(FOLDER)]
    if not args.search:
        for name in args.scripts:
            contenders = by_hand(name)
            contenders |= {str(path): contender(name, path) for path in args.policy}
            times = race(contenders, args.rounds)
            for who, ms in times.items():
                print(f"{name:6}{who:40}{statistics.median(ms):9.1f} ms  {text(over(ms, times[WRITTEN]))}")
        return
    rows = []
    for name in args.scripts:
        for number in range(args.repeats):
            folder = args.work / name / str(number)
            search(name, folder, args.options.split())
            rows.append(judged(name, folder, args.rounds))
            print(table(rows)[-1], flush=True)
    verdicts = {name: {row.verdict for row in rows if row.script == name} for name in args.scripts}
    apart = [name for name, found in verdicts.items() if len(found) > 1]
    gains = [row.gain[0] - 1.0 for row in rows]
    lines = ["# What a search claims, the truth, and what is done by hand", "", f"`python {' '.join(sys.argv)}`", ""]
    lines += [
        f"{datetime.now():%Y-%m-%d}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores; torch "
        f"{torch.__version__}; one thread, CPU time, {args.rounds} rounds of blocks of {BLOCK} steps; load average "
        f"{os.getloadavg()[0]:.1f} at the end.",
        "",
        *table(rows),
        "",
        f"gain of the answer over the fastest by hand: median {statistics.median(gains):+.1%}, worst {min(gains):+.1%}",
        f"wrong: {sum(bool(row.wrong) for row in rows)} of {len(rows)}",
        f"scripts with contradictory verdicts: {len(apart)} of {len(args.scripts)} {' '.join(apart)}".rstrip(),
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
