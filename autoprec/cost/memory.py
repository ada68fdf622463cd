"""Memory of one step: weights, gradients, optimizer state, and what is saved for backward under a policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from math import prod

from autoprec.cost.rest import GRADIENT_BYTES, optimizer_bytes
from autoprec.cost.saved import saved_bytes
from autoprec.cost.scale import CostScale, block_of, in_block
from autoprec.graph.report import GraphReport
from autoprec.policy.schema import LayerPlan, OptimizerPolicy


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one step by purpose; ``total`` is the peak, reached when backward begins.

    ``weight_casts`` are low-precision copies of weights that live from forward to backward; they are part of what
    autograd saves, and are shown apart because they grow with the model and not with the batch. ``backward`` is what
    the backward pass of a configuration holds beside that (it is not known of recorded steps): gradients of the logits,
    or those of a block and what a checkpointed block makes again; ``gathered`` what shards hold whole at once.
    """

    parameters: float
    gradients: float
    optimizer: float
    saved: float
    weight_casts: float
    backward: float = 0.0
    gathered: float = 0.0

    @property
    def total(self) -> int:
        """All purposes together; gradients of the last step are freed before the next in most scripts, yet count."""
        return int(sum(asdict(self).values()))

    def to_json(self) -> dict[str, int]:
        """Return whole bytes by purpose, and their total."""
        return {**{name: round(value) for name, value in asdict(self).items()}, "total": self.total}


def activation_growth(report: GraphReport, scale: CostScale) -> float:
    """Return the factor of saved activations from the recorded model to the scaled one.

    Each saved tensor grows by what it holds: blocks in depth, attention's written-out scores with the sequence again
    and not with the width, logits with the tokens alone. Without a count of each tensor, layers' inputs stand for all.
    """
    if scale.is_identity:
        return 1.0
    rows = [row for row in report.operators if row.phase == "forward" and row.out_shapes and any(row.out_saved)]
    if not rows:
        return _growth_by_layers(report, scale)
    scores = {
        (row.module, prod(row.out_shapes[0])) for row in report.operators if row.cls == "softmax" and row.out_shapes
    }
    words = {layer.gemms[0].n for layer in report.layers if "head" in layer.flags and layer.gemms}
    before = after = 0.0
    for row in rows:
        grown, shape = scale.tokens, row.out_shapes[0]
        if in_block(row.module):
            square = (row.module, prod(shape)) in scores
            grown *= scale.depth * (scale.seq if square else scale.width)
        elif row.cls != "loss" and not (shape and shape[-1] in words):
            grown *= scale.width
        before += sum(row.out_saved)
        after += sum(row.out_saved) * grown
    return after / before


def _growth_by_layers(report: GraphReport, scale: CostScale) -> float:
    inside = sum(layer.gemms[0].m * layer.gemms[0].k for layer in report.layers if layer.gemms and in_block(layer.name))
    outside = sum(
        layer.gemms[0].m * layer.gemms[0].k for layer in report.layers if layer.gemms and not in_block(layer.name)
    )
    whole = inside + outside
    share = inside / whole if whole else 1.0
    return scale.tokens * scale.width * (share * scale.depth + 1.0 - share)


def _gathered(report: GraphReport) -> float:
    """Return the bytes that FSDP holds whole at once: two blocks' and the head's weights in 16 bits, and gradients.

    The gradients of the largest of these are there in 16 bits, and in float32 while they are reduced.
    """
    units: dict[str, int] = {}
    for layer in report.layers:
        units[block_of(layer.name)] = units.get(block_of(layer.name), 0) + layer.parameters
    others = units.pop("", 0)
    blocks = sorted(units.values())[-2:]
    return 2.0 * (sum(blocks) + others) + 6.0 * max((others, *blocks))


def memory_estimate(
    report: GraphReport,
    scale: CostScale,
    parameters: float,
    plans: Mapping[str, LayerPlan],
    activations: str,
    optimizer: OptimizerPolicy,
    shards: int = 1,
    gpu: bool = False,
    script: float | None = None,
    wide: Collection[str] = ("norm",),
    shared: bool = False,
) -> MemoryEstimate | None:
    """Return the modelled bytes of one step; None when the report counted no memory.

    Args:
        scale, parameters: of the model whose memory is asked.
        shards: devices that share parameters, gradients and optimizer state.
        gpu: quantised layers keep their 8-bit weights from forward to backward.
        script, wide, shared: see :func:`autoprec.cost.saved.saved_bytes`.
    """
    seen = report.memory
    if not seen:
        return None
    recorded = float(report.model.get("parameters", 0)) * report.held or parameters
    grown = parameters / recorded / shards
    plain = OptimizerPolicy()
    stored, before = optimizer_bytes(optimizer)[0], optimizer_bytes(plain)[0]
    change = (
        (stored - before) * parameters / shards if seen.get("optimizer", 0) > 1.5 * seen.get("parameters", 0) else 0.0
    )
    lean = GRADIENT_BYTES[optimizer.gradients] / 4.0
    saved, casts = saved_bytes(report, plans, activations, gpu=gpu, script=script, wide=wide, shared=shared)
    return MemoryEstimate(
        parameters=seen.get("parameters", 0) * grown,
        gradients=seen.get("gradients", 0) * grown * lean,
        optimizer=max(0.0, seen.get("optimizer", 0) * grown + change),
        saved=max(0.0, saved - casts) * activation_growth(report, scale),
        weight_casts=casts * parameters / recorded,
        backward=seen.get("backward", 0) * scale.tokens * scale.width,
        gathered=_gathered(report) * parameters / recorded if shards > 1 else 0.0,
    )
