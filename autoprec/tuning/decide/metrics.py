"""What a trial is judged by: loss divergence against its paired reference, step time, and what a loss gap costs.

A trial and its reference see the same initial weights, batches and random streams, so their loss curves differ only by
what the policy does to the numerics; the mean relative gap over the second half is the *divergence*. The functions on
curves are pure and take plain sequences; divergences and speed-ups are fractions, times are milliseconds. :func:`score`
puts them together under the names that every part of AutoPrec uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoprec.cost import StepEstimate
from autoprec.cost.estimate import ratio_bounds
from autoprec.support.arrays import np
from autoprec.support.plain import Document
from autoprec.trial.losses import MISMATCH, Series, loss_units
from autoprec.trial.protocol import TrialResult
from autoprec.tuning.decide.noise import Baseline, Vector
from autoprec.tuning.study.run import MEASURED, MODELLED, Metric, Run, metrics_of


def divergence(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the mean absolute relative gap between a trial's losses and its paired reference's.

    The last half of the common steps is scored: the first steps are nearly equal under any precision.

    Args:
        losses: losses of the trial, one per optimizer step.
        reference: losses of the run with the same initial weights, data order and random streams.

    Returns:
        A fraction (0.0025 is 0.25 %) of the reference's loss, or of the unit that takes its place where it goes to
        zero (:func:`autoprec.trial.losses.loss_units`); infinity when a scored loss of the trial is not finite, NaN
        never.
    """
    a, b, unit = _last_half(losses, reference)
    usable = np.isfinite(b)
    if not np.isfinite(a).all() or not usable.any():
        return math.inf
    return float(np.mean(np.abs(a[usable] - b[usable]) / unit[usable]))


