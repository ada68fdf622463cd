"""The alternatives quality.py compares with, beside those that ``--sampler`` offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial

from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.study.run import Run, metrics_of
from benchmarks.search.cases import MAX_DIVERGENCE
from benchmarks.search.ground_truth import Case
from benchmarks.search.other_samplers import IlpSampler, make_sampler

#: So many of five trials look for the largest gain, the others for the point that adds most hypervolume.
AIMING = 2
#: Where the hypervolume is bounded beyond the worst point: a share of its time, and nats of divergence.
BEYOND_TIME, BEYOND_LN_GAP = 1.02, 0.1
STRATEGIES = ("ours", "ilp", "one-pass", "tpe", "nsga2", "gp", "random")


def goals(case: Case) -> Goals:
    """Return what a search of this case is for."""
    return Goals(MAX_DIVERGENCE, reference=(case.time(case.baseline), 1.0))


def sampler(name: str, case: Case, seed: int, trials: int) -> optuna.samplers.BaseSampler:
    """Return a sampler by name; the search's own are made by ``make_sampler``.

    ``ilp`` is our own sensitivity table and solver without the learning; ``one-pass`` has ModelOpt's scores instead.
    """
    problem, prior = case.problem, case.prior(seed)
    if name == "one-pass":
        scores = replace(prior, error2=case.scans[seed].one_pass)
        return IlpSampler(problem, scores, max_divergence=MAX_DIVERGENCE, seed=seed)
    if name == "ours":
        return FrontSampler(problem, prior, goals(case), presets(problem))
    return make_sampler(name, problem, prior, goals(case), presets=presets(problem), seed=seed, trials=trials)


class FrontSampler(PrecisionSampler):
    """Our sampler in a study of a given length, as its rivals are: it looks for the front, which a search does not."""

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, *space: Any) -> dict[str, Any]:
        """Return the params of the next trial."""
        done = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number and t.params]
        metrics = [t.user_attrs["metrics"] for t in done]
        self.learn(
            [
                Run(0, "search", "", t.params, {}, "ok", metrics=metrics_of(m))
                for t, m in zip(done, metrics, strict=True)
            ],
            None,
        )
        _, fresh = self._new([t.params for t in done])
        if trial.number % 5 < AIMING or not fresh:
            return super().sample_relative(study, trial, *space)
        asked, offered = self.places([t.params for t in done]), self.places(fresh)
        worst = np.concatenate([asked, offered]).max(axis=0)
        bound = np.array([worst[0] * BEYOND_TIME, worst[1] + BEYOND_LN_GAP])
        return fresh[int(np.argmax(added_area(asked, offered, bound)))]

    def places(self, many: Sequence[dict[str, Any]]) -> np.ndarray[Any, Any]:
        """Return (step time as a share of the largest, ln divergence) ``[N, 2]``, as the models expect them."""
        points = self.expectation.points(many)
        time, log_gap = self.expectation.time.predict(points)[0], self.expectation.divergence.predict(points)[0]
        return np.stack([time / self.expectation.time.scale, log_gap], axis=1)


def added_area(
    points: np.ndarray[Any, Any], candidates: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return by how much each candidate ``[M, 2]`` alone would enlarge the hypervolume of points ``[N, 2]``.

    Both coordinates are minimised; the area is bounded by the reference point.
    """
    inside = points[(points < reference).all(axis=1)]
    order = np.lexsort((inside[:, 1], inside[:, 0]))
    x = np.concatenate([inside[order, 0], [reference[0]]])
    height = np.minimum.accumulate(np.concatenate([[reference[1]], inside[order, 1]]))
    left = np.concatenate([[-np.inf], x[:-1]])
    # between two neighbouring points the front is as low as the lowest point so far
    width = np.maximum(x[None, :] - np.maximum(left[None, :], candidates[:, :1]), 0.0)
    return np.asarray((width * np.maximum(height[None, :] - candidates[:, 1:], 0.0)).sum(axis=1))
