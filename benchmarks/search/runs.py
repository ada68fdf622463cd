"""Runs of search strategies on a case of ground_truth.py: Optuna studies that advance in lockstep."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna

from autoprec.tuning.decide.presets import presets
from benchmarks.search.ground_truth import TRIAL_SEEDS, Case
from benchmarks.search.strategies import sampler

PRESETS = 6


@dataclass
class Run:
    """One strategy under one trial seed: its noise, its scan, and its own draws."""

    strategy: str
    seed: int
    study: optuna.Study
    trials: int
    log: list[bytes] = field(default_factory=list)
    pending: Any = None
    spent_ms: list[float] = field(default_factory=list)


def start(case: Case, strategy: str, seed: int, trials: int) -> Run:
    """Open a study with the same presets for everyone."""
    chosen = sampler(strategy, case, seed, trials)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=chosen)
    for _, params in presets(case.problem, PRESETS):
        study.enqueue_trial(params)
    return Run(strategy, seed, study, trials)


def advance(case: Case, runs: Sequence[Run]) -> None:
    """Let every run that is not done ask once, train what is new in one batch, tell."""
    live = [run for run in runs if len(run.log) < run.trials]
    rows = []
    for run in live:
        began = time.process_time()
        run.pending = run.study.ask(case.problem.distributions())
        run.spent_ms.append(1e3 * (time.process_time() - began))
        rows.append(case.row(run.pending.params))
    case.measure((row, run.seed) for run, row in zip(live, rows, strict=True))
    for run, row in zip(live, rows, strict=True):
        began = time.process_time()
        step, gap = case.time(row), case.trial(row, run.seed)
        run.pending.set_user_attr("metrics", {"step_time_ms": step, "divergence": gap})
        # Optuna's samplers get the logarithm: on the raw scale they never look below the worst
        run.study.tell(run.pending, [step, math.log10(max(gap, 1e-7))])
        run.spent_ms[-1] += 1e3 * (time.process_time() - began)
        run.log.append(row)


def play(
    case: Case, strategies: dict[str, tuple[int, int]], *, every: int = 10, note: Callable[[str], None] = print
) -> None:
    """Run strategies, name -> (seeds, trials), and keep what they asked in the case's logs."""
    runs = [
        start(case, name, seed, trials)
        for name, (seeds, trials) in strategies.items()
        for seed in list(TRIAL_SEEDS)[:seeds]
    ]
    for round_ in range(max((run.trials for run in runs), default=0)):
        advance(case, runs)
        if every and round_ % every == every - 1:
            note(f"{case.name}: trial {round_ + 1}, {case.trained} trained, {case.cpu_s:.0f} s CPU")
    for name in strategies:
        mine = [run for run in runs if run.strategy == name]
        case.logs[name] = np.array([run.log for run in mine], dtype=object)
        case.logs[f"ms:{name}"] = np.array([run.spent_ms for run in mine], dtype=np.float32)
