"""Memory of one step: weights, gradients, optimizer state, and what is saved for backward under a policy."""

from __future__ import annotations

from autoprec.cost.rest import optimizer_bytes
from autoprec.cost.scale import CostScale
from autoprec.graph.report import GraphReport
from autoprec.policy.schema import OptimizerPolicy

__all__ = ["memory_bytes"]


def memory_bytes(
    report: GraphReport,
    scale: CostScale,
    parameters: float,
    activations: str,
    optimizer: OptimizerPolicy,
) -> int:
    """Return the modelled peak of one step in bytes; 0 when the report counted no memory."""
    seen = report.memory
    if not seen:
        return 0
    recorded = float(report.model.get("parameters", 0)) or parameters
    gradients = seen.get("gradients", 0) * parameters / recorded
    stored, _ = optimizer_bytes(optimizer)
    adam = seen.get("optimizer", 0) > 1.5 * seen.get("parameters", 0)
    weights = seen.get("parameters", 0) * parameters / recorded
    states = stored * parameters - weights if adam else seen.get("optimizer", 0) * parameters / recorded
    saved = seen.get("saved_for_backward", 0) * scale.tokens * scale.width * scale.depth
    if activations != "keep":
        saved *= 0.65
    return int(weights + gradients + max(0.0, states) + saved)
