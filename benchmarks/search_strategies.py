"""The alternatives search_quality.py compares with, beside those that ``--sampler`` offers."""

from __future__ import annotations

from dataclasses import replace

import optuna
from ground_truth import Case
from search_cases import MAX_DIVERGENCE

from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.other_samplers import make_sampler
from autoprec.tuning.decide.sampler.table_samplers import IlpSampler

STRATEGIES = ("ours", "ilp", "one-pass", "tpe", "nsga2", "gp", "random")


def goals(case: Case, seed: int) -> Goals:
    """Return what a search of this case is for."""
    floor, slowest = case.scans[seed].floor, case.time(case.baseline)
    return Goals(MAX_DIVERGENCE, noise_floor=floor, reference=(slowest, 1.0))


def sampler(name: str, case: Case, seed: int, trials: int) -> optuna.samplers.BaseSampler:
    """Return a sampler by name; the search's own are made by ``make_sampler``.

    ``ilp`` is our own sensitivity table and solver without the learning; ``one-pass`` has ModelOpt's scores instead.
    """
    problem, prior = case.problem, case.prior(seed)
    if name == "one-pass":
        scores = replace(prior, error2=case.scans[seed].one_pass)
        return IlpSampler(problem, scores, max_divergence=MAX_DIVERGENCE, seed=seed)
    return make_sampler(name, problem, prior, goals(case, seed), presets=presets(problem), seed=seed, trials=trials)
