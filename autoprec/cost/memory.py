"""Memory of one step: weights, gradients, optimizer state, and what is saved for backward under a policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod

from autoprec.cost.peak import KINDS, Lifetimes, Timeline, timeline
from autoprec.cost.rest import (
    GRADIENT_BYTES,
    beside_bytes,
    optimizer_bytes,
    scaled_newton_schulz,
    second_moments,
)
from autoprec.cost.saved import Setting, Walk, saved_bytes
from autoprec.cost.scale import CostScale, block_of, in_block
from autoprec.graph.report import GraphReport, Operator
from autoprec.policy.sections import OptimizerPolicy

#: Bytes of a parameter, on average, below which a model is in 16 bits.
_NARROW = 3.0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one step by purpose at its peak: early in the backward pass, or in the update.

    Attributes:
        parameters: with buffers.
        gradients: of parameters, as many as there are at the peak.
        saved: what the forward pass keeps for backward, as much as is left.
        weight_casts: low-precision copies of weights; they grow with the model and not with the batch.
        backward: what the backward pass holds beside that: gradients of activations, what a checkpointed block makes
            again, codes and casts of the product at hand; or what the update needs.
        gathered: what shards hold whole at once.
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
        """All purposes together."""
        return int(sum(asdict(self).values()))

    def to_json(self) -> dict[str, int]:
        """Return whole bytes by purpose, and their total."""
        return {**{name: round(value) for name, value in asdict(self).items()}, "total": self.total}


def row_growth(report: GraphReport, scale: CostScale) -> list[tuple[float, float]]:
    """Return, for each operator, how many times as large its result is in the scaled model, and how many there are.

    Blocks grow in number with the depth, scores of attention that is written out with the sequence again and not with
    the width, logits with the tokens alone.
    """
    scores = {
        (row.module, prod(row.out_shapes[0])) for row in report.operators if row.cls == "softmax" and row.out_shapes
    }
    words = {layer.gemms[0].n for layer in report.layers if "head" in layer.flags and layer.gemms}

    def grown(row: Operator) -> tuple[float, float]:
        shape = row.out_shapes[0] if row.out_shapes else ()
        if in_block(row.module):
            square = (row.module, prod(shape)) in scores
            return scale.tokens * (scale.seq if square else scale.width), scale.depth
        by_words = row.cls in ("loss", "output") or (shape and shape[-1] in words)
        return scale.tokens * (1.0 if by_words else scale.width), 1.0

    return [grown(row) for row in report.operators]


def _saved_growth(report: GraphReport, scale: CostScale) -> float:
    """Return the factor of what a written-down step saves, all of it together."""
    before = [sum(row.out_saved) for row in report.operators]
    after = sum(size * a * b for size, (a, b) in zip(before, row_growth(report, scale), strict=True))
    return after / sum(before) if any(before) else 1.0


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


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a step needs: what is there all the time, and what comes and goes.

    Attributes:
        parameters, optimizer, gathered: bytes, see :class:`MemoryEstimate`.
        alive: see :func:`autoprec.cost.peak.timeline`.
        grown: how many times as large gradients and casts of weights are, by kind.
        gradients: of all parameters.
        update: what the update needs beside these.
    """

    parameters: float
    optimizer: float
    gathered: float
    alive: Timeline
    grown: Mapping[str, float]
    gradients: float
    update: float

    def _moments(self) -> Iterator[tuple[float, ...]]:
        """Return the bytes alive at each operator, in the order of :data:`~autoprec.cost.peak.KINDS`."""
        return zip(*([self.grown.get(kind, 1.0) * x for x in self.alive[kind]] for kind in KINDS), strict=True)

    def at_peak(self) -> MemoryEstimate:
        """Return the bytes by purpose at the moment of the step when they are most."""
        held = dict(zip(KINDS, max(self._moments(), key=sum), strict=True))
        if sum(held.values()) < self.gradients + self.update:
            held = {"saved": 0.0, "weight_casts": 0.0, "gradients": self.gradients, "backward": self.update}
        return MemoryEstimate(parameters=self.parameters, optimizer=self.optimizer, gathered=self.gathered, **held)

    def most(self, limit: float) -> float:
        """Return how many times as large the batch can be within a limit of bytes; 0 where nothing fits."""
        room = limit - self.parameters - self.optimizer - self.gathered
        if room < self.gradients + self.update:
            return 0.0
        times = math.inf
        for saved, casts, gradients, backward in self._moments():
            left = room - casts - gradients
            if left < 0:
                return 0.0
            times = min(times, left / max(saved + backward, 1.0))
        return times


