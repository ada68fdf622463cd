"""The verdict before any trial: the most that could be gained, where the time goes, and who is below break-even.

The bound takes, layer by layer, the fastest choice that the device runs, and ignores what it does to the loss: no
policy can be faster. It is told against two runs, the script as written and the best 16-bit run (bf16 autocast, or the
script where it is 16-bit already), since beating fp32 says little about a GPU on which everybody trains in bf16. It
needs one recorded step and no reference run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autoprec.cost.estimate import StepEstimate, ratio_bounds
from autoprec.cost.model import CostModel
from autoprec.cost.reasons import Rival, blocked_reason, layer_reason, model_reason, time_shares
from autoprec.cost.saved import KEPT
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import FITS, Target
from autoprec.precision.recipes import AS_WRITTEN, BUILTIN_RECIPES, GEMMS, KEEP
from autoprec.support.units import memory_text, speed_text

_BF16 = LayerPlan.uniform(BUILTIN_RECIPES["bf16"])

Choices = Mapping[str, Mapping[str, LayerPlan]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the model expects before anything is tried.

    Attributes:
        kind: ``stay`` (not worth it), ``adopt`` (one uniform choice already reaches the bound), or ``search``.
        bound_speedup: step time of the baseline over that of the fastest assignment, divergence ignored.
        low, high: the bound with the model's uncertainty.
        baseline: the choice it is compared with, and ``activations`` the autocast dtype it is judged under.
        best_uniform: the fastest single choice and its speed-up.
        bound_over_script: the bound over the script as written, whatever the baseline.
        bound_over_16bit: the bound over the best 16-bit run: bf16 autocast, or the script where it is 16-bit.
        execution: how the script must run for the bound: ``keep``, or ``compile`` where compiling is what gains.
        memory_bytes, device_bytes: modelled peak of the baseline's step (0: not known), and what one device has.
        shares: share of the baseline's step by category; ``tunable`` is what the layers take, casts included.
        rows: one per tunable layer: shapes, time per choice, best choice, gain, why (not), and what blocks quantising.
        written: what the run without a policy is called.
        cause: why nothing gains beyond the baseline; empty where something does.
        spread: of the baseline's modelled time, as a fraction.
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
    bound_over_script: float = 1.0
    bound_over_16bit: float = 1.0
    execution: str = KEEP
    memory_bytes: int = 0
    device_bytes: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    written: str = AS_WRITTEN
    cause: str = ""
    spread: float = 0.0

    @property
    def bound_text(self) -> str:
        """The bound with its range, over the baseline and, where that is another, over the script as written."""
        text = f"{speed_text(self.bound_speedup, self.low, self.high)} over {self.baseline_run}"
        if self.baseline == KEEP:
            return text
        script = speed_text(self.bound_over_script, *ratio_bounds(self.bound_over_script, self.spread))
        return f"{text}, {script} over {self.written}"

    @property
    def baseline_run(self) -> str:
        """What gains are over, in words: the script as written, or the baseline's name."""
        return self.written if self.baseline == KEEP else self.baseline

    @property
    def fits(self) -> bool:
        """Whether one device holds the baseline's step, with a margin (True where its memory is not known)."""
        return self.memory_bytes <= FITS * self.device_bytes

    def to_json(self) -> dict[str, Any]:
        """Return every field, and whether the step fits the device."""
        return asdict(self) | {"fits": self.fits}


def _allowed(model: CostModel, name: str, plan: LayerPlan) -> tuple[bool, str]:
    why = ""
    for gemm in GEMMS:
        ok, reason = model.can_run(name, plan.recipe(gemm))
        if not ok:
            return False, reason
        why = why or reason
    return True, why