def signed_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the mean relative gap over the last half with its sign: positive when the trial's loss is higher.

    NaN where a scored loss is not finite or there are none.
    """
    a, b, unit = _last_half(losses, reference)
    gaps = (a - b) / unit
    return float(np.mean(gaps)) if len(gaps) and np.isfinite(gaps).all() else math.nan


def _last_half(losses: Sequence[float], reference: Sequence[float]) -> tuple[Vector, Vector, Vector]:
    """Return the last half of the common steps: losses, those of the reference, and the units of their gaps."""
    count = min(len(losses), len(reference))
    a, b, unit = (np.asarray(row[count // 2 : count]) for row in (losses, reference, loss_units(reference)))
    return a.astype(np.float64), b.astype(np.float64), unit


def step_time(step_ms: Sequence[float], warmup: int = 0) -> float:
    """Return the mean step time in milliseconds after ``warmup`` steps, without those of twice the median and more.

    On a CPU a step has many page faults or hardly any, depending on where its process's heap ends just then, and may
    take a quarter longer. The median of 20 such steps may be either of the two; the mean is what training takes. Steps
    that take twice as long are those in which the script does something else as well. All steps count when there are no
    more than ``warmup``; without any the time is infinite.
    """
    kept = list(step_ms[warmup:]) or list(step_ms)
    usual = 2.0 * float(np.median(kept)) if kept else math.inf
    return float(np.mean([ms for ms in kept if ms <= usual])) if kept else math.inf


def curve_slope(losses: Sequence[float]) -> tuple[float, float]:
    """Fit ``loss = a - slope * ln(step)`` over the last half of a loss curve.

    Returns:
        ``(slope, standard error)`` per unit of ``ln(step)``; ``(nan, nan)`` with fewer than four finite points. Over a
        short window a training curve is close to straight in ``ln(step)``, which makes the answer independent of the
        batch size and of how many steps a trial has.
    """
    values, steps = np.asarray(losses, dtype=np.float64), np.arange(1, len(losses) + 1)
    kept = np.isfinite(values) & (steps > len(values) // 2)
    if kept.sum() < 4:
        return math.nan, math.nan
    (slope, _), covariance = np.polyfit(np.log(steps[kept]), values[kept], 1, cov=True)
    return -float(slope), math.sqrt(float(covariance[0, 0]))


def effective_speedup(speedup: float, losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the speed-up that is left after paying for a worse loss with extra steps.

    The mean signed loss gap over the last half (a better loss than the reference's earns nothing) is turned into the
    factor of extra steps ``exp(gap / slope)`` that the reference's own curve needs to win it back. Where the curve does
    not fall measurably (slope within two standard errors of zero) the gap cannot be priced and the divergence itself
    is charged instead: ``speedup * (1 - divergence)``.

    Args:
        speedup: a ratio to the reference.
        losses: losses of the policy's run, one per step.
        reference: losses of the reference.

    Returns:
        A ratio to the reference, between 0 and ``speedup``.
    """
    count = min(len(losses), len(reference))
    gap_share = divergence(losses, reference)
    if count == 0 or not math.isfinite(gap_share):
        return 0.0
    a, b, _ = _last_half(losses, reference)
    finite = np.isfinite(b)
    gap = max(0.0, float(np.mean((a - b)[finite])))
    slope, error = curve_slope(reference[:count])
    if not math.isfinite(slope) or slope <= 2 * error:
        return speedup * max(0.0, 1.0 - gap_share)
    return speedup * math.exp(-min(gap / slope, 50.0))


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference run of one paired seed, and the noise floor around it.

    ``step_ms`` and ``memory_bytes`` are measured on this machine or, in a rehearsal, modelled for the target.
    """

    losses: tuple[float, ...]
    step_ms: float
    memory_bytes: int
    samples: int
    baseline: Baseline = field(default_factory=Baseline)
    deterministic: bool = True
    metric: Series | None = None

    @property
    def curve(self) -> tuple[float, ...]:
        """What policies are compared with, as :attr:`autoprec.trial.protocol.TrialResult.curve`."""
        return self.losses if self.metric is None else self.metric.curve

    @property
    def noise_floor(self) -> float:
        """Mean divergence of the benign perturbations, a fraction."""
        return self.baseline.floor

    def with_noise(self, baseline: Baseline, deterministic: bool) -> Reference:
        """Return a copy that knows how far apart its curve and those of benign perturbations lie."""
        return replace(self, baseline=baseline, deterministic=deterministic)


def audit_failure(audit: Document | None) -> str:
    """Return what a trial did not execute as asked; empty when it did, or was not audited.

    An expert without tokens is fine, and its row says so; a layer whose weight is multiplied where the policy does not
    reach would fail `autoprec check` later, so it fails here.
    """
    found = {} if audit is None else audit
    layers = [(row.get("name") or "(root)", row) for row in found.get("layers", ())]
    wrong = [(name, row) for name, row in (*layers, *found.get("operators", {}).items()) if not row["ok"]]
    if not wrong:
        return ""
    name, first = wrong[0]
    why = first.get("reason") or f"ran as {first['executed']}"
    return f"{len(wrong)} layers or operators did not run as asked, first {name}: {why}"


def score(plan: Run, result: TrialResult, reference: Reference, *, estimate: StepEstimate | None, error: float) -> Run:
    """Return a planned run with what a host says of it, scored against its paired reference.

    Args:
        plan: the run as far as it is known before it starts.
        reference: the reference run of the same paired seed.
        estimate: the modelled step on the target; None when this machine is the target and was timed.
        error: relative gradient error, predicted from the sensitivity table, in units of the gradient norm.
    """
    seen = with_curves(replace(plan, tail=result.tail), result, reference)
    if not result.ok:
        return replace(seen, status=result.status, reason=result.reason)
    not_run = audit_failure(result.audit)
    if not_run:
        return replace(seen, status="mismatch", reason=not_run)
    gap = divergence(result.curve, reference.curve)
    if seen.metric in MISMATCH and math.isfinite(gap):  # closer sides are what is wanted, and no change of training
        gap = max(0.0, signed_gap(result.curve, reference.curve))
    if not math.isfinite(gap):
        return replace(seen, status="diverged", reason=f"{seen.metric or 'the loss'} became non-finite")
    # Weights or state that lose updates can flatter a short loss curve: what was seen of them from the inside counts.
    gap += result.penalty
    step_ms = step_time(result.step_ms, result.warmup) if estimate is None else estimate.time_ms
    memory = result.memory_bytes if estimate is None else estimate.memory_bytes
    share = effective_speedup(1.0, result.curve, reference.curve)
    source, spread = (MEASURED, None) if estimate is None else (MODELLED, estimate.spread)
    known = Metric(error, MODELLED)
    metrics = run_metrics(reference, step_ms, memory, gap, known, share=share, source=source, spread=spread)
    return replace(seen, status="ok", reason="", metrics=metrics)


def with_curves(run: Run, result: TrialResult, reference: Reference) -> Run:
    """Return a run with its curves beside those of its reference.

    Args:
        run: of a policy, or of the script.
        result: what its trial saw: losses, and what was reported of the metric that was asked for.
        reference: of the same paired seed.
    """
    run = replace(run, losses=result.losses, reference_losses=reference.losses)
    if result.metric is None or reference.metric is None:
        return run
    own, other = result.metric, reference.metric
    return replace(run, metric=own.name, higher=own.higher, values=own.values, reference_values=other.values)


def run_metrics(
    reference: Reference,
    step_ms: float,
    memory: int,
    gap: float,
    error: Metric,
    *,
    share: float = 1.0,
    source: str = MEASURED,
    spread: float | None = None,
) -> dict[str, Metric]:
    """Return the metrics of a run, under the names that every part of AutoPrec uses.

    Args:
        reference: the reference under the same paired seed.
        step_ms, memory: milliseconds and peak bytes of a step, and where they come from, ``source``.
        gap: its divergence.
        error: its gradient error.
        share: what is left of its speed-up after paying for a worse loss.
        spread: spread of a modelled step; the speed-up then has the model's bounds.
    """
    speedup = reference.step_ms / step_ms
    timed = {
        "throughput": 1000.0 / step_ms,
        "step_time_ms": step_ms,
        "memory_bytes": float(memory),
        "speedup": speedup,
        "effective_speedup": speedup * share,
    }
    if reference.samples:
        timed["samples_per_s"] = reference.samples * 1000.0 / step_ms
    losses = metrics_of({"divergence": gap, "noise_floor": reference.noise_floor})
    bounds = {} if spread is None else {"speedup": Metric(speedup, source, *ratio_bounds(speedup, spread))}
    return metrics_of(timed, source) | bounds | losses | {"gradient_error": error}
