"""What a policy may cost to be acceptable, and which of two acceptable ones is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.tuning.decide.decision import gradient_limit
from autoprec.tuning.decide.noise import Baseline, screening_limit, uninformative


@dataclass(frozen=True, slots=True)
class Limits:
    """What an acceptable policy may cost.

    Attributes:
        divergence: mean relative loss gap, a fraction.
        gradient_error: relative gradient error in units of the mini-batch gradient noise.
        memory: peak bytes of a step; None for no limit.
    """

    divergence: float
    gradient_error: float
    memory: int | None = None

    def gradient(self, noise: float | None, baseline: Baseline) -> float | None:
        """Return the largest acceptable relative gradient error, None for no limit.

        Args:
            noise: mini-batch gradient noise, relative to the gradient's norm; None where it is unknown.
            baseline: what the loss of the script can tell: where it is uninformative the limit is stricter.
        """
        why = uninformative(self.divergence, baseline)
        return gradient_limit(noise, self.gradient_error, uninformative=why is not None)

    def bounds(self, max_gradient: float | None) -> dict[str, float]:
        """Return the limits by the metrics that they are of, as far as there are any.

        Args:
            max_gradient: from :meth:`gradient`.
        """
        known = {"divergence": self.divergence, "gradient_error": max_gradient, "memory_bytes": self.memory}
        return {name: float(limit) for name, limit in known.items() if limit is not None}

    def exceeded(self, figures: Mapping[str, float], max_gradient: float | None) -> tuple[str, ...]:
        """Name the metrics of a trial that are beyond their limits; a gap that noise explains does not count."""
        bounds = self.bounds(max_gradient)
        bounds["divergence"] = screening_limit(self.divergence, figures["noise_floor"])
        return tuple(name for name, limit in bounds.items() if figures[name] > limit)


def rank(metrics: Mapping[str, float], objective: str) -> float:
    """Return what an objective minimises: milliseconds, bytes, or (``balanced``) their product."""
    if objective == "memory":
        return metrics["memory_bytes"]
    if objective == "balanced":
        return metrics["step_time_ms"] * metrics["memory_bytes"]
    return metrics["step_time_ms"]
