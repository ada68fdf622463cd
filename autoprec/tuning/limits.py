"""What a policy may cost to be acceptable, and which of two acceptable ones is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.tuning.decide.decision import gradient_limit

__all__ = ["Limits", "rank"]


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

    def gradient(self, noise: float | None) -> float | None:
        """Return the largest acceptable relative gradient error; None where the gradient noise is unknown."""
        return gradient_limit(noise, self.gradient_error)

    def exceeded(self, metrics: Mapping[str, float], noise: float | None) -> tuple[str, ...]:
        """Name the limits that a measured trial breaks; a gap below the noise floor is never held against it."""
        largest = self.gradient(noise)
        broken = {
            "divergence": metrics["divergence"] > max(self.divergence, metrics["noise_floor"]),
            "gradient error": largest is not None and metrics["gradient_error"] > largest,
            "memory": self.memory is not None and metrics["memory_bytes"] > self.memory,
        }
        return tuple(name for name, is_broken in broken.items() if is_broken)


def rank(metrics: Mapping[str, float], objective: str) -> float:
    """Return what an objective minimises: milliseconds, bytes, or (``balanced``) their product."""
    if objective == "memory":
        return metrics["memory_bytes"]
    if objective == "balanced":
        return metrics["step_time_ms"] * metrics["memory_bytes"]
    return metrics["step_time_ms"]
