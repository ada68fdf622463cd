"""Would a search need fewer runs if it began with what studies of other models learnt?

    python benchmarks/search/family_prior.py [--seeds 2] [--cases gpt-b200,vit-h100]

Whole searches of the recorded cases (quality.py, finals.py) begin their divergence model in three ways: as the product
does; from all cases of other families (the level of the law, and what each recipe does beyond its gradient error, with
the spread between families as the doubt); and from the case's own record, which no study can have: what that saves is
the most that any prior could. What was adopted is judged under fresh seeds. Nothing is stored.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from autoprec.policy.solver import FloatTable
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler import expectation, prior
from autoprec.tuning.decide.sampler.posterior import _START, DivergenceModel, Points, Vector
from benchmarks.search.cases import MAX_DIVERGENCE, REPORTED
from benchmarks.search.finals import Ending, searched
from benchmarks.search.ground_truth import TRIAL_SEEDS, Case

#: Cases of the same family: variants of one GPT.
FAMILY = dict.fromkeys(("gpt-b200", "deep-b200", "fp4-b200", "long-h100", "state-h100", "moe-b200"), "gpt")
ROWS, SURE, LEAST = 300, 0.1, 0.3
_PLAIN = prior.divergence_model


@dataclass(frozen=True)
class Law:
    """What a record says: ln(D) at a squared error of 1, and beyond it by recipe; with what is in doubt of each."""

    level: float
    choices: Mapping[str, float]
    level_sd: float = SURE
    choice_sd: float = SURE


class Begun(DivergenceModel):
    """The product's model, with a prior mean of its coefficients."""

    _mean: Vector | None = None

    def begin(self, problem: Problem, law: Law) -> None:
        """Begin from a law; recipes that it does not name begin as they do without."""
        mean = np.zeros(len(self._sds[0]))
        mean[0] = law.level + 0.5 * math.log(self._unit) - _START
        for sds in self._sds:
            sds[0] = law.level_sd
        for at, name in enumerate(problem.choice_names, 1 + self._features):
            if name in law.choices:
                mean[at] = law.choices[name]
                for sds in self._sds:
                    sds[at] = max(sds[at], law.choice_sd)
        self._mean = mean

    def _start(self, points: Points) -> tuple[FloatTable, Vector]:
        rows, start = super()._start(points)
        return rows, start if self._mean is None else start + rows @ self._mean

    def _law(self, theta: Vector, spread: float) -> tuple[FloatTable, float, Vector]:
        return super()._law(theta if self._mean is None else theta + self._mean, spread)


def learnt(case: Case) -> Law:
    """Return what the stored runs of a case say, under trial seed 0."""
    start = expectation.Expectation(case.problem, case.prior(0), _goals(case))
    rows = [row for row, values in case.values.items() if math.isfinite(values[0])]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:ROWS]]
    model = _PLAIN(case.problem, case.prior(0).error2)
    values = np.array([case.trial(row, 0) for row in rows])
    model.fit(start.points([case.params(row) for row in rows]), values, np.zeros(len(rows), dtype=np.int64))
    theta = model._weights @ np.array([fit.coefficients for fit in model._fits])
    at = 1 + model._features
    shifts = dict(zip(case.problem.choice_names, theta[at : at + model._choices].tolist(), strict=True))
    return Law(_START + float(theta[0]) - 0.5 * math.log(model._unit), shifts)


def _goals(case: Case) -> Any:
    from benchmarks.search.strategies import goals

    return goals(case)


def others(laws: Mapping[str, Law], name: str) -> Law:
    """Return the mean law of the other families, each counted once."""
    family = FAMILY.get(name, name)
    grouped: dict[str, list[Law]] = {}
    for other, law in laws.items():
        if FAMILY.get(other, other) != family:
            grouped.setdefault(FAMILY.get(other, other), []).append(law)
    levels = [float(np.mean([law.level for law in laws_])) for laws_ in grouped.values()]
    choices: dict[str, list[float]] = {}
    for found in grouped.values():
        for choice in {c for law in found for c in law.choices}:
            mean = float(np.mean([law.choices[choice] for law in found if choice in law.choices]))
            choices.setdefault(choice, []).append(mean)
    spreads = [float(np.std(values, ddof=1)) for values in choices.values() if len(values) > 1]
    return Law(
        float(np.mean(levels)),
        {choice: float(np.mean(values)) for choice, values in choices.items()},
        max(LEAST, float(np.std(levels, ddof=1))),
        max(SURE, float(np.mean(spreads)) if spreads else SURE),
    )


def replayed(case: Case, seed: int, law: Law | None) -> Ending:
    """Search a case, beginning from a law or as the product does."""

    def begun(problem: Problem, error2: FloatTable) -> DivergenceModel:
        plain = _PLAIN(problem, error2)
        if law is not None:
            plain.__class__ = Begun
            plain.begin(problem, law)
        return plain

    expectation.divergence_model = begun
    try:
        return searched(case, seed)
    finally:
        expectation.divergence_model = _PLAIN


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(REPORTED))
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    cases, began = {name: Case.load(name) for name in REPORTED}, time.monotonic()
    laws = {name: learnt(case) for name, case in cases.items()}
    spread = {name: round(law.level, 2) for name, law in laws.items()}
    print(f"ln(D) at a squared error of 1: {spread}", flush=True)
    print("case          seed  runs: as now, other families, its own   time of what is adopted   beyond the budget")
    total = np.zeros(3)
    times: list[list[float]] = []
    for name in args.cases.split(","):
        case = cases[name]
        for seed in list(TRIAL_SEEDS)[: args.seeds]:
            found = [replayed(case, seed, law) for law in (None, others(laws, name), laws[name])]
            took = [case.time(one.row or case.baseline) / case.time(case.baseline) for one in found]
            beyond = [one.mean > MAX_DIVERGENCE for one in found]
            total += [one.runs for one in found]
            times.append(took)
            runs = " ".join(f"{one.runs:4}" for one in found)
            print(f"{name:13} {seed:4}  {runs}   {' '.join(f'{t:.3f}' for t in took)}   {beyond}", flush=True)
    saved, slower = 1 - total / total[0], np.mean(np.array(times) / np.array(times)[:, :1], axis=0) - 1
    for k, how in ((1, "other families"), (2, "its own record")):
        print(f"{how}: {saved[k]:+.0%} of runs saved, what is adopted {slower[k]:+.1%} slower")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
