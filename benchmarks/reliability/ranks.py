"""What several ranks survive, over and over: a port that two jobs share, a rank out of time, a rank that recompiles.

    python benchmarks/reliability/ranks.py [port late recompiles] [--times 20] [--out FILE]

Each part starts trials of a small script with two ranks (gloo), and counts those that ended with the right answer.
Ranks are forks of this process, so that torch is imported once; all else is as in a search.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import socket
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.policy import Policy  # noqa: E402
from autoprec.trial.command import ScriptCommand  # noqa: E402
from autoprec.trial.driver.runner import TrialRunner  # noqa: E402
from autoprec.trial.intervals import FEWEST  # noqa: E402
from autoprec.trial.protocol import OUT_OF_TIME, DuelSpec, Probe, TrainSpec, TrialResult, TrialSpec  # noqa: E402
from tests.warm import warm_scripts  # noqa: E402

#: A trial that has not ended after so many seconds hangs.
PATIENCE_S = 300.0
#: ``torchrun train.py PORT SEED HOW``: ranks that meet at a port which the script fixes.
SCRIPT = """
import os, sys, time, torch
import torch.distributed as dist
from torch import nn

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
rank, how = int(os.environ["RANK"]), sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(int(sys.argv[2]))
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
call = torch.compile(model, backend="eager", dynamic=False) if how == "recompiles" else model
call = nn.parallel.DistributedDataParallel(call)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    if how == "late" and rank == 1 and step > 8:
        time.sleep(0.3)
    rows = 4 + min(step, 5) if how == "recompiles" and rank == 1 else 4
    x = torch.randn(rows, 16)
    loss = (call(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Job:
    """A script with its ranks, tried again and again."""

    def __init__(self, folder: Path, port: int, *, seed: int = 0, how: str = "plain") -> None:
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(SCRIPT)
        words = ["torchrun", "--nproc-per-node", "2", "train.py", str(port), str(seed), how]
        self.runner = TrialRunner(ScriptCommand.parse(words, cwd=folder), run_dir=folder / "run")

    def run(self, spec: TrialSpec) -> TrialResult:
        """Return what a trial answered."""
        return self.runner.run(replace(spec, timeout_s=PATIENCE_S))


def _right(result: TrialResult, expected: tuple[float, ...]) -> str:
    if not result.ok:
        return f"{result.status}: {result.reason}"
    return "" if result.losses == expected else f"losses {result.losses}, alone {expected}"


def port(folder: Path, fixed: int, times: int) -> list[str]:
    """Run two jobs of one fixed port at once; each has the losses that it has alone."""
    jobs = [Job(folder / f"port{seed}", fixed, seed=seed) for seed in (0, 1)]
    spec = TrainSpec(steps=4, warmup=1)
    alone = [job.run(spec) for job in jobs]
    if not all(one.ok for one in alone):
        return [f"alone: {one.status} {one.reason} {one.tail}" for one in alone]
    wrong: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(times):
            found = list(pool.map(lambda job: job.run(spec), jobs))
            said = [_right(one, other.losses) for one, other in zip(found, alone, strict=True)]
            wrong.append("; ".join(filter(None, said)))
    return wrong


def late(folder: Path, fixed: int, times: int) -> list[str]:
    """Give a job less time than its steps take when one rank begins to lag behind; both leave together."""
    job = Job(folder / "late", fixed, how="late")
    spec = TrainSpec(steps=200, warmup=1, within_s=15.0)
    found = [job.run(spec) for _ in range(times)]
    return ["" if one.status == OUT_OF_TIME else f"{one.status}: {one.reason}" for one in found]


def recompiles(folder: Path, fixed: int, times: int) -> list[str]:
    """Duel two policies where one rank alone compiles anew; all go on to time together."""
    job = Job(folder / "recompiles", fixed, how="recompiles")
    probes = (Probe("empty", Policy().to_dict()), Probe("autocast", Policy(activations="bf16").to_dict()))
    spec = DuelSpec(probes=probes, within_s=2.0, precision=10.0)
    wrong = []
    for _ in range(times):
        result = job.run(spec)
        rounds = len(result.answer.rounds) if result.ok else 0
        wrong.append("" if rounds >= FEWEST else f"{result.status}: {result.reason} ({rounds} rounds)")
    return wrong


PARTS: dict[str, tuple[str, Callable[[Path, int, int], list[str]]]] = {
    "port": ("two jobs of a script with a fixed port, at once", port),
    "late": ("one rank out of time", late),
    "recompiles": ("one rank recompiling", recompiles),
}


def main() -> None:
    """Run the parts that are named and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--times", type=int, default=20, help="repetitions of each part (default 20)")
    parser.add_argument("--out", type=Path, help="write the table to a file, too")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fixed = free.getsockname()[1]
    lines = [f"{datetime.date.today()}, {platform.machine()}, two ranks each", ""]
    lines += ["| part | right answers | wrong |", "|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name in asked.parts or PARTS:
        title, run = PARTS[name]
        with tempfile.TemporaryDirectory() as folder, warm_scripts():
            wrong = run(Path(folder), fixed, asked.times)
        right = sum(not one for one in wrong)
        lines.append(f"| {title} | {right} of {len(wrong)} | {'; '.join(filter(None, wrong))} |")
        print(lines[-1], flush=True)
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
