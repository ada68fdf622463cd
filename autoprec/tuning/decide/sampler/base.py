"""What all samplers that propose whole points of a problem share."""

from __future__ import annotations

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from autoprec.tuning.decide.problem import Problem

__all__ = ["PointSampler", "finished"]


class PointSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """A sampler that decides about layers and parameters together, in one relative sample.

    Attributes:
        problem: the search problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def infer_relative_search_space(  # the same for every study and trial
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        """Return the distributions of everything there is to decide."""
        return dict(self.problem.distributions())

    def finished(self, study: optuna.Study) -> str:  # noqa: ARG002
        """Return why nothing is left that is worth a trial; empty while something is."""
        return ""


def finished(sampler: optuna.samplers.BaseSampler, study: optuna.Study) -> str:
    """Return why a sampler has nothing left that is worth a trial; Optuna's own never say so."""
    return sampler.finished(study) if isinstance(sampler, PointSampler) else ""
