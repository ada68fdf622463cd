"""A synthetic objective for sampler tests: additive squared errors that differ from the prior by a known factor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from autoprec.policy.space import load_space
from autoprec.tuning.decide.problem import FloatTable, Problem
from autoprec.tuning.decide.sampler.prior import Prior
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.study.run import Run, metrics_of
from tests.tuning.models import gpt

BUDGET = 0.0025


@dataclass
class Synthetic:
    problem: Problem
    prior: Prior
    error2: FloatTable
    base_ms: float = 10.0

    def step(self, params: Mapping[str, Any]) -> tuple[float, float]:
        index = self.problem.indices(params)
        rows = np.arange(len(index))
        gap = 0.04 * float(np.sqrt(self.error2[rows, index].sum()))
        return self.base_ms + float(self.prior.time_ms[rows, index].sum()), gap


def synthetic(blocks: int = 4, seed: int = 0, space: str = "hopper-fp8", misfit: float = 0.6) -> Synthetic:
    problem = Problem.build(gpt(blocks), load_space(space))
    rng = np.random.default_rng(seed)
    shape = problem.allowed.shape
    level = np.array([1e-6 if name == "bf16" else 0.0 if name == "keep" else 1e-3 for name in problem.choice_names])
    level = level * np.array([0.6 if "/" in name else 1.0 for name in problem.choice_names])
    prior2 = np.where(
        problem.allowed, rng.lognormal(0, 1, (shape[0], 1)) * level * rng.lognormal(0, 0.2, shape), np.inf
    )
    ratio = np.array(
        [{"bf16": 1.0, "keep": 1.6}.get(name, 0.75 if "/" in name else 0.6) for name in problem.choice_names]
    )
    time_ms = np.where(
        problem.allowed, rng.uniform(0.5, 1.5, (shape[0], 1)) * ratio * rng.uniform(0.97, 1.03, shape), np.inf
    )
    prior = Prior(time_ms=time_ms, error2=prior2, base_time_ms=10.0)
    return Synthetic(problem, prior, prior2 * rng.lognormal(0, misfit, shape))


def run_of(params: Mapping[str, Any], seed: int, gap: float | None, step: float | None, status: str = "ok") -> Run:
    """Return a run of a policy under a paired seed, of which as much is known; a failed one has neither figure."""
    known = {"divergence": gap, "step_time_ms": step}
    metrics = metrics_of({name: value for name, value in known.items() if value is not None})
    return Run(0, "search", "", dict(params), {}, status, metrics=metrics, seed=seed)


def drive(found: Synthetic, study: optuna.Study, trials: int) -> list[tuple[float, float]]:
    """Run trials and return (step time, divergence) of each; our sampler learns from all of them."""
    out = []
    for _ in range(trials):
        if isinstance(study.sampler, PrecisionSampler):
            done = [(t.params, *found.step(t.params)) for t in study.trials if t.state.is_finished()]
            runs = [run_of(params, 0, gap, step) for params, step, gap in done]
            study.sampler.learn(runs, min((math.log(step) for _, step, gap in done if gap <= BUDGET), default=None))
            if study.sampler.best(study) is None:  # nothing else is on the front: a search ends here
                break
        trial = study.ask(found.problem.distributions())
        step, gap = found.step(trial.params)
        trial.set_user_attr("metrics", {"step_time_ms": step, "divergence": gap})
        study.tell(trial, [step, gap])
        out.append((step, gap))
    return out
