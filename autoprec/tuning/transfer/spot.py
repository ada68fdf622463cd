"""Does a policy hold on a model on which it was not searched? A few passes on the model itself, held to the limit.

One pass runs the whole policy, each of the others one of its largest *segments*: the same layers in every block, under
their recipe, everything else as written. Where the whole is beyond the limit, the segments that err most go back to 16
bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoprec.graph.report import GraphReport
from autoprec.graph.roles import places
from autoprec.policy import OptimizerPolicy, Policy, first_match
from autoprec.precision.recipes import KEEP
from autoprec.trial.protocol import GradientErrors, Probe
from autoprec.tuning.transfer.plan import rendered
from autoprec.tuning.transfer.proxy import choice_of_rule

WHOLE = "whole policy"


@dataclass(frozen=True, slots=True)
class Segment:
    """The same layers in every block under one choice; ``name`` is both (``h.*.mlp.up|fp8_rowwise``)."""

    name: str
    layers: tuple[str, ...]
    choice: str
    flops: int


@dataclass(frozen=True, slots=True)
class Row:
    """One pass: a segment, or the whole policy, and its error, relative to the gradient."""

    name: str
    error: float


@dataclass(frozen=True)
class SpotCheck:
    """What was asked and found.

    Attributes:
        rows: the whole policy first.
        noise: mini-batch gradient noise of the model, relative to the gradient; NaN where it could not be seen.
        limit: the largest gradient error that is acceptable there.
    """

    rows: tuple[Row, ...]
    noise: float
    limit: float

    @property
    def error(self) -> float:
        """Gradient error of the whole policy; infinite where its gradient is not finite."""
        return self.rows[0].error

    @property
    def within(self) -> bool:
        """Whether the policy's error is finite and within the limit."""
        return self.error <= self.limit and math.isfinite(self.error)

    def to_json(self) -> dict[str, Any]:
        """Return the rows, noise and limit, and whether the policy is within it."""
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "noise": self.noise, "limit": self.limit, "within": self.within}

    def evidence(self) -> dict[str, float]:
        """Return what a policy's evidence keeps of it: four significant digits of what is finite."""
        known = {"gradient_error": self.error, "gradient_noise": self.noise, "limit": self.limit}
        return {name: float(f"{value:.4g}") for name, value in known.items() if math.isfinite(value)}


def segments(policy: Policy, report: GraphReport) -> list[Segment]:
    """Return the segments of a policy on a recorded model, those with most FLOPs first."""
    there = places(report.tunable)
    grouped: dict[str, list[str]] = {}
    for layer in report.tunable:
        grouped.setdefault(layer.group, []).append(layer.name)
    found: dict[tuple[str, str], list[str]] = {}
    for layers in grouped.values():
        rule = first_match(policy.layers, layers[0])
        choice = choice_of_rule(policy, -1 if rule is None else policy.layers.index(rule))
        if choice != KEEP:
            found.setdefault((there[layers[0]].alike, choice), []).extend(layers)
    flops = {layer.name: layer.total_flops for layer in report.tunable}
    out = [
        Segment(f"{alike}|{choice}", tuple(layers), choice, sum(flops[name] for name in layers))
        for (alike, choice), layers in found.items()
    ]
    return sorted(out, key=lambda segment: -segment.flops)


def spot_probes(policy: Policy, report: GraphReport, passes: int) -> list[Probe]:
    """Return the probes of ``passes`` passes: the whole policy, then its largest segments, those in 8 bits first.

    Args:
        policy: what is checked.
        report: the recorded step.
        passes: how many probes.
    """
    asked = {"execution": KEEP, "embedding_gradient": 1.0}  # a gradient that is meant to be smaller is not in error
    whole = policy.model_copy(update=asked)
    plain = whole.model_copy(update={"activations": KEEP, "optimizer": OptimizerPolicy(), "loss_scaling": "none"})
    names = [layer.name for layer in report.layers]
    probes = [Probe(WHOLE, whole.to_dict())]
    every = sorted(segments(policy, report), key=lambda segment: segment.choice == _plain(policy))
    for segment in every[: max(0, passes - 1)]:
        alone = rendered(plain, names, dict.fromkeys(segment.layers, segment.choice), policy.recipes)
        probes.append(Probe(segment.name, alone.to_dict()))
    return probes


def judged(answers: Sequence[GradientErrors], max_gradient_error: float) -> SpotCheck:
    """Return the outcome of the passes.

    Args:
        answers: answers of ``sensitivity`` trials with the probes of :func:`spot_probes`, one per moment; errors count
            by the root of their mean square over moments.
        max_gradient_error: the most gradient error, as a share of the mini-batch noise.
    """
    each: dict[str, list[float]] = {}
    for found in answers:
        for row in found.probes:
            each.setdefault(row.id, []).append(row.error)
    noises = [found.gradient_noise or 0.0 for found in answers]
    known = _root_mean_square([noise for noise in noises if math.isfinite(noise) and noise > 0])
    rows = tuple(Row(name, _root_mean_square(errors)) for name, errors in each.items())
    return SpotCheck(rows, known, max_gradient_error * known if known == known else math.inf)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else math.nan


def _plain(policy: Policy) -> str:
    return "bf16" if "bf16" in policy.recipes else KEEP


def corrected(policy: Policy, report: GraphReport, check: SpotCheck) -> tuple[Policy, tuple[str, ...]]:
    """Return the policy without the segments that err most, so that the rest is within the limit, and their names.

    Squares of errors add, so each segment takes its own square away. What the segments that were run leave of the
    whole belongs to the others, shared by their FLOPs. The phases of a policy stay as they are.

    Args:
        policy: what was checked.
        report: the recorded step.
        check: its outcome.
    """
    plain, every = _plain(policy), segments(policy, report)
    errors2 = {row.name: row.error**2 for row in check.rows[1:]}
    candidates = [segment for segment in every if segment.choice != plain]
    rest = [segment for segment in candidates if segment.name not in errors2]
    whole, asked = check.error**2, sum(errors2.values())
    flops = sum(segment.flops for segment in rest) or 1
    errors2 |= {one.name: max(0.0, whole - asked) * max(1, one.flops) / flops for one in rest if asked < math.inf}
    removed: list[Segment] = []
    for segment in sorted(candidates, key=lambda one: -errors2.get(one.name, 0.0)):
        gone = {one.name for one in removed}
        others = sum(square for name, square in errors2.items() if name not in gone)
        left = whole - sum(errors2[name] for name in gone) if math.isfinite(whole) else others
        if left <= check.limit**2:
            break
        removed.append(segment)
    choices = {name: one.choice for one in every for name in one.layers}
    choices |= {name: plain for one in removed for name in one.layers}
    first = rendered(policy.stages[0], [layer.name for layer in report.layers], choices, policy.recipes)
    names = tuple(one.name for one in removed)
    evidence = {**policy.evidence, "spot_check": check.evidence() | {"back_to_16_bit": list(names)}}
    out = policy.with_stages([first, *policy.stages[1:]]) if policy.phases else first
    return out.model_copy(update={"evidence": evidence}), names
