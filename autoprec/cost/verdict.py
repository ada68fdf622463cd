"""The verdict before any trial: the most that could be gained, where the time goes, and who is below break-even."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from autoprec.cost.estimate import StepEstimate
from autoprec.cost.scale import GemmWork
from autoprec.graph.report import GraphReport, Layer
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import Target
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, KEEP, Recipe

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
        rows: one per tunable layer: shapes, time per choice, best choice, gain, why (not), and what blocks quantising.
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
            time = model.layer_time_ms(name, plan, activations)
            if math.isfinite(time):
                times[choice] = time
            else:
                refused[choice] = f"{model.target.title} has no peak for it in the table"
        else:
            refused[choice] = reason
    base = times.get(baseline, model.layer_time_ms(name, _KEEP_PLAN, activations))
    best = min(times, key=lambda choice: times[choice], default=baseline)
    if times.get(best, base) >= base * 0.999:
        best = baseline
    gain = base - times.get(best, base)
    # a choice that this layer is not offered names the baseline's plan for it
    plain = choices.get(baseline, {}).get(name, _KEEP_PLAN)
    rivals = {c: choices[c].get(name, _KEEP_PLAN) for c in times if c not in (baseline, KEEP)}
    rivals = {choice: plan for choice, plan in rivals.items() if plan != plain}
    quantised = {choice: times[choice] for choice, plan in rivals.items() if _is_quantised(plan)}
    blocked = "" if quantised or model.target.is_cpu else _blocked(model, name, refused)
    if gain > 0:
        reason = f"{best} saves {gain / base:.0%} of this layer"
    elif blocked:
        reason = f"stays in {baseline}: {blocked}"
    else:
        reason = _no_gain(base, quantised, {choice: times[choice] for choice in rivals})
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
        "blocked": blocked,
    }
    return row, best


def _is_quantised(plan: LayerPlan) -> bool:
    return any(recipe is not None and recipe.scaled for recipe in map(plan.recipe, GEMMS))


def _blocked(model: Estimator, name: str, refused: Mapping[str, str]) -> str:
    """Return why a layer has no quantised choice: the device, its sizes, or the space (which drops what cannot run)."""
    if refused:
        return next(iter(refused.values()))
    ok, reason = model.can_run(name, BUILTIN_RECIPES["fp8_tensorwise"])
    return "the search space offers it no quantised choice" if ok else reason


def _no_gain(base: float, quantised: Mapping[str, float], rivals: Mapping[str, float]) -> str:
    """Return why no choice gains, by the one that comes nearest."""
    nearest = min(quantised, key=lambda choice: quantised[choice], default="")
    if nearest:
        takes = f"{nearest} takes {quantised[nearest] / base:.2f}x"
        return f"below break-even: {takes}, casts and launches cost more than the faster multiplication saves"
    nearest = min(rivals, key=lambda choice: rivals[choice], default="")
    if not nearest or abs(rivals[nearest] / base - 1.0) < SAME_PRECISION:
        return "runs in the precision that the choices would give already"
    return f"no choice is faster: {nearest} takes {rivals[nearest] / base:.2f}x"


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
    asked = [row for row in rows if not row.get("blocked")] or rows  # what has no quantised choice pays for no cast
    m, k, n = max((shape for row in asked for shape in row["shapes"]), key=math.prod, default=(0, 0, 0))
    return f"{mixed}: the GEMMs (the largest: M {m:.0f}, K {k:.0f}, N {n:.0f}) are too small to pay for casts; {where}"


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
    blocked = [row for row in losing if row["blocked"]]
    mixed = f"{len(losing) - len(blocked)} of {len(rows)} layers are below break-even"
    mixed += f", {len(blocked)} without a quantised choice" if blocked else ""
    if not rows:
        return "stay", "the model has no tunable layer"
    if speedup < 1.0 + threshold:
        if all(row["blocked"] for row in rows):
            cause = str(max(rows, key=lambda row: row["baseline_ms"])["blocked"])
        else:
            cause = _why_too_little(rows, mixed, shares)
        return "stay", f"at most {speedup:.2f}x over {baseline} on {where}: {cause}"
    if not losing and uniform[1] >= 1.0 + (speedup - 1.0) * 0.98:
        return "adopt", (
            f"{uniform[0]} wherever it is offered reaches the bound of {speedup:.2f}x over {baseline} on {where}; "
            "a search can only make it safer, not faster"
        )
    return "search", (
        f"up to {speedup:.2f}x over {baseline} on {where}; the best single choice is {uniform[0]} with "
        f"{uniform[1]:.2f}x; {mixed}"
    )
