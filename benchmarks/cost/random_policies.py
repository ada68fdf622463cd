"""Modelled against measured: step time and memory of random policies of the space `cpu`, on this machine.

    python benchmarks/cost/random_policies.py --out benchmarks/results/<date>_cpu_policies.md

Policies are drawn group by group, with shares of the choices that differ from policy to policy, so that the likes of
presets and wild mixtures both occur. A policy is put on the live model; blocks of steps under it and blocks of the
script as written take turns, in CPU time of one thread, and the policy's time is the script's median times the median
ratio of neighbours.

*As it stands* compares with the model's milliseconds; *from the script's time* scales them by what the script takes
over what the model says of it, which is what a search does with them. Memory is the peak of torch's allocator over a
step (every allocation and release that the profiler sees), on top of weights, optimizer state and buffers, not the
process's resident set.

Rows keep how many pages the kernel handed out in a step (``faults``). ``--fault-us 1.7`` adds what one takes to what is
modelled: what a model would gain that knew how many there will be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.cost import CostModel
from autoprec.cost.device.cpu import cpu_model
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy
from autoprec.policy.space import load_space
from autoprec.precision.hardware import target
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.setup import ModelledSteps
from benchmarks.cost.cpu_models import MODELS
from benchmarks.cost.peak import allocator_peak, lasting, under
from benchmarks.search.by_hand import FOLDER, make

sys.path.insert(0, str(FOLDER))

SCRIPTS = ("gpt", "tab", "lstm", "vit 192x4")
TIME_GOAL, MEMORY_GOAL, SHARE_GOAL = 0.08, 0.10, 0.90
BLOCK, SETTLING = 2, 1
Row = dict[str, Any]


class Script:
    """One training script: its model, recorded step and a function that makes a step."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.clip: float | None = None
        if name in MODELS:
            self.model, data = MODELS[name]()
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
            self.loss: Callable[[], torch.Tensor] = lambda: self.model(*data)
        else:
            self.model, self.optimizer, batch, loss_of, self.clip = make(name)
            self.loss = lambda: loss_of(self.model, batch())
        self.step()
        with StepRecorder(self.model, optimizers=(self.optimizer,)) as recorder:
            self.step(update=False)  # a search records up to the update, which has a rate of its own
        self.report: GraphReport = recorder.report()

    def step(self, *, update: bool = True) -> None:
        self.optimizer.zero_grad()  # before the forward pass, as the scripts have it
        self.loss().backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if update:
            self.optimizer.step()

    def block(self, policy: Policy | None) -> tuple[float, float]:
        """Return CPU milliseconds and page faults of a step: the mean of a block, after one that settles."""
        with under(self.model, policy):
            for _ in range(SETTLING):
                self.step()
            began, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(BLOCK):
                self.step()
            spent = time.process_time() - began
            return spent / BLOCK * 1e3, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / BLOCK

    def peak_bytes(self, policy: Policy | None) -> int:
        """Return the allocator's peak over a step, what lives from step to step included."""
        with under(self.model, policy):
            self.step()
            self.optimizer.zero_grad()  # what lives from step to step is held on to while the peak is taken
            return allocator_peak(self.step, lasting(self.model, self.optimizer))


def drawn(problem: Problem, rng: random.Random) -> dict[str, Any]:
    """Return a random point: few or many of the choices, in shares of its own."""
    liking = {name: rng.random() ** 4 for name in problem.choice_names}
    params: dict[str, Any] = {}
    for name, values in ((n, d.choices) for n, d in problem.distributions().items()):
        weights = [liking.get(str(value), 0.5) for value in values]
        params[name] = rng.choices(values, weights)[0]
    return params


def measured(name: str, count: int, rounds: int, seed: int) -> list[Row]:
    """Return one row for each policy of a script; the first is the script as written."""
    script = Script(name)
    cost = CostModel(script.report, target("cpu"))
    problem = Problem.build(script.report, load_space("cpu"), cost.can_run)
    modelled = ModelledSteps(cost, problem)
    rng, points = random.Random(seed), {}
    while len(points) < count:
        point = drawn(problem, rng)
        points.setdefault(json.dumps(point, sort_keys=True), point)
    policies = [problem.policy(point) for point in points.values()]
    ratios: list[list[float]] = [[] for _ in policies]
    faults: list[list[float]] = [[] for _ in policies]
    written: list[tuple[float, float]] = []
    for _ in range(rounds):
        before, _ = script.block(None)
        for index in rng.sample(range(len(policies)), len(policies)):
            own, handed = script.block(policies[index])
            written.append(script.block(None))
            ratios[index].append(2.0 * own / (before + written[-1][0]))
            faults[index].append(handed)
            before = written[-1][0]
    script_ms, handed = (statistics.median(column) for column in zip(*written, strict=True))
    rows = [_row(name, "script", script_ms, cost.estimate({}), script.peak_bytes(None)) | {"faults": handed}]
    for point, policy, found, own_faults in zip(points.values(), policies, ratios, faults, strict=True):
        row = _row(
            name,
            "policy",
            script_ms * statistics.median(found),
            modelled.of(point),
            script.peak_bytes(policy),
        )
        rows.append(row | {"ratios": found, "point": point, "faults": statistics.median(own_faults)})
    return rows


