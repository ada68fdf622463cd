"""From what a trial measured (or a model says) to the metrics every part of AutoPrec names alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoprec.cost import StepEstimate
from autoprec.trial.protocol import TrialResult
from autoprec.tuning.decide.objectives import divergence, effective_speedup, step_time

__all__ = ["Reference", "Scored", "score"]


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference run of one paired seed, and the noise floor around it.

    ``step_ms`` and ``memory_bytes`` are measured on this machine or, in a rehearsal, modelled for the target.
    """

    losses: tuple[float, ...]
    step_ms: float
    memory_bytes: int
    samples: int
    warmup: int
    noise_floor: float = 0.0
    deterministic: bool = True

    def with_noise(self, floor: float, deterministic: bool) -> Reference:
        """Return a copy that knows its noise floor."""
        return replace(self, noise_floor=floor, deterministic=deterministic)


@dataclass(frozen=True, slots=True)
class Scored:
    """A trial's metrics, where each comes from, and how it ended once its numbers were looked at."""

    status: str
    reason: str
    metrics: dict[str, float]
    sources: dict[str, str]


def audit_failure(audit: Mapping[str, Any] | None) -> str:
    """Return what a trial did not execute as asked; empty when it did, or was not audited.

    A layer that this step never called (an expert without tokens) says nothing against the policy.
    """
    rows = [] if audit is None else [*audit.get("layers", ()), *audit.get("operators", {}).values()]
    wrong = [row for row in rows if not row["ok"] and row.get("executed")]
    if not wrong:
        return ""
    first = wrong[0]
    why = first.get("reason") or f"ran as {first['executed']}"
    return f"{len(wrong)} layers or operators did not run as asked, first {first.get('name', 'an operator')}: {why}"


def score(
    result: TrialResult,
    reference: Reference,
    *,
    estimate: StepEstimate | None,
    gradient_error: float,
) -> Scored:
    """Score one trial against its paired reference.

    Args:
        result: the trial.
        reference: the reference run of the same paired seed.
        estimate: the modelled step on the target; None when this machine is the target and was timed.
        gradient_error: relative gradient error predicted from the sensitivity table, in units of the gradient norm.
    """
    if not result.ok:
        return Scored(result.status, result.reason, {}, {})
    not_run = audit_failure(result.audit)
    if not_run:
        return Scored("mismatch", not_run, {}, {})
    gap = divergence(result.losses, reference.losses)
    if not math.isfinite(gap):
        return Scored("diverged", "the loss became non-finite", {}, {})
    # Weights or state that lose updates can flatter a short loss curve: what was seen of them from the inside counts.
    gap += float(result.payload.get("state", {}).get("penalty", 0.0))
    where = "measured" if estimate is None else "modelled"
    step_ms = step_time(result.step_ms, result.warmup) if estimate is None else estimate.time_ms
    memory = result.memory_bytes if estimate is None else estimate.memory_bytes
    speedup = reference.step_ms / step_ms
    metrics = {
        "throughput": 1000.0 / step_ms,
        "step_time_ms": step_ms,
        "memory_bytes": float(memory),
        "divergence": gap,
        "noise_floor": reference.noise_floor,
        "gradient_error": gradient_error,
        "speedup": speedup,
        "effective_speedup": effective_speedup(speedup, result.losses, reference.losses),
    }
    sources = dict.fromkeys(("throughput", "step_time_ms", "memory_bytes", "speedup", "effective_speedup"), where)
    sources |= {"divergence": "measured", "noise_floor": "measured", "gradient_error": "modelled"}
    if reference.samples:
        metrics["samples_per_s"] = reference.samples * 1000.0 / step_ms
        sources["samples_per_s"] = where
    return Scored("ok", "", metrics, sources)
