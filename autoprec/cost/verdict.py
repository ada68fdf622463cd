"""The verdict before any trial: the most that could be gained, where the time goes, and who is below break-even."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from autoprec.cost.estimate import StepEstimate
from autoprec.cost.scale import GemmWork
from autoprec.graph.report import GraphReport, Layer
from autoprec.hardware import Target
from autoprec.policy.schema import LayerPlan
from autoprec.recipes import GEMMS, KEEP, Recipe

__all__ = ["Estimator", "Verdict", "judge"]

_KEEP_PLAN = LayerPlan()

#: Choices whose modelled times differ by less are the same precision under two names.
SAME_PRECISION = 0.01


class Estimator(Protocol):
    """What a verdict asks of a cost model."""

    report: GraphReport
    target: Target

    @property
    def label(self) -> str: ...
    def works(self, name: str) -> tuple[GemmWork, ...]: ...
    def can_run(self, layer: Layer | str, recipe: Recipe | None) -> tuple[bool, str]: ...
    def layer_time_ms(self, name: str, plan: LayerPlan, activations: str = "keep") -> float: ...
    def estimate(self, plans: Mapping[str, LayerPlan], *, activations: str = "keep") -> StepEstimate: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the model expects before anything is tried.

    Attributes:
        kind: ``stay`` (not worth it), ``adopt`` (one uniform choice already reaches the bound), or ``search``.
        bound_speedup: step time of the baseline over that of the fastest assignment, divergence ignored.
        low, high: the bound with the model's uncertainty.
        baseline: the choice it is compared with, and ``activations`` the autocast dtype it is judged under.
        best_uniform: the fastest single choice and its speed-up.
        reason: one sentence for a person.
        shares: share of the baseline's step by category; ``tunable`` is what the layers' GEMMs take.
        rows: one per tunable layer: shapes, time per choice, best choice, gain, and why (not).
    """

    kind: str
    bound_speedup: float
    low: float
    high: float
    baseline: str
    activations: str
    best_uniform: tuple[str, float]
    reason: str
    label: str
    step_ms: float
    shares: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def _allowed(model: Estimator, name: str, plan: LayerPlan) -> tuple[bool, str]:
    why = ""
    for gemm in GEMMS:
        ok, reason = model.can_run(name, plan.recipe(gemm))
        if not ok:
            return False, reason
        why = why or reason
    return True, why


def _row(
    model: Estimator, name: str, baseline: str, choices: Mapping[str, Mapping[str, LayerPlan]], activations: str
) -> tuple[dict[str, Any], str]:
    layer = model.report.layer(name)
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    for choice, plans in choices.items():
        plan = plans.get(name, _KEEP_PLAN)
        ok, reason = _allowed(model, name, plan)
        if ok:
            times[choice] = model.layer_time_ms(name, plan, activations)
        else:
            refused[choice] = reason
    base = times.get(baseline, model.layer_time_ms(name, _KEEP_PLAN, activations))
    best = min(times, key=lambda choice: times[choice], default=baseline)
    if times.get(best, base) >= base * 0.999:
        best = baseline
    gain = base - times.get(best, base)
    if gain > 0:
        reason = f"{best} saves {gain / base:.0%} of this layer"
    elif refused and len(times) <= 1:
        reason = next(iter(refused.values()))
    else:
        rivals = {choice: time for choice, time in times.items() if choice not in (baseline, KEEP)}
        nearest = min(rivals, key=lambda choice: rivals[choice], default="")
        extra = f": {nearest} takes {rivals[nearest] / base:.2f}x" if nearest else ""
        reason = f"below break-even{extra}, casts and launches cost more than the faster multiplication saves"
    works = model.works(name)
    row = {
        "name": name,
        "group": layer.group,
        "shapes": [[w.tokens, w.inp, w.out] for w in works],
        "flops": sum(w.flops for w in works),
        "times_ms": times,
        "refused": refused,
        "best": best,
        "baseline_ms": base,
        "gain_ms": gain,
        "gain": gain / base if base else 0.0,
        "reason": reason,
    }
    return row, best


def _speedup(base: StepEstimate, other: StepEstimate) -> float:
    return base.time_ms / other.time_ms if other.time_ms else 1.0


def _best_uniform(
    model: Estimator,
    choices: Mapping[str, Mapping[str, LayerPlan]],
    names: list[str],
    baseline: str,
    base: StepEstimate,
    activations: str,
) -> tuple[str, float]:
    """Return the fastest single choice and its speed-up; layers that cannot run it take the baseline."""
    best = (baseline, 1.0)
    fallback = choices.get(baseline, {})
    for choice, plans in choices.items():
        feasible = {}
        for name in names:
            plan = plans.get(name, _KEEP_PLAN)
            feasible[name] = plan if _allowed(model, name, plan)[0] else fallback.get(name, _KEEP_PLAN)
        gained = _speedup(base, model.estimate(feasible, activations=activations))
        if gained > best[1]:
            best = (choice, gained)
    return best


