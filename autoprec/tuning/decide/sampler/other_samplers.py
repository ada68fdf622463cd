"""The samplers that ``--sampler`` offers: ours, and for comparison Optuna's own and the ways of existing tools."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import optuna

from autoprec.errors import UnknownNameError
from autoprec.support.optional import require
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.prior import Prior
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.decide.sampler.table_samplers import GreedySampler, IlpSampler

__all__ = ["SAMPLERS", "make_sampler"]

#: Names that ``--sampler`` accepts.
SAMPLERS = ("ours", "tpe", "nsga2", "random", "gp", "ilp", "greedy")
#: Random trials that TPE and the GP start with.
_STARTUP = 10


def make_sampler(
    name: str,
    problem: Problem,
    prior: Prior,
    goals: Goals,
    *,
    presets: Sequence[tuple[str, dict[str, Any]]] = (),
    seed: int = 0,
    trials: int = 60,
) -> optuna.samplers.BaseSampler:
    """Return a sampler by name.

    Args:
        name: one of :data:`SAMPLERS`.
        problem, prior, goals, presets: see :class:`~autoprec.tuning.decide.sampler.sampler.PrecisionSampler`; Optuna's
            own samplers use none of them.
        seed: of Optuna's own samplers; ours draws nothing at random.
        trials: how many trials are planned (sets NSGA-II's population).

    Raises:
        UnknownNameError: with the nearest valid name.
        MissingDependencyError: ``gp`` without SciPy.
    """
    if name == "ours":
        return PrecisionSampler(problem, prior, goals, presets)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
    if name == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(8, min(50, trials // 4)))
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "gp":
        require("scipy", purpose="--sampler gp")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP)
    if name == "ilp":
        return IlpSampler(problem, prior, max_divergence=goals.max_divergence, seed=seed)
    if name == "greedy":
        return GreedySampler(problem, prior, max_divergence=goals.max_divergence, seed=seed)
    raise UnknownNameError("sampler", name, SAMPLERS)
