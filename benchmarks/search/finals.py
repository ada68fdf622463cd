"""A whole search, replayed on the table of ground_truth.py: what it asks, when it stops, what it adopts and costs.

The same functions as the product's (sampler, expectation, standings, decision) over recorded runs; only who trains is
different. Other strategies run their 30 trials first, and then get the same race.

    python benchmarks/search/finals.py vit-h100 5    # one search, run by run, under trial seed 5
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna

from autoprec.tuning.decide.decision import Rules, Standing, choose
from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.ranking import Ranking, rank
from autoprec.tuning.decide.sampler.expectation import EXPLORATORY, Expectation
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.study.run import Run, metrics_of
from benchmarks.search.cases import MAX_DIVERGENCE
from benchmarks.search.ground_truth import JUDGE_SEEDS, TRIAL_SEEDS, TRUTH_SEEDS, Case
from benchmarks.search.strategies import goals

TRIALS, SEEDS, REFERENCE_RUNS = 30, 4, 3


@dataclass(frozen=True)
class Ending:
    """What one search decided: its row (empty for "stay"), its mean over fresh seeds, trials, runs, all it asked.

    ``bound`` is what it said that anything else gains at most; NaN where it did not converge.
    """

    row: bytes
    mean: float
    trials: int
    runs: int
    converged: bool
    asked: tuple[bytes, ...] = ()
    bound: float = math.nan


class Replay:
    """One search under one trial seed."""

    def __init__(self, case: Case, seed: int, expectation: Expectation) -> None:
        self.case, self.seed, self.expectation = case, seed, expectation
        others = [s for s in TRIAL_SEEDS if s != seed]
        self.order = [seed, *(others[(seed + k) % len(others)] for k in range(len(others))), *TRUTH_SEEDS]
        self.rows: dict[bytes, list[float]] = {}
        self.exploratory: set[bytes] = set()
        self.references = {0}
        self.told: list[str] = []
        self.rules = Rules(MAX_DIVERGENCE, Baseline(case.scans[seed].floor))
        self.fit()

    def run(self, row: bytes) -> None:
        """Measure a row under its next paired seed."""
        runs = self.rows.setdefault(row, [])
        paired = self.order[len(runs)]
        self.references.add(len(runs))
        self.case.measure([(row, paired)])
        runs.append(self.case.trial(row, paired))
        self.fit()
        self.told.append(self.line(row))

    def line(self, row: bytes) -> str:
        """Return what is known of a policy after its newest run."""
        at, runs = list(self.rows).index(row), self.rows[row]
        gap, upper = runs[-1], self.now.standings[at].upper
        chance = self.expectation.outlook(self.expectation.points([self.case.params(row)])).chance[0]
        accepted = "accepted" if at in self.now.accepted else ""
        name = f"trial {at}" if at else "all bf16"
        slower = self.case.time(row) / self.case.time(self.case.baseline)
        return f"{name:9} {slower:.3f}  {len(runs):5}  {gap:10.3%}  {upper:10.3%}  {chance:6.2f}  {accepted}".rstrip()

    def measured(self) -> list[Run]:
        """Return the pool."""
        return [
            Run(
                0,
                "search",
                "",
                self.case.params(row),
                {},
                "ok",
                metrics=metrics_of({"divergence": gap, "step_time_ms": self.case.time(row)}),
                seed=k,
                tags=(EXPLORATORY,) if row in self.exploratory and not k else (),
            )
            for row, gaps in self.rows.items()
            for k, gap in enumerate(gaps)
        ]

    def fit(self) -> Ranking:
        """Refit, and rank everything tried."""
        self.expectation.fit(self.measured())
        entrants = [
            (self.case.params(row), Standing(str(i), 1e3 / self.case.time(row), tuple(gaps)))
            for i, (row, gaps) in enumerate(self.rows.items())
        ]
        self.now = rank(self.expectation, entrants, self.rules, seeds=SEEDS)
        return self.now

    def next_seed(self) -> None:
        """Give the next seed to the policy that may still change the answer."""
        assert self.now.next is not None
        self.run(list(self.rows)[self.now.next])

    def ending(self, *, converged: bool) -> Ending:
        """Decide, and measure what was decided under fresh seeds."""
        ready = [one for one in self.now.standings if one.seeds > 1]
        decision = choose(ready, self.rules, timing_noise=0.0)
        runs = REFERENCE_RUNS + len(self.references) - 1 + sum(map(len, self.rows.values()))
        if decision.index is None:
            return Ending(b"", 0.0, len(self.rows), runs, converged, tuple(self.rows))
        row = list(self.rows)[int(ready[decision.index].name)]
        return Ending(row, self.case.fresh(row), len(self.rows), runs, converged, tuple(self.rows))


def searched(case: Case, seed: int, trials: int = TRIALS, told: list[str] | None = None) -> Ending:
    """Search as the product does, until nothing is worth a run; ``told`` gets a line for every run."""
    offered = presets(case.problem)
    sampler = PrecisionSampler(case.problem, case.prior(seed), goals(case), offered)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    replay = Replay(case, seed, sampler.expectation)
    replay.told = told if told is not None else []
    replay.run(case.baseline)
    tell(study, case, case.params(case.baseline), case.baseline, seed)
    while True:
        sampler.learn(replay.measured(), replay.now.best_cost)
        best = sampler.best(study) if len(replay.rows) < trials else None
        gain = best.value if best is not None else 0.0
        if max(gain, replay.now.gain) <= 0:
            ending = replay.ending(converged=len(replay.rows) < trials)
            return replace(ending, bound=sampler.bound()) if ending.converged else ending
        if replay.now.gain > gain:
            if replay.now.next is None:
                return replay.ending(converged=len(replay.rows) < trials)
            replay.next_seed()
            continue
        assert best is not None
        row = case.row(best.params)
        if best.exploratory:
            replay.exploratory.add(row)
        replay.run(row)
        tell(study, case, best.params, row, seed)


def tell(study: optuna.Study, case: Case, params: dict[str, Any], row: bytes, seed: int) -> None:
    """Add a finished trial to a study."""
    known = case.problem.distributions()
    metrics = {"step_time_ms": case.time(row), "divergence": case.trial(row, seed)}
    study.add_trial(
        optuna.trial.create_trial(
            values=list(metrics.values()),
            params={k: v for k, v in params.items() if k in known},
            distributions=known,
            user_attrs={"metrics": metrics},
        )
    )


def ended(case: Case, log: Sequence[bytes], seed: int) -> Ending:
    """Race what another strategy tried in its first trials."""
    replay = Replay(case, seed, Expectation(case.problem, case.prior(seed), goals(case)))
    for row in dict.fromkeys(itertools.islice(log, TRIALS)):
        if not replay.rows.get(row):
            replay.rows[row] = [case.trial(row, seed)]
    replay.fit()
    while replay.now.next is not None:
        replay.next_seed()
    return replay.ending(converged=False)


def best_preset(case: Case) -> float:
    """Return the time of the fastest preset that is within the budget under judge seeds."""
    rows = {case.row(params) for _, params in presets(case.problem)}
    for row in sorted(rows, key=case.time):
        case.measure((row, seed) for seed in list(JUDGE_SEEDS)[: case.spec.seeds.judge[0]])
        if case.judged(row) <= MAX_DIVERGENCE:
            return case.time(row)
    return np.inf


def main(name: str, seed: str) -> None:
    """Print one search, run by run."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    case, told = Case.load(name), list[str]()
    ending = searched(case, int(seed), told=told)
    print("run       time   seeds  divergence  95 % bound  chance")
    print("\n".join(told))
    time = case.time(ending.row or case.baseline) / case.time(case.baseline)
    print(f"{ending.runs} runs, references included; adopted: {time:.3f}, {ending.mean:.3%} over 48 fresh seeds")


if __name__ == "__main__":
    main(*sys.argv[1:])
