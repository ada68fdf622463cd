"""The answer: the policy that is emitted, with its evidence and guard, and the result that everyone reads."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from autoprec._version import __version__
from autoprec.policy import GUARD_METRICS, Guard, ModelInfo, Policy
from autoprec.support.redact import redact_arguments
from autoprec.tuning.decide.decision import Candidate
from autoprec.tuning.decide.pareto import front
from autoprec.tuning.decide.reasons import explanation, told
from autoprec.tuning.study.records import SearchResult, TrialRecord

if TYPE_CHECKING:
    from autoprec.cost import Verdict
    from autoprec.tuning.context import Context

__all__ = ["Answer", "emitted_policy", "search_result"]

#: What to fall back to in the long run, in order; short trials see early divergence only.
FALLBACK_QUANTISED = ("wgrad_bf16", "head_bf16", "all_bf16", "script")
KEPT_METRICS = (
    "throughput", "samples_per_s", "step_time_ms", "memory_bytes", "divergence", "noise_floor", "gradient_error",
    "speedup", "effective_speedup",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """What the search decided: ``adopt`` a record's policy, or ``stay``; ``chosen`` holds the finalist statistics."""

    verdict: str
    reason: str
    record: TrialRecord | None
    seeds: int
    chosen: Candidate | None = None
    interval: float = 0.0


def _plain(value: float) -> float:
    """Round to four significant digits: more would pretend to a precision nobody measured."""
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def final_metrics(context: Context, answer: Answer) -> dict[str, Any]:
    """Return the metrics of the chosen policy: finalist means where they exist, else the trial's own."""
    record, chosen = answer.record, answer.chosen
    if record is None:
        return reference_metrics(context) | {"name": "script as written"}
    out: dict[str, Any] = {k: record.metrics[k] for k in KEPT_METRICS if k in record.metrics}
    if chosen is not None and chosen.divergences:
        speedup = chosen.speedup
        out["divergence"], out["interval"] = statistics.fmean(chosen.divergences), answer.interval
        out["effective_speedup"] = out["effective_speedup"] * speedup / max(out["speedup"], 1e-9)
        out["speedup"] = speedup
        out["step_time_ms"] = context.references[0].step_ms / speedup
        out["throughput"] = 1000.0 / out["step_time_ms"]
        if context.references[0].samples:
            out["samples_per_s"] = context.references[0].samples * out["throughput"]
        if chosen.gradient_error is not None:
            out["gradient_error"] = chosen.gradient_error
    out |= {"name": record.name, "seeds": answer.seeds, "sources": dict(record.sources)}
    return out


def reference_metrics(context: Context) -> dict[str, Any]:
    """Return the metrics of the reference."""
    for record in context.store.records:
        if record.kind == "reference" and record.seed == 0:
            out: dict[str, Any] = {k: record.metrics[k] for k in KEPT_METRICS if k in record.metrics}
            return out | {"name": record.name, "sources": dict(record.sources)}
    return {}


def _evidence(context: Context, answer: Answer) -> dict[str, Any]:
    metrics = final_metrics(context, answer)
    out: dict[str, Any] = {
        "target": context.target.name,
        "source": context.source,
        "verdict": answer.verdict,
        "reason": answer.reason,
        "reference": context.options.reference,
        "seeds": answer.seeds,
        "steps": context.options.steps,
    }
    for name in (
        "speedup",
        "effective_speedup",
        "divergence",
        "interval",
        "noise_floor",
        "gradient_error",
        "memory_bytes",
    ):
        if name in metrics:
            out[name] = _plain(float(metrics[name]))
    if not context.measured:
        out["numerics"] = "emulated"
        out["cost"] = context.estimate(None).label
    if context.options.cost_scale:
        out["cost_scale"] = context.options.cost_scale
        out["cost_scale_note"] = "time and memory at scaled shapes; numerics from the model at hand"
    out |= {
        "trials": len(context.store.learned()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": context.host.device if context.host.device != "cpu" else f"cpu ({platform.machine()})",
        "versions": {"autoprec": __version__, "torch": metadata.version("torch"), "python": platform.python_version()},
        "limit": "short trials see early divergence only; watch the guard's metrics in the long run",
    }
    return out


def emitted_policy(context: Context, answer: Answer) -> Policy:
    """Return the policy to write: the chosen point, how it was found, and what to watch."""
    if answer.record is None:
        return _empty_policy(context, answer.reason)
    reasons = told(explanation(context, answer.record.params))
    policy = context.problem.policy(answer.record.params, evidence=_evidence(context, answer) | reasons)
    return policy.model_copy(update={"guard": guard_for(policy)})


def guard_for(policy: Policy) -> Guard:
    """Return what to watch and what to fall back to, as far as it applies to a policy."""
    quantised = any(recipe.scaled for recipe in policy.recipes.values())
    thresholds = {k: v for k, v in GUARD_METRICS.items() if quantised or not k.endswith("_share")}
    fallback = FALLBACK_QUANTISED if quantised else ("script",)
    return Guard(metrics=tuple(thresholds), thresholds=thresholds, fallback=fallback)


def _empty_policy(context: Context, reason: str) -> Policy:
    """Return the policy that changes nothing, saying why."""
    answer = Answer("stay", reason, None, seeds=0)
    evidence = _evidence(context, answer) if context.references else {"verdict": "stay", "reason": reason}
    return Policy(model=ModelInfo.model_validate(context.graph.model), evidence=evidence)


def _row(record: TrialRecord) -> dict[str, Any]:
    kept = {k: record.metrics[k] for k in KEPT_METRICS if k in record.metrics}
    return {"name": record.name, "number": record.number, "status": record.status, "reason": record.reason, **kept}


def search_result(context: Context, answer: Answer, verdict: Verdict, *, policy_path: str) -> SearchResult:
    """Assemble the result of a search."""
    seconds = context.elapsed()
    training = context.timings.get("training_s", 0.0)
    timings = dict(context.timings) | {"total_s": seconds}
    if context.workers == 1 and seconds:
        timings["overhead_share"] = max(0.0, 1.0 - training / seconds)
    return SearchResult(
        verdict=answer.verdict,
        reason=answer.reason,
        policy=policy_path,
        best=final_metrics(context, answer),
        reference=reference_metrics(context),
        presets=tuple(_row(r) for r in context.store.learned() if r.kind == "preset"),
        front=tuple(_row(r) for r in front(context.store.learned())),
        trials=context.store.count(),
        study=context.options.study,
        storage=context.store.url,
        mlflow={},
        seconds=seconds,
        target=context.target.name,
        script=" ".join(redact_arguments(context.options.command)),
        budget={
            "max_divergence": context.limits.divergence,
            "max_gradient_error": context.limits.gradient_error,
            "gradient_noise": context.table.noise if context.table is not None else None,
            "source": context.source,
            "bound_speedup": verdict.bound_speedup,
        },
        sensitivity=tuple(context.table.rows()) if context.table is not None else (),
        timings={key: round(value, 3) for key, value in timings.items()},
        notes=tuple(context.notes),
        explanation=explanation(context, answer.record.params) if answer.record is not None else {},
    )
