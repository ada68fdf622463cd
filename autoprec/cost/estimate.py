"""The estimate of one training step: time with its uncertainty, memory, and where the time goes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
