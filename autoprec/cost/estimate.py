"""The estimate of one training step: time with its uncertainty, memory, and where the time goes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step on the target.

    Attributes:
        time_ms: the estimate; ``low_ms`` and ``high_ms`` bound it.
        memory_bytes: peak over the step, 0 when the report says nothing about memory.
        breakdown: milliseconds of gemm, quantise, attention, product (of two activations elsewhere), norm, pointwise,
            other, optimizer and launch.
        label: what the figure rests on, e.g. ``modelled, uncalibrated``.
    """

    time_ms: float
    low_ms: float
    high_ms: float
    memory_bytes: int
    breakdown: dict[str, float] = field(default_factory=dict)
    label: str = "modelled, uncalibrated"

    @property
    def spread(self) -> float:
        """Half the width of its bounds, as a fraction of the estimate."""
        return (self.high_ms - self.low_ms) / (2 * self.time_ms) if self.time_ms else 0.0

    def times(self, time: float, memory: float) -> StepEstimate:
        """Return the step of a script that takes so many times as long, and as much memory."""
        ms = self.time_ms * time, self.low_ms * time, self.high_ms * time
        return replace(self, time_ms=ms[0], low_ms=ms[1], high_ms=ms[2], memory_bytes=round(self.memory_bytes * memory))

    def to_json(self) -> dict[str, Any]:
        """Return every field: milliseconds, bytes and shares."""
        return asdict(self)


def ratio_bounds(ratio: float, spread: float) -> tuple[float, float]:
    """Return the bounds of a modelled speed-up between two steps of one model, whose errors are largely the same.

    What a step gains or loses is unsure by twice the spread of its time; a tenth of the spread is added to the end that
    is farther from 1, for gains that the model does not see.
    """
    gain = ratio - 1.0
    near, far = 1.0 + gain * max(0.0, 1.0 - 2 * spread), 1.0 + gain * (1.0 + 2 * spread)
    return (near, far + 0.1 * spread) if gain >= 0 else (max(0.0, far - 0.1 * spread), near)
