"""Does a transfer hold? A few passes on the big model itself, each compared with what the law predicted.

One pass asks the whole policy, the others its most telling *segments*: the same layers in every block, under their
recipe, everything else as written. Where the whole is beyond the limit, the segments that err most go back to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoprec.graph.report import GraphReport
from autoprec.graph.roles import places
from autoprec.policy import OptimizerPolicy, Policy, first_match
from autoprec.precision.recipes import KEEP
from autoprec.trial.protocol import Probe
from autoprec.tuning.transfer.correction import Correction
from autoprec.tuning.transfer.forecast import segment_of
from autoprec.tuning.transfer.plan import rendered
from autoprec.tuning.transfer.proxy import choice_of_rule

WHOLE = "whole policy"
#: Measured over predicted gradient error from which on a prediction is called off.
RANGE = (0.7, 1.4)


@dataclass(frozen=True, slots=True)
class Segment:
    """The same layers in every block under one choice; ``predicted`` is NaN where nothing predicts it."""

    name: str
    layers: tuple[str, ...]
    choice: str
    flops: int
    predicted: float


@dataclass(frozen=True, slots=True)
class Row:
    """One pass: a segment, or the whole policy; errors are relative to the gradient.

    ``factor`` is what an earlier spot check corrected the prediction by.
    """

    name: str
    predicted: float
    measured: float
    factor: float = 1.0

    @property
    def ratio(self) -> float:
        """Measured over predicted; NaN without a prediction."""
        return self.measured / self.predicted if self.predicted > 0 else math.nan

    @property
    def of_law(self) -> float:
        """Measured over what the law alone predicts, without an earlier correction."""
        return self.ratio * self.factor

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "of_law": self.of_law}


@dataclass(frozen=True)
class SpotCheck:
    """What was asked and found.

    Attributes:
        rows: the whole policy first.
        noise: mini-batch gradient noise of the big model, relative; NaN where it could not be seen.
        limit: the largest gradient error that is acceptable there.
    """

    rows: tuple[Row, ...]
    noise: float
    limit: float

    @property
    def whole(self) -> Row:
        return self.rows[0]

    @property
    def within(self) -> bool:
        """Whether the policy's error is finite and within the limit."""
        return self.whole.measured <= self.limit

    @property
    def as_predicted(self) -> bool:
        """Whether the prediction was right (True where there was none)."""
        return math.isnan(self.whole.ratio) or RANGE[0] <= self.whole.ratio <= RANGE[1]

    @property
    def correction(self) -> Correction:
        """What the passes say of the law, for another transfer to this model."""
        return Correction({row.name: row.of_law for row in self.rows[1:] if 0.0 < row.of_law < math.inf}, self.noise)

    def to_json(self) -> dict[str, Any]:
        out = {"rows": [row.to_json() for row in self.rows], "noise": self.noise, "limit": self.limit}
        return out | {"within": self.within, "as_predicted": self.as_predicted}


def segments(policy: Policy, report: GraphReport) -> list[Segment]:
    """Return the segments of a policy on a recorded model, what was predicted to err most first."""
    known = policy.evidence.get("transferred_from") or {}
    predicted: Mapping[str, float] = known.get("segments") or {}
    there = places(report.tunable)
    grouped: dict[str, list[str]] = {}
    for layer in report.tunable:
        grouped.setdefault(layer.group, []).append(layer.name)
    found: dict[str, list[str]] = {}
    choices: dict[str, str] = {}
    for group, layers in grouped.items():
        rule = first_match(policy.layers, layers[0])
        choice = choice_of_rule(policy, -1 if rule is None else policy.layers.index(rule))
        if choice != KEEP:
            name = segment_of(group, there, layers, choice)
            found.setdefault(name, []).extend(layers)
            choices[name] = choice
    flops = {layer.name: layer.total_flops for layer in report.tunable}
    out = [
        Segment(name, tuple(layers), choices[name], sum(flops[n] for n in layers), float(predicted.get(name, math.nan)))
        for name, layers in found.items()
    ]
    return sorted(out, key=lambda s: (-s.predicted if s.predicted == s.predicted else 0.0, -s.flops))


