"""The alternatives search_quality.py compares with, beside those that ``--sampler`` offers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
from ground_truth import Case
from search_cases import MAX_DIVERGENCE

from autoprec.policy.solver import solve
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import IntVector, Problem
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.other_samplers import IlpSampler, ProposalSampler, make_sampler
from autoprec.tuning.decide.sampler.prior import Prior

STRATEGIES = ("ours", "ilp", "one-pass", "measured-ilp", "greedy", "tpe", "tpe-mv", "nsga2", "gp", "random")


class MeasuredIlp(ProposalSampler):
    """Measure each group under each choice alone, then the knapsack on what was measured, never corrected after."""

    def __init__(self, problem: Problem, prior: Prior, *, max_divergence: float, seed: int) -> None:
        super().__init__(problem, prior, max_divergence=max_divergence, seed=seed)
        self._answers: dict[tuple[bytes, float], IntVector | None] = {}

    def proposals(self, measured: Callable[[Mapping[str, Any]], float | None]) -> Iterator[IntVector]:
        """Yield the single changes, largest layers first, then a sweep over the front of what they cost."""
        time = self.prior.time_ms
        safest: IntVector = np.argmin(self.prior.error2, axis=1)
        table = self.prior.error2.copy()
        base = measured(self.problem.from_indices(safest, {}))
        if base is None or np.isnan(base):
            yield safest
        gain = time[np.arange(len(time)), safest] - np.where(np.isfinite(time), time, np.inf).min(axis=1)
        scale = []
        for g in np.argsort(-gain):
            for c in np.flatnonzero(self.problem.allowed[g]):
                if c == safest[g]:
                    continue
                changed = safest.copy()
                changed[g] = c
                yield changed
                gap = measured(self.problem.from_indices(changed, {}))
                if gap is not None and np.isfinite(gap):
                    scale.append(gap**2 / max(table[g, c], 1e-30))
                    table[g, c] = gap**2
        if scale:  # what was not reached keeps its one-pass score, in the measured unit
            table[table == self.prior.error2] *= float(np.median(scale))
        total = float(np.where(np.isfinite(table), table, 0).max(axis=1).sum())
        yield from self._sweep(time, table, self.max_divergence**2, total)

    def _once(self, time: Any, table: Any, budget: float) -> IntVector | None:
        """Solve, remembering the answers as long as the table does not change."""
        key = (table.tobytes(), budget)
        if key not in self._answers:
            self._answers[key] = solve(time, table, budget)
        return self._answers[key]

    def _sweep(self, time: Any, table: Any, target: float, total: float) -> Iterator[IntVector]:
        for k in range(400):
            share = (k * 0.6180339887) % 1.0
            budget = target * (0.5 + share) if k % 2 else total * 10 ** (-6 * share)
            found = self._once(time, table, budget)
            if found is not None:
                yield found


def goals(case: Case, seed: int) -> Goals:
    """Return what a search of this case is for."""
    floor, slowest = case.scans[seed].floor, case.time(case.baseline)
    return Goals(MAX_DIVERGENCE, noise_floor=floor, reference=(slowest, 1.0))


def sampler(name: str, case: Case, seed: int, trials: int) -> Any:
    """Return a sampler by name; the search's own are made by ``make_sampler``.

    ``ilp`` is our own sensitivity table and solver without the learning; ``one-pass`` has ModelOpt's scores instead.
    """
    problem, prior = case.problem, case.prior(seed)
    if name == "one-pass":
        scores = replace(prior, error2=case.scans[seed].one_pass)
        return IlpSampler(problem, scores, max_divergence=MAX_DIVERGENCE, seed=seed)
    if name == "measured-ilp":
        return MeasuredIlp(problem, prior, max_divergence=MAX_DIVERGENCE, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "tpe-mv":
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=10)
        if name == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=10)
    return make_sampler(name, problem, prior, goals(case, seed), presets=presets(problem), seed=seed, trials=trials)