def _row(name: str, what: str, ms: float, modelled: Any, peak: int) -> Row:
    return {
        "script": name,
        "what": what,
        "measured_ms": ms,
        "modelled_ms": modelled.time_ms,
        "breakdown": modelled.breakdown,
        "measured_bytes": peak,
        "modelled_bytes": modelled.memory_bytes,
    }


def is_int8(row: Row) -> bool:
    return any("int8" in str(value) for value in row.get("point", {}).values())


def with_faults(rows: Sequence[Row], fault_us: float) -> list[Row]:
    """Return rows with the time of their page faults in what is modelled."""
    return [row | {"modelled_ms": row["modelled_ms"] + 1e-3 * fault_us * row.get("faults", 0.0)} for row in rows]


def _figures(errors: Sequence[float], within: float) -> list[str]:
    sizes = sorted(map(abs, errors))
    inside = sum(size <= within for size in sizes) / len(sizes)
    return [f"{inside:.0%}", f"{statistics.median(errors):+.1%}", f"{max(errors, key=abs):+.1%}"]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the tables of time and of memory."""
    lines = [
        f"| script | policies | script, measured | modelled over measured | within ± {TIME_GOAL:.0%} of the measured "
        "time, as it stands | median error | worst | within, from the script's time | median error | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    all_plain, all_scaled = [], []
    for name in dict.fromkeys(row["script"] for row in rows):
        base, *own = (row for row in rows if row["script"] == name)
        level = base["measured_ms"] / base["modelled_ms"]
        plain = [row["modelled_ms"] / row["measured_ms"] - 1.0 for row in own]
        scaled = [row["modelled_ms"] * level / row["measured_ms"] - 1.0 for row in own]
        all_plain += plain
        all_scaled += scaled
        cells = [name, str(len(own)), f"{base['measured_ms']:.1f} ms", f"{1 / level:.2f}"]
        lines.append(f"| {' | '.join([*cells, *_figures(plain, TIME_GOAL), *_figures(scaled, TIME_GOAL)])} |")
    cells = ["all", str(len(all_plain)), "", "", *_figures(all_plain, TIME_GOAL), *_figures(all_scaled, TIME_GOAL)]
    lines += [f"| {' | '.join(cells)} |", ""]
    lines += [
        "| script | policies with INT8 | script, allocator's peak | modelled over measured "
        f"| within ± {MEMORY_GOAL:.0%} | median error | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    everything = []
    for name in dict.fromkeys(row["script"] for row in rows):
        base, *own = (row for row in rows if row["script"] == name)
        errors = [row["modelled_bytes"] / row["measured_bytes"] - 1.0 for row in own if is_int8(row)]
        everything += errors
        peak, share = base["measured_bytes"] / 2**20, base["modelled_bytes"] / base["measured_bytes"]
        cells = [name, str(len(errors)), f"{peak:.0f} MiB", f"{share:.2f}", *_figures(errors, MEMORY_GOAL)]
        lines.append(f"| {' | '.join(cells)} |")
    cells = ["all", str(len(everything)), "", "", *_figures(everything, MEMORY_GOAL)]
    return [*lines, f"| {' | '.join(cells)} |", "", f"Goals: {SHARE_GOAL:.0%} of the policies within these limits."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS))
    parser.add_argument("--policies", type=int, default=28, help="of each script")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault-us", type=float, default=0.0, help="of a page fault, added to what is modelled")
    parser.add_argument("--rows", type=Path, help="write the rows into this JSON file")
    parser.add_argument("--from-rows", type=Path, help="print the tables of such a file, measure nothing")
    parser.add_argument("--out", type=Path, help="write the tables into this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = os.getloadavg()[0]
    if args.from_rows:
        rows = json.loads(args.from_rows.read_text())
    else:
        rows = []
        for name in args.scripts:
            rows += measured(name, args.policies, args.rounds, args.seed)
            print("\n".join(table([row for row in rows if row["script"] == name])), file=sys.stderr, flush=True)
    if args.rows:
        args.rows.write_text(json.dumps(rows))
    lines = [
        "# Random policies of the space `cpu`, modelled against measured",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{cpu_model()}; torch {torch.__version__}; one thread, CPU time, {args.rounds} rounds of "
        f"{BLOCK} steps beside blocks of the script; load average {began:.1f} at the start; "
        f"{datetime.now():%Y-%m-%d}.",
        "",
        *table(with_faults(rows, args.fault_us)),
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
