"""How much two ways to train differ in one process, and in a process each: what decides how a duel is timed.

    python benchmarks/search/heap.py lstm unet conv
    python benchmarks/search/heap.py convnext --hosts 7    # trials of one host, and of several

Blocks of fp32 steps and of steps under ``torch.autocast`` in random order: both on one model in one process, each in
a process of its own. Where the ratios differ it is the heap: a process keeps blocks of the largest size that it has
freed, and what the narrower steps allocate then needs no pages from the system. The page faults of a step say so.

With ``--hosts`` the script as written is a trial so many times in each of so many hosts, as a search runs it: how far
step times are apart, by the mean and by the median of a trial's steps, in one host and from one to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import TrialSpec
from benchmarks.search.by_hand import FOLDER, SCRIPTS, make

sys.path.insert(0, str(FOLDER))

KINDS = {"fp32": ("fp32",), "autocast": ("autocast",), "both": ("fp32", "autocast")}
PROCESSES, ROUNDS, BLOCK_S = 2, 10, 0.3
#: Trials in each host.
TRIALS = 5


def steps_of(name: str, kinds: tuple[str, ...]) -> dict[str, Callable[[], None]]:
    model, optimizer, batch, loss_of, clip = make(name)

    def step(narrow: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16) if narrow else contextlib.nullcontext():
            loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return {kind: lambda kind=kind: step(kind == "autocast") for kind in kinds}


def serve(name: str, kinds: tuple[str, ...]) -> None:
    """Run a block of the kind that each line of standard input names; answer with ms and page faults of a step."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    steps = steps_of(name, kinds)
    for step in steps.values():
        for _ in range(3):
            step()
    for line in sys.stdin:
        step = steps[line.strip()]
        step()
        began, faults, done = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 0
        while done < 3 or time.process_time() - began < BLOCK_S:
            step()
            done += 1
        ms = (time.process_time() - began) / done * 1e3
        print(ms, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / done, file=answers, flush=True)


def compare(name: str) -> str:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    lanes = [("fp32", "fp32"), ("autocast", "autocast"), ("both", "fp32"), ("both", "autocast")]
    for _ in range(PROCESSES):
        command = [sys.executable, __file__, name, "--serve"]
        pipe, threads = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
        children = {
            kind: subprocess.Popen([*command, kind], stdin=pipe, stdout=pipe, text=True, env=threads) for kind in KINDS
        }
        for _ in range(ROUNDS):
            for who, kind in random.sample(lanes, len(lanes)):
                asks, answers = children[who].stdin, children[who].stdout
                assert asks is not None
                assert answers is not None
                print(kind, file=asks, flush=True)
                ms, faults = map(float, answers.readline().split())
                found.setdefault((who, kind), []).append((ms, faults))
        for child in children.values():
            child.kill()
            child.communicate()
    ms = {lane: statistics.median(one for one, _ in rows) for lane, rows in found.items()}
    faults = {lane: statistics.median(one for _, one in rows) for lane, rows in found.items()}
    apart, together = (ms[a] / ms[b] for a, b in ((lanes[0], lanes[1]), (lanes[2], lanes[3])))
    cells = [name, f"{apart:.2f}x", f"{together:.2f}x", *(f"{ms[lane]:.1f} ms, {faults[lane]:.0f}" for lane in lanes)]
    return f"| {' | '.join(cells)} |"


def trials(name: str, hosts: int) -> list[str]:
    found = []
    for _ in range(hosts):
        with TrialRunner(ScriptCommand.parse(list(SCRIPTS[name]))) as runner:
            runner.start()
            found.append([runner.run(TrialSpec()).step_ms[TrialSpec().warmup :] for _ in range(TRIALS)])
    rows = []
    for how in (statistics.fmean, statistics.median):
        ms = [[how(steps) for steps in host] for host in found]
        means = [statistics.fmean(host) for host in ms]
        middle, inside = statistics.fmean(means), statistics.fmean(statistics.variance(host) for host in ms) ** 0.5
        figures = (inside, inside / TRIALS**0.5, statistics.stdev(means))
        cells = [name, how.__name__, f"{middle:.1f} ms", *(f"{figure / middle:.1%}" for figure in figures)]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", choices=list(SCRIPTS))
    parser.add_argument("--serve", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, default=0, help="run trials in so many hosts instead")
    args = parser.parse_args()
    if args.hosts:
        print(f"| script | of its steps | {args.hosts} hosts | sd in a host | sd of {TRIALS} of them | sd of hosts |")
        print("|---|---|---|---|---|---|")
        for name in args.scripts:
            print("\n".join(trials(name, args.hosts)), flush=True)
        return
    if args.serve:
        serve(args.scripts[0], KINDS[args.serve])
        return
    print("| script | autocast over fp32, apart | in one process | fp32 alone: step, page faults | autocast alone "
          "| fp32 beside autocast | autocast beside fp32 |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for name in args.scripts:
        print(compare(name), flush=True)


if __name__ == "__main__":
    main()