def step_memory(
    report: GraphReport,
    setting: Setting,
    optimizer: OptimizerPolicy,
    scale: CostScale,
    parameters: float,
    *,
    shards: int = 1,
    script: Walk | None = None,
    lifetimes: Lifetimes | None = None,
) -> StepMemory | None:
    """Return the modelled memory of one step; None when the report counted no memory.

    A step that was written down has no operators of the backward pass: its own figure stands for what that holds.

    Args:
        scale, parameters: of the model whose memory is asked.
        shards: devices that share parameters, gradients and optimizer state.
        script: the walk of a written-down step as it is, where the caller has it.
        lifetimes: of a recorded step, where the caller has them.
    """
    seen = report.memory
    if not seen:
        return None
    recorded = float(report.model.get("parameters", 0)) * report.held or parameters
    grown = parameters / recorded / shards
    muon = scaled_newton_schulz(report, scale)
    second = second_moments(muon, parameters)
    known = bool(muon) or seen.get("optimizer", 0) > 1.5 * seen.get("parameters", 0)
    if seen.get("parameters", 0) < _NARROW * recorded:
        change = beside_bytes(optimizer, second, moments=known) * parameters / shards
    else:
        stored, before = optimizer_bytes(optimizer, second)[0], optimizer_bytes(OptimizerPolicy(), second)[0]
        change = (stored - before) * parameters / shards if known else 0.0
    lean = GRADIENT_BYTES[optimizer.gradients] / 4.0
    if not any(row.phase == "backward" and row.sources for row in report.operators):
        saved, casts = saved_bytes(report, setting, script)
        held = {"saved": max(0.0, saved - casts) * _saved_growth(report, scale), "weight_casts": casts}
        held |= {
            "gradients": seen.get("gradients", 0),
            "backward": seen.get("backward", 0) * scale.tokens * scale.width,
        }
        alive: Timeline = {kind: [float(size)] for kind, size in held.items()}
        update = 0.0
    else:
        lifetimes = lifetimes or Lifetimes.of(report)
        alive = timeline(lifetimes, setting, None if scale.is_identity else row_growth(report, scale), lifetimes.held)
        update = _update_bytes(report, grown, gpu=setting.gpu)
    return StepMemory(
        parameters=(seen.get("parameters", 0) + seen.get("buffers", 0)) * grown,
        optimizer=max(0.0, seen.get("optimizer", 0) * grown + change),
        gathered=_gathered(report) * parameters / recorded if shards > 1 else 0.0,
        alive=alive,
        grown={"gradients": grown * lean, "weight_casts": parameters / recorded},
        gradients=seen.get("gradients", 0) * grown * lean,
        update=update,
    )


def _update_bytes(report: GraphReport, grown: float, *, gpu: bool) -> float:
    """Return what Adam needs while it runs, where it is not fused: two values a parameter, of one tensor after another.

    On a GPU it works on all tensors at once by default (``foreach``), with one value a parameter.
    """
    if report.fused_update or report.memory.get("optimizer", 0) <= 1.5 * report.memory.get("parameters", 0):
        return 0.0
    largest = max((layer.parameters for layer in report.layers), default=0)
    return report.memory.get("parameters", 0) * grown if gpu else 8.0 * largest * grown