def judge(
    model: Estimator,
    plans_by_choice: Mapping[str, Mapping[str, LayerPlan]],
    *,
    activations: str | None = None,
    baseline: str | None = None,
    threshold: float = 0.03,
) -> Verdict:
    """Judge before any trial.

    Args:
        model: the cost model.
        plans_by_choice: choice name -> layer name -> plan; layers a choice does not name keep the script's dtype.
        activations: autocast dtype under which choices are compared; default bf16 on a GPU (which is what a policy
            has to beat there), keep on the CPU.
        baseline: the choice to beat; default ``bf16`` on a GPU where it is among the choices, else keep.
        threshold: a bound below 1 + threshold means stay.
    """
    cpu = model.target.is_cpu
    cast = activations or ("keep" if cpu else "bf16")
    choices = dict(plans_by_choice)
    first = baseline or ("bf16" if not cpu and "bf16" in choices else KEEP)
    choices.setdefault(KEEP, {})
    names = [layer.name for layer in model.report.tunable]
    rows, assignment = [], {}
    for name in names:
        row, best = _row(model, name, first, choices, cast)
        rows.append(row)
        assignment[name] = choices[best].get(name, _KEEP_PLAN)
    base = model.estimate(choices.get(first, {}), activations=cast)
    bound = model.estimate(assignment, activations=cast)
    uniform = _best_uniform(model, choices, names, first, base, cast)
    speedup = max(_speedup(base, bound), uniform[1])
    total = sum(base.breakdown.values()) or 1.0
    shares = {key: value / total for key, value in base.breakdown.items()}
    shares["tunable"] = sum(row["baseline_ms"] for row in rows) / total
    spread = (base.high_ms - base.low_ms) / (2 * base.time_ms) if base.time_ms else 0.0
    gain = speedup - 1.0
    kind, reason = _decide(model, rows, first, speedup, uniform, shares, threshold)
    return Verdict(
        kind=kind,
        bound_speedup=speedup,
        low=1.0 + gain * max(0.0, 1.0 - 2 * spread),
        high=1.0 + gain * (1.0 + 2 * spread) + spread * 0.1,
        baseline=first,
        activations=cast,
        best_uniform=uniform,
        reason=reason,
        label=model.label,
        step_ms=base.time_ms,
        shares=shares,
        rows=sorted(rows, key=lambda row: -row["baseline_ms"]),
    )


def _why_too_little(rows: list[dict[str, Any]], mixed: str, shares: Mapping[str, float]) -> str:
    """Return why all choices together gain next to nothing."""
    where = f"GEMMs take {shares['tunable']:.0%} of the step, launches {shares.get('launch', 0.0):.0%}"
    if all(row["gain_ms"] > 0 for row in rows):
        return f"every layer that may change gains, by {max(row['gain'] for row in rows):.0%} at most, but {where}"
    times = [time / row["baseline_ms"] for row in rows if row["baseline_ms"] for time in row["times_ms"].values()]
    if times and all(abs(ratio - 1.0) < SAME_PRECISION for ratio in times):
        return f"the script already runs its GEMMs in the precision that the choices would give; {where}"
    m, k, n = max((shape for row in rows for shape in row["shapes"]), key=math.prod, default=(0, 0, 0))
    return f"{mixed}: its GEMMs (the largest: M {m:.0f}, K {k:.0f}, N {n:.0f}) are too small to pay for casts; {where}"


def _decide(
    model: Estimator,
    rows: list[dict[str, Any]],
    baseline: str,
    speedup: float,
    uniform: tuple[str, float],
    shares: Mapping[str, float],
    threshold: float,
) -> tuple[str, str]:
    where = model.target.title
    losing = [row for row in rows if row["gain_ms"] <= 0]
    mixed = f"{len(losing)} of {len(rows)} layers are below break-even"
    if not rows:
        return "stay", "the model has no tunable layer"
    if speedup < 1.0 + threshold:
        refusals = {reason for row in rows for reason in row["refused"].values()}
        if all(len(row["times_ms"]) <= 2 for row in rows) and refusals:
            cause = sorted(refusals)[0]
        else:
            cause = _why_too_little(rows, mixed, shares)
        return "stay", f"at most {speedup:.2f}x over {baseline} on {where}: {cause}"
    if not losing and uniform[1] >= 1.0 + (speedup - 1.0) * 0.98:
        return "adopt", (
            f"{uniform[0]} everywhere reaches the bound of {speedup:.2f}x over {baseline} on {where}; "
            "a search can only make it safer, not faster"
        )
    return "search", (
        f"up to {speedup:.2f}x over {baseline} on {where}; the best single choice is {uniform[0]} with "
        f"{uniform[1]:.2f}x; {mixed}"
    )
