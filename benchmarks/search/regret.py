"""How much faster than a search's answer is the best of forty policies, timed and trained for real on this machine?

    python benchmarks/search/regret.py conv tab lstm unet gpt moe --options "--budget 150s" --out FILE.md

The policies are the presets of the space ``cpu``, random ones, and small changes of the fastest of both. They are first
timed in blocks in random order, each block in a fork that makes the script's model anew, as ratios to the script's own
block of the same round; the slower half of them after :data:`SCREENED` rounds only. Those that seem as fast as the
answer, or faster, are trained beside the script over three data orders; a policy is acceptable whose mean absolute loss
gap (in units of the loss, as a search has it) is within the budget of a search (0.25 %), or no larger than the answer's
own, where short losses are chaotic. The fastest three of them are then timed beside the answer as `by_hand.py` times,
in processes of their own: the best of forty timings is the best partly by chance. The regret is what the fastest of the
three gains over the answer there, 0 where none does. A search also refuses policies for their gradient error; here none
is, so this is the regret against a laxer rule.

Answers that ``--work`` holds are not searched again (`by_hand.py --search` leaves them there).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.cost import CostModel
from autoprec.cost.device.cpu import cpu_model
from autoprec.graph.recorder import StepRecorder
from autoprec.policy import save_policy
from autoprec.policy.space import load_space
from autoprec.precision.hardware import target
from autoprec.trial.intervals import FEWEST
from autoprec.trial.losses import loss_units
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import Problem
from benchmarks.search.by_hand import FOLDER, SCRIPTS, WRITTEN, Ended, Interval, make, over, race, search, text, train

sys.path.insert(0, str(FOLDER))

BUDGET = 0.0025
PRESETS, DRAWN, CHANGED = 12, 18, 10
#: Rounds after which the slower half is timed no more; steps that go by before a block, and its length.
SCREENED, SETTLING, BLOCK, BLOCK_S = 2, 4, 3, 0.3
#: Policies whose losses are taken and that are timed again, fastest first.
TRAINED, FINAL = 12, 3
#: A policy is worth training that seems so fast, as a share of the answer's speed.
AS_FAST = 0.98
SEEDS, STEPS = 3, 40
Point = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The answer for one script, and the best of the pool."""

    script: str
    policies: int
    answer: Interval
    best: Interval
    regret: Interval
    refused: int
    gap: float


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a fork of this process: it leaves no memory behind."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def trained(name: str, kind: str) -> list[list[float]]:
    """Return the losses of the first steps under each data order, from the same weights."""
    found: list[list[float]] = [[] for _ in range(SEEDS)]
    for seed, losses in enumerate(found):
        train(name, kind, lambda loss, losses=losses: ended_after(STEPS, losses, loss), seed=1000 + seed)
    return found


def ended_after(steps: int, seen: list[float], one: float) -> None:
    """Keep a step's figure; end the script after so many."""
    seen.append(one)
    if len(seen) == steps:
        raise Ended


def gap(own: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute gap of paired losses, in units of the reference's, over all steps and orders."""
    gaps = []
    for mine, theirs in zip(own, reference, strict=True):
        units = loss_units(theirs)
        gaps += [abs(a - b) / unit for a, b, unit in zip(mine, theirs, units, strict=True)]
    return statistics.fmean(gaps)


def problem_of(name: str) -> Problem:
    """Return what a search would decide about a script, from one recorded step of it."""
    torch.manual_seed(0)
    model, optimizer, batch, loss_of, clip = make(name)

    def step() -> None:
        optimizer.zero_grad()  # before the forward pass, as the scripts have it
        loss_of(model, batch()).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)

    step()
    optimizer.step()
    with StepRecorder(model, optimizers=(optimizer,)) as recorder:
        step()  # a search records up to the update, which has a rate of its own
    report = recorder.report()
    return Problem.build(report, load_space("cpu"), CostModel(report, target("cpu")).can_run)


def drawn(problem: Problem, rng: random.Random) -> Point:
    """Return a random point: few or many of the choices, in shares of its own."""
    liking = {name: rng.random() ** 4 for name in problem.choice_names}
    return {
        name: rng.choices(found.choices, [liking.get(str(value), 0.5) for value in found.choices])[0]
        for name, found in problem.distributions().items()
    }


def pool(problem: Problem, count: int, rng: random.Random, known: dict[str, Point], base: Sequence[Point] = ()) -> None:
    """Add policies to those known: random ones, or changes of one to three entries of a base."""
    distributions = problem.distributions()
    for _ in range(100 * count):
        if count == 0:
            return
        point = drawn(problem, rng)
        if base:
            entries = rng.sample(list(distributions), min(len(distributions), rng.randint(1, 3)))
            point = dict(rng.choice(base)) | {entry: point[entry] for entry in entries}
        key = json.dumps(problem.key(point), default=str)
        if key not in known:
            known[key] = point
            count -= 1