def spot_probes(policy: Policy, report: GraphReport, passes: int) -> tuple[list[Probe], list[Segment]]:
    """Return the probes of ``passes`` passes, the whole policy's first, and the segments of the others."""
    whole = policy.model_copy(update={"execution": "keep"})
    asked = segments(policy, report)[: max(0, passes - 1)]
    names = [layer.name for layer in report.layers]
    plain = policy.model_copy(
        update={"activations": KEEP, "execution": KEEP, "optimizer": OptimizerPolicy(), "loss_scaling": "none"}
    )
    probes = [Probe(WHOLE, whole.to_dict())]
    for segment in asked:
        alone = rendered(plain, names, dict.fromkeys(segment.layers, segment.choice), policy.recipes)
        probes.append(Probe(segment.name, alone.to_dict()))
    return probes, asked


def judged(
    payloads: Sequence[Mapping[str, Any]], policy: Policy, asked: Sequence[Segment], max_gradient_error: float
) -> SpotCheck:
    """Return the outcome of the passes.

    Args:
        payloads: of ``sensitivity`` trials with the probes of :func:`spot_probes`, one per moment; errors count by the
            root of their mean square over moments.
        max_gradient_error: the most gradient error, as a share of the mini-batch noise.
    """
    origin = policy.evidence.get("transferred_from") or {}
    whole = float((origin.get("predicted") or {}).get("gradient_error", math.nan))
    predicted = {WHOLE: whole} | {segment.name: segment.predicted for segment in asked}
    factors, rows = origin.get("corrected_by") or {}, []
    for name, expected in predicted.items():
        each = [_error(row) for payload in payloads for row in payload["probes"] if row["id"] == name]
        rows.append(Row(name, expected, _root_mean_square(each), float(factors.get(name, 1.0))))
    noises = [float(noise) for payload in payloads if (noise := payload.get("gradient_noise"))]
    known = _root_mean_square([noise for noise in noises if math.isfinite(noise) and noise > 0])
    return SpotCheck(tuple(rows), known, max_gradient_error * known if known == known else math.inf)


def _error(row: Mapping[str, Any]) -> float:
    value = row.get("gradient_error")
    return math.inf if row.get("nonfinite") or value is None else float(value)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else math.nan


def corrected(policy: Policy, report: GraphReport, check: SpotCheck) -> tuple[Policy, tuple[str, ...]]:
    """Return the policy without the segments that err most, so that the rest is within the limit, and their names.

    Squares of errors add, so each segment leaves its own square. A segment that was not asked counts with its predicted
    error, times what the asked ones were off by.
    """
    measured = {row.name: row.measured for row in check.rows[1:]}
    ratios = sorted(row.ratio for row in check.rows[1:] if math.isfinite(row.ratio))
    off = ratios[len(ratios) // 2] if ratios else 1.0
    every = segments(policy, report)
    errors = {s.name: measured.get(s.name, s.predicted * off if s.predicted == s.predicted else 0.0) for s in every}
    plain = "bf16" if "bf16" in policy.recipes else KEEP
    choices = {name: s.choice for s in every for name in s.layers}
    removed: list[str] = []

    def left() -> float:
        if math.isfinite(check.whole.measured):
            return check.whole.measured**2 - sum(errors[name] ** 2 for name in removed)
        return sum(error**2 for name, error in errors.items() if name not in removed)

    for segment in sorted(every, key=lambda s: -errors[s.name]):
        if left() <= check.limit**2:
            break
        if segment.choice != plain:
            removed.append(segment.name)
            choices |= dict.fromkeys(segment.layers, plain)
    out = rendered(policy, [layer.name for layer in report.layers], choices, policy.recipes)
    spot = {"measured": check.whole.measured, "limit": check.limit, "back_to_16_bit": list(removed)}
    evidence = {**policy.evidence, "spot_check": {k: v for k, v in spot.items() if v == v and v != math.inf}}
    return out.model_copy(update={"evidence": evidence}), tuple(removed)