def _row(model: CostModel, name: str, baseline: str, choices: Choices, activations: str) -> dict[str, Any]:
    layer, cpu = model.layer(name), model.target.is_cpu
    plain = choices.get(baseline, {}).get(name, KEPT)
    standing = model.layer_cost(name, plain if _allowed(model, name, plain)[0] else KEPT, activations)
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    rivals: list[Rival] = []
    for choice, plans in choices.items():
        plan = plans.get(name, KEPT)
        ok, why = _allowed(model, name, plan)
        cost = model.layer_cost(name, plan, activations) if ok else None
        if cost is None or not math.isfinite(cost.seconds):
            refused[choice] = f"{model.target.title} has no peak for it in the table" if ok else why
            continue
        times[choice] = cost.seconds * 1e3
        if choice not in (baseline, KEEP) and plan != plain:  # a choice not offered here names the baseline's plan
            rivals.append(Rival(choice, cost, bool(plan.scaled)))
    base = standing.seconds * 1e3
    best = min(times, key=lambda choice: times[choice], default=baseline)
    if times.get(best, base) >= base * 0.999:
        best = baseline
    gain = base - times.get(best, base)
    blocked = "" if cpu or any(rival.quantised for rival in rivals) else blocked_reason(model, name, refused)
    if gain > 0:
        reason = f"{best} saves {gain / base:.0%} of this layer"
    elif blocked:
        reason = f"stays in {baseline}: {blocked}"
    else:
        reason = layer_reason(standing, rivals, cpu=cpu)
    works = model.works(name)
    return {
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


def _fastest(rows: list[dict[str, Any]], choices: Choices) -> dict[str, LayerPlan]:
    """Return the plan of each layer under the choice that is best for it."""
    return {row["name"]: choices[row["best"]].get(row["name"], KEPT) for row in rows}


def _speedup(base: StepEstimate, other: StepEstimate) -> float:
    return base.time_ms / other.time_ms if other.time_ms else 1.0


def _best_uniform(
    model: CostModel, choices: Choices, names: list[str], baseline: str, base: StepEstimate, activations: str
) -> tuple[str, float]:
    """Return the fastest single choice and its speed-up; layers that cannot run it take the baseline."""
    best = (baseline, 1.0)
    fallback = choices.get(baseline, {})
    for choice, plans in choices.items():
        feasible = {}
        for name in names:
            plan = plans.get(name, KEPT)
            feasible[name] = plan if _allowed(model, name, plan)[0] else fallback.get(name, KEPT)
        gained = _speedup(base, model.estimate(feasible, activations=activations))
        if gained > best[1]:
            best = (choice, gained)
    return best


def _sixteen_bit_ms(model: CostModel, names: list[str], script_ms: float) -> float:
    """Return the step of the best 16-bit run: bf16 autocast, or the script where all its layers are 16-bit."""
    autocast = model.estimate(dict.fromkeys(names, _BF16), activations="bf16").time_ms
    already = all(model.layer(name).dtype in ("bf16", "fp16") for name in names)
    return min(autocast, script_ms) if already else autocast


def judge(
    model: CostModel,
    plans_by_choice: Choices,
    *,
    threshold: float = 0.03,
    script: str = "SCRIPT",
    written: str = AS_WRITTEN,
    executions: Sequence[str] = (),
) -> Verdict:
    """Judge before any trial, in every way of running the script that the space offers.

    Choices are compared under bf16 autocast on a GPU, which is what a policy has to beat there, and as the script runs
    on the CPU; the one to beat is ``bf16`` on a GPU where it is among them, else ``keep``.

    Args:
        plans_by_choice: choice name -> layer name -> plan; layers a choice does not name keep the script's dtype.
        threshold: a bound below 1 + threshold means stay; on a GPU only where the script is in 16 bits already.
        script: the script's command line, for the command that a reason proposes.
        written: what the run without a policy is called.
        executions: values of ``execution`` that a policy may set (``compile``, ``eager``): the bound is over them too,
            and is told against the baseline as the script runs it.
    """
    found = _judge(model, plans_by_choice, threshold, script, written)
    for execution in executions:
        other = model.executed(execution)
        if other is not model and not model.target.is_cpu:
            rival = _judge(other, plans_by_choice, threshold, script, written)
            found = _executed(model, found, rival, execution, threshold)
    return found


def _executed(model: CostModel, found: Verdict, rival: Verdict, execution: str, threshold: float) -> Verdict:
    """Return the verdict under another execution, against the baseline of ``found``, where that is the faster one."""
    fastest, before = rival.step_ms / rival.bound_speedup, found.step_ms / found.bound_speedup
    bound = found.step_ms / fastest if fastest else 1.0
    if not rival.rows or bound < 1.0 + threshold or fastest >= before:
        return found
    alone = found.step_ms / rival.step_ms
    way, before_it, doing = "compiled", "not compiled", "compiling"
    if execution != "compile":
        way, before_it, doing = before_it, way, "not compiling"
    gains = (
        f"{doing} alone takes a step of {found.baseline_run} from {found.step_ms:.3g} to {rival.step_ms:.3g} ms "
        f"({alone:.2f}x) on {model.target.title}"
    )
    kind = "search"
    if rival.kind == "stay":
        kind, reason = "adopt", f"{gains}, and other precisions add next to nothing: {rival.reason}"
    else:
        about = speed_text(bound, rival.low * alone, rival.high * alone)
        reason = f"about {about} over {found.baseline_run}, {before_it}: {gains}; {way}, {rival.reason}"
    return replace(
        rival,
        kind=kind,
        bound_speedup=bound,
        low=rival.low * alone,
        high=rival.high * alone,
        best_uniform=(rival.best_uniform[0], rival.best_uniform[1] * alone),
        reason=reason,
        step_ms=found.step_ms,
        bound_over_script=found.bound_over_script * before / fastest,
        bound_over_16bit=found.bound_over_16bit * before / fastest,
        execution=execution,
        shares=found.shares,
    )


def _judge(model: CostModel, plans_by_choice: Choices, threshold: float, script: str, written: str) -> Verdict:
    cpu = model.target.is_cpu
    cast = "keep" if cpu else "bf16"
    choices = dict(plans_by_choice)
    first = "bf16" if not cpu and "bf16" in choices else KEEP
    choices.setdefault(KEEP, {})
    names = [layer.name for layer in model.report.tunable]
    rows = [_row(model, name, first, choices, cast) for name in names]
    base = model.estimate(choices.get(first, {}), activations=cast)
    bound = model.estimate(_fastest(rows, choices), activations=cast)
    uniform = _best_uniform(model, choices, names, first, base, cast)
    speedup = max(_speedup(base, bound), uniform[1])
    fastest_ms = base.time_ms / speedup
    script_ms = model.estimate({}, activations="keep").time_ms
    # a device without a peak for the script's dtype cannot run it as written: then only the baseline is compared
    over_script = script_ms / fastest_ms if fastest_ms and math.isfinite(script_ms) else speedup
    total = sum(base.breakdown.values()) or 1.0
    shares = {key: value / total for key, value in base.breakdown.items()}
    shares["tunable"] = sum(row["baseline_ms"] for row in rows) / total
    low, high = ratio_bounds(speedup, base.spread)
    found = Verdict(
        kind="",
        bound_speedup=speedup,
        low=low,
        high=high,
        baseline=first,
        activations=cast,
        best_uniform=uniform,
        reason="",
        label=model.label,
        step_ms=base.time_ms,
        bound_over_script=over_script,
        bound_over_16bit=_sixteen_bit_ms(model, names, script_ms) / fastest_ms if fastest_ms else 1.0,
        memory_bytes=base.memory_bytes,
        device_bytes=model.target.memory_bytes,
        shares=shares,
        rows=rows,
        written=written,
        spread=base.spread,
    )
    kind, reason, cause = _decide(model, found, threshold, script)
    if kind != "stay" and over_script < 1.0 + threshold and first != KEEP:  # a gain over a baseline that loses
        # of choices that leave the script's activations as they are (TF32)
        plans = _fastest([_row(model, name, KEEP, choices, KEEP) for name in names], choices)
        over_script = max(over_script, script_ms / model.estimate(plans, activations=KEEP).time_ms)
        if over_script < 1.0 + threshold:
            most = f"at most {over_script:.2f}x over {written} on {model.target.title}"
            kind, reason = "stay", f"{most}, which is faster than {first} here: {time_shares(shares)}"
    return replace(
        found,
        kind=kind,
        reason=reason + too_large(base.memory_bytes, model.target, first),
        cause=cause,
        bound_over_script=over_script,
        rows=sorted(rows, key=lambda row: -row["baseline_ms"]),
    )


def too_large(memory_bytes: float, target: Target, run: str) -> str:
    """Return what to add to a reason when one device cannot hold the step (modelled) of ``run``; empty when it can.

    Args:
        memory_bytes: modelled, of the step.
        target: the device.
        run: what needs them, in words.
    """
    if memory_bytes <= target.usable_bytes:
        return ""
    needs, has, usable = map(memory_text, (memory_bytes, target.memory_bytes, target.usable_bytes))
    return (
        f". It does not fit: the step needs {needs} (modelled, as {run}) and one {target.title} has {has} "
        f"({usable} less a margin); shard, checkpoint, or cut the batch"
    )


def _decide(model: CostModel, found: Verdict, threshold: float, script: str) -> tuple[str, str, str]:
    """Return the verdict, its reason, and why nothing gains beyond the baseline (empty where something does)."""
    rows, speedup, uniform, run = found.rows, found.bound_speedup, found.best_uniform, found.baseline_run
    where, cpu = model.target.title, model.target.is_cpu
    if not rows:
        return "stay", "the model has no tunable layer", "the model has no tunable layer"
    if speedup < 1.0 + threshold:
        if all(row["blocked"] for row in rows):
            cause = str(max(rows, key=lambda row: row["baseline_ms"])["blocked"])
        else:
            cause = model_reason(rows, found.baseline, found.shares, cpu=cpu, script=script, written=found.written)
        if found.baseline != KEEP and found.bound_over_script >= 1.0 + threshold:
            gain = f"{found.baseline} is about {found.bound_over_script:.2f}x over {found.written} on {where}"
            return "adopt", f"{gain}, and no other choice gains more than {speedup:.2f}x over it: {cause}", cause
        return "stay", f"at most {speedup:.2f}x over {run} on {where}: {cause}", cause
    losing = [row for row in rows if row["gain_ms"] <= 0]
    if not losing and uniform[1] >= 1.0 + (speedup - 1.0) * 0.98:
        reached = f"{uniform[0]} wherever it is offered reaches the bound of {speedup:.2f}x over {run} on {where}"
        return "adopt", f"{reached}; a search can only make it safer, not faster", ""
    blocked = sum(bool(row["blocked"]) for row in losing)
    mixed = f"{len(losing) - blocked} of {len(rows)} layers are below break-even"
    mixed += f", {blocked} without a quantised choice" if blocked else ""
    best = f"the best single choice is {uniform[0]} with {uniform[1]:.2f}x"
    about = speed_text(speedup, found.low, found.high)
    return "search", f"about {about} over {run} on {where}, by layers alone; {best}; {mixed}", ""