def block(name: str, kind: str) -> float:
    """Return milliseconds of CPU time per step of a block, once the process has the pages that a step needs."""
    ends: list[float] = []

    def stepped(_loss: float) -> None:
        ends.append(time.process_time())
        if len(ends) > SETTLING + BLOCK and ends[-1] - ends[SETTLING] > BLOCK_S:
            raise Ended

    train(name, kind, stepped)
    return (ends[-1] - ends[SETTLING]) / (len(ends) - 1 - SETTLING) * 1e3


def speeds(name: str, files: dict[str, Path], rounds: int) -> dict[str, float]:
    """Return each policy's speed over the script as written; of the slower half, after few rounds."""
    ratios: dict[str, list[float]] = {key: [] for key in files}
    found: dict[str, float] = {}
    open_ = list(files)
    for turn in range(rounds):
        if turn == SCREENED:
            open_ = sorted(open_, key=found.__getitem__, reverse=True)[: math.ceil(len(open_) / 2)]
        kinds = {WRITTEN: WRITTEN} | {key: str(files[key]) for key in open_}
        order = random.Random(turn).sample(list(kinds), len(kinds))
        times = {key: forked(block, name, kinds[key]) for key in order}
        for key in open_:
            ratios[key].append(times[WRITTEN] / times[key])
            found[key] = statistics.median(ratios[key])
    return found


def written(problem: Problem, points: dict[str, Point], folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, (key, point) in enumerate(points.items()):
        files[key] = folder / f"{number}.yaml"
        save_policy(problem.policy(point), files[key])
    return files


def measured(name: str, folder: Path, rounds: int) -> Row:
    """Time and train the pool of one script beside the answer of its search."""
    adopted = json.loads((folder / "result.json").read_text())["verdict"] == "adopt"
    answer = str(folder / "policy.yaml") if adopted else WRITTEN
    problem, rng = problem_of(name), random.Random(0)
    points = {json.dumps(problem.key(params), default=str): params for _, params in presets(problem)[:PRESETS]}
    pool(problem, PRESETS + DRAWN - len(points), rng, points)
    found = speeds(name, written(problem, points, folder / "pool"), FEWEST)
    leading = sorted(found, key=found.__getitem__, reverse=True)[:3]
    near: dict[str, Point] = dict(points)
    pool(problem, CHANGED, rng, near, [points[key] for key in leading])
    fresh = {key: point for key, point in near.items() if key not in points}
    found |= speeds(name, {"answer": Path(answer)} | written(problem, fresh, folder / "changed"), FEWEST)
    files = written(problem, near, folder / "all")

    least = AS_FAST * found.pop("answer")
    ranked = sorted((key for key in found if found[key] >= least), key=found.__getitem__, reverse=True)[:TRAINED]
    reference = forked(trained, name, WRITTEN)
    gaps = {key: gap(forked(trained, name, str(files[key])), reference) for key in ranked}
    own_gap = gap(forked(trained, name, answer), reference)
    limit = max(BUDGET, own_gap)
    final = [key for key in ranked if gaps[key] <= limit][:FINAL]
    times = race(name, {WRITTEN: WRITTEN, "answer": answer} | {key: str(files[key]) for key in final}, rounds)
    best = min([*final, "answer"], key=lambda key: statistics.median(times[key]))
    return Row(
        name,
        len(found),
        over(times["answer"], times[WRITTEN]),
        over(times[best], times[WRITTEN]),
        over(times[best], times["answer"]),
        len(gaps) - sum(value <= limit for value in gaps.values()),
        own_gap,
    )


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| script | policies | answer, over the script | its loss gap | best acceptable of the pool and the answer "
        "| it over the answer | regret | as fast as the answer, beyond the budget |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.script, str(row.policies), text(row.answer), f"{row.gap:.3%}", text(row.best), text(row.regret)]
        lines.append(f"| {' | '.join([*cells, f'{max(0.0, row.regret[0] - 1):.1%}', str(row.refused)])} |")
    regrets = [max(0.0, row.regret[0] - 1.0) for row in rows]
    lines += ["", f"regret: mean {statistics.fmean(regrets):.1%}, worst {max(regrets):.1%} (goals: 2.5 %, 6 %)"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", choices=list(SCRIPTS))
    parser.add_argument("--options", default="", help="options of the searches, e.g. '--budget 150s'")
    parser.add_argument("--work", type=Path, default=Path("autoprec-runs/by-hand"), help="answers here are kept")
    parser.add_argument("--rounds", type=int, default=15, help="of the last timing")
    parser.add_argument("--out", type=Path, help="write the table into this file as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.scripts:
        folder = args.work / name / "0"
        search(name, folder, args.options.split())
        rows.append(measured(name, folder, args.rounds))
        print(table(rows)[-3], flush=True)
    lines = [
        "# The answer of a search against forty policies, all timed, the fast ones trained",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{datetime.now():%Y-%m-%d}; {cpu_model()}, {os.cpu_count()} cores; torch {torch.__version__}; one thread, CPU "
        f"time; losses of {SEEDS} data orders of {STEPS} steps; load average {os.getloadavg()[0]:.1f} at the end.",
        "",
        *table(rows),
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
