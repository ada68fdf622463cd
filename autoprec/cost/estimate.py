"""The estimate of one training step: time with its uncertainty, memory, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from autoprec.cost.kernels import LayerCost
from autoprec.cost.scale import GemmWork
from autoprec.graph.report import GraphReport, Layer
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import Target
from autoprec.precision.recipes import Recipe


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step on the target.

    Attributes:
        time_ms: the estimate; ``low_ms`` and ``high_ms`` bound it.
        memory_bytes: peak over the step, 0 when the report says nothing about memory.
        breakdown: milliseconds of gemm, quantise, attention, norm, pointwise, other, optimizer and launch.
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


class Estimator(Protocol):
    """What a verdict asks of a cost model."""

    report: GraphReport
    target: Target

    @property
    def label(self) -> str: ...
    def works(self, name: str) -> tuple[GemmWork, ...]: ...
    def executed(self, execution: str) -> Estimator: ...
    def can_run(self, layer: Layer | str, recipe: Recipe | None) -> tuple[bool, str]: ...
    def layer_cost(self, name: str, plan: LayerPlan, activations: str = "keep") -> LayerCost: ...
    def estimate(self, plans: Mapping[str, LayerPlan], *, activations: str = "keep") -> StepEstimate: ...
