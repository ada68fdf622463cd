"""The models of one problem: which groups share what, which parameters are features, and what the head counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.posterior import DivergenceModel, Observation
from autoprec.tuning.decide.table import families
from autoprec.tuning.decide.tables import FloatTable

__all__ = ["HEAD_WEIGHT", "SHARED", "divergence_model", "features_of", "observation"]

#: An error in the output layer moves the loss itself, not only the weights: its squared gradient error counts so many
#: times, on a small GPT and a small ViT alike (benchmarks/search_quality.py); the fit to the trials corrects it.
HEAD_WEIGHT = 3.0
#: All trials run under one paired seed, and much of what they say about single layers is true of that seed only: on the
#: same two models the full corrections predict the mean over other seeds worse than the table does, a quarter of them
#: as well as the table. Where the table is far off (the model's stretch), more is believed.
SHARED = 0.25


def features_of(problem: Problem) -> list[tuple[str, Any]]:
    """Return the features (parameter, value) of a problem: every value but the default."""
    return [(name, value) for name, values in problem.parameters.items() for value in values[1:]]


def divergence_model(
    problem: Problem, error2: FloatTable, noise_floor: float = 0.0, shared: float = SHARED
) -> DivergenceModel:
    """Return the divergence model that starts from a table of squared errors.

    Args:
        problem: the search problem.
        error2: ``[G, C]``, see :class:`autoprec.tuning.decide.table.SensitivityTable`.
        noise_floor: divergence of the benign perturbation; half of it is what no assignment gets below.
        shared: see :class:`autoprec.tuning.decide.sampler.posterior.DivergenceModel`; 1 for means over many seeds.
    """
    numbers = {g: number for number, family in enumerate(families(problem)) for g in family}
    weight = np.array([HEAD_WEIGHT if "head" in group.flags else 1.0 for group in problem.groups])
    groups = [numbers[g] for g in range(len(problem.groups))]
    return DivergenceModel(error2 * weight[:, None], groups, len(features_of(problem)), 0.5 * noise_floor, shared)


def observation(
    problem: Problem, params: Mapping[str, Any], error2_of: Callable[[Mapping[str, Any]], float], value: float
) -> Observation:
    """Return what a model learns from one point; ``error2_of`` gives the squared error its parameters add."""
    z = np.array([problem.value(params, name) == v for name, v in features_of(problem)], dtype=np.float64)
    return Observation(problem.indices(params), z, error2_of(params), value)
