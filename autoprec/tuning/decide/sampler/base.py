"""What all samplers that propose whole points of a problem share."""

from __future__ import annotations

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from autoprec.tuning.decide.problem import Problem

__all__ = ["PointSampler", "is_exhausted"]


class PointSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """A sampler that decides about layers and parameters together, in one relative sample.

    Attributes:
        problem: the search problem.
        exhausted: nothing new was left to propose; the search may end.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.exhausted = False

    def infer_relative_search_space(  # the same for every study and trial
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        """Return the distributions of everything there is to decide."""
        return dict(self.problem.distributions())


def is_exhausted(sampler: optuna.samplers.BaseSampler) -> bool:
    """Say whether a sampler has nothing new to propose; Optuna's own never say so."""
    return isinstance(sampler, PointSampler) and sampler.exhausted
