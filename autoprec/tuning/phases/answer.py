"""The answer: the policy that is emitted, with its evidence and guard, and the result that every outlet prints."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autoprec.cost.verdict import too_large
from autoprec.policy import GUARD_METRICS, Guard, ModelInfo, Policy, save_policy
from autoprec.policy.known_layers import known_layers
from autoprec.precision.hardware import cpu_instructions
from autoprec.precision.recipes import KEEP
from autoprec.support.plain import Document
from autoprec.support.redact import redact_arguments
from autoprec.support.units import counted
from autoprec.tuning.decide.decision import Decision
from autoprec.tuning.decide.explain import as_evidence, explanation
from autoprec.tuning.decide.pareto import front
from autoprec.tuning.decide.sampler.expectation import Expectation
from autoprec.tuning.decide.sampler.shares import decision_shares
from autoprec.tuning.decide.sentences import GAINS, Reason
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.libraries.choice import run_by
from autoprec.tuning.options import versions
from autoprec.tuning.paired import PairedRunner
from autoprec.tuning.phases.measuring import with_gain
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import (
    fastest_plain,
    sixteen_bit_speedup,
    written_in,
)
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import METRICS, MODELLED, MOST_NOISE, Metric, Run, metrics_of, pooled, reference_name

#: Metrics that follow from others of a policy's evidence.
_NOT_EVIDENCE = ("throughput", "samples_per_s", "step_time_ms")
#: What to fall back to in the long run, in order; short trials see early divergence only.
FALLBACK_QUANTISED = ("wgrad_bf16", "head_bf16", "all_bf16", "script")


def settled(decision: Decision, state: SearchState) -> Decision:
    """Return the decision as far as the measurements carry it.

    Of a search that was cut short the answer says so; it is never "stay", for something faster may have been missed.
    """
    if not state.cut_short:
        return decision
    cut = Reason("cut_short", {"what": list(state.cut_short)})
    if decision.verdict != "adopt":
        return replace(decision, verdict="undecided", reasons=(*decision.reasons, cut), explanation={})
    adopted, *others = decision.reasons
    so_far = replace(adopted, data=adopted.data | {"so_far": True})
    return replace(decision, reasons=(so_far, *others, cut))


def named_over(decision: Decision, reference: str) -> Decision:
    """Return the decision with gains that name what they are over: ``script``, ``fp32`` or ``bf16``."""
    if reference == "script":
        return decision
    named = [
        replace(one, data=one.data | {"reference": reference}) if one.code in GAINS else one for one in decision.reasons
    ]
    return replace(decision, reasons=tuple(named))


def with_size(decision: Decision, setup: Setup) -> Decision:
    """Return the decision with the fact, where it is one, that a device cannot hold the step of its policy."""
    if decision.run is None or setup.measured:
        return decision
    text = too_large(decision.run.get("memory_bytes") or 0.0, setup.target, "this policy")
    return decision.with_reasons(Reason("does_not_fit", {"text": text})) if text else decision


def _plain(value: float) -> float:
    """Round to four significant digits: more would pretend to a precision that was not measured."""
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def figures_of_evidence(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a row that a policy's evidence has, four digits each."""
    names = [name for name in METRICS if name not in _NOT_EVIDENCE]
    names.insert(1 + names.index("divergence"), "interval")
    out = {name: _plain(float(row[name])) for name in (*names, "gain_over_preset") if name in row}
    for name, bounds in row.get("intervals", {}).items():
        if name.startswith("speedup") and None not in bounds:
            out |= {f"{name}_{end}": _plain(float(bound)) for end, bound in zip(("low", "high"), bounds, strict=True)}
    return out


def _without_unknown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without a gradient error that is infinite: its probes failed, so that it is not known."""
    return {name: value for name, value in row.items() if name != "gradient_error" or math.isfinite(value)}


def _figures(setup: Setup, state: SearchState, run: Run, tried: Mapping[str, Run]) -> Run:
    """Return a run with the figures of all runs of its policy, its gain over 16 bit, and its measured gradient error.

    Args:
        tried: :func:`~autoprec.tuning.study.run.pooled` runs.
    """
    found, error = with_gain(setup, state, tried.get(run.name, run)), state.measured_errors.get(run.name)
    return found if error is None else found.with_metrics({"gradient_error": Metric(error)})


def final_metrics(setup: Setup, state: SearchState, decision: Decision) -> dict[str, Any]:
    """Return the metrics of the chosen policy, of all its runs; of the reference where none is.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        decision: the answer.
    """
    if decision.run is None:
        return reference_metrics(setup, state)
    out = _figures(setup, state, decision.run, pooled(state.store.records)).to_row() | {"seeds": decision.seeds}
    if decision.chosen is not None:
        out["interval"] = decision.interval
    for over in (reason.data for reason in decision.reasons if reason.code == "over_preset"):
        out |= {"gain_over_preset": over["gain"], "best_preset": over["name"]}
    return _without_unknown(out)


def reference_metrics(setup: Setup, state: SearchState) -> dict[str, Any]:
    """Return the metrics of the reference; modelled ones where the answer needed no run of it."""
    name = reference_name(setup.options.reference)
    step = setup.steps.of_reference()
    figures = {"step_time_ms": step.time_ms, "throughput": 1000.0 / step.time_ms, "speedup": 1.0}
    figures |= {"memory_bytes": float(step.memory_bytes)}
    modelled = Run(0, "reference", name, {}, {}, "ok", metrics=metrics_of(figures, MODELLED))
    measured = [run for run in state.store.records if run.kind == "reference" and run.seed == 0]
    return with_gain(setup, state, measured[-1] if measured else modelled).to_row()


def _source(metrics: Mapping[str, Any], setup: Setup) -> str:
    """Say where times are from: modelled ones stand for those of a machine that is timed, but was not needed."""
    return str(metrics["sources"].get("step_time_ms", setup.source))


def _evidence(setup: Setup, state: SearchState, decision: Decision) -> Document:
    metrics = final_metrics(setup, state, decision)
    variant = state.variant(decision.run)
    out: Document = {
        "target": setup.target.name,
        "source": _source(metrics, setup),
        "verdict": decision.verdict,
        "reason": decision.reason,
        **({"caveat": str(decision.chosen.caveat)} if decision.chosen is not None and decision.chosen.caveat else {}),
        **_under(variant),
        "reference": setup.options.reference,
        "seeds": decision.seeds,
        "steps": setup.options.steps,
        **setup.options.compared,
        "max_gradient_error": setup.options.max_gradient_error,  # in units of the noise
    }
    if state.gradient_noise:
        out["gradient_noise"] = _plain(state.gradient_noise)
    out |= figures_of_evidence(metrics)
    if state.stopped:
        out["stopped"] = state.stopped
    if state.cut_short:
        out["cut_short"] = "; ".join(state.cut_short)
    if setup.measured and setup.host.device == "cpu":
        out["instructions"] = cpu_instructions()
    if not setup.measured:
        out |= {"numerics": "emulated"} | _times(setup, MODELLED)
    if setup.options.cost_scale:
        out["cost_scale_note"] = "time and memory at scaled shapes; numerics from the model at hand"
    out |= {
        "trials": len(state.store.learned()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": _device(setup),
        "versions": versions() | {"python": platform.python_version()},
        "limit": "short trials see early divergence only; watch the guard's metrics in the long run",
    }
    return out


def _device(setup: Setup) -> str:
    """Return the device that runs were on; of a CPU also its kind, and the threads of what was timed."""
    if setup.host.device != "cpu":
        return setup.host.device
    return f"cpu ({platform.machine()}, {counted(setup.threads, 'thread')})"


def _under(variant: Mapping[str, Any]) -> dict[str, str]:
    """Return what a policy's evidence says of its variant, as it is typed; nothing for the script as given."""
    return {"variant": f"{variant['name']}: {variant['arguments']}"} if variant else {}


def emitted_policy(setup: Setup, state: SearchState, decision: Decision) -> Policy:
    """Return the policy to write: the chosen point (or one that changes nothing), how it was found, what to watch.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        decision: the answer.
    """
    evidence = _evidence(setup, state, decision)
    seen = known_layers(layer.name for layer in setup.graph.layers)
    model = ModelInfo.model_validate({**setup.graph.model, "layers": seen})
    if decision.run is None:
        return Policy(model=model, evidence=evidence)
    reasons = as_evidence(decision.explanation)
    policy = setup.problem.policy(decision.run.params, evidence=evidence | reasons)
    policy = Policy.model_validate(run_by(policy.to_dict(), state.backend)) if state.backend else policy
    return policy.model_copy(update={"guard": guard_for(policy), "model": model})


def guard_for(policy: Policy) -> Guard:
    """Return what to watch and what to fall back to, as far as it applies to a policy."""
    quantised = any(recipe.scaled for recipe in policy.recipes.values())
    fallback = FALLBACK_QUANTISED if quantised else ("script",)
    return Guard(metrics=tuple(GUARD_METRICS), thresholds=dict(GUARD_METRICS), fallback=fallback)


def explained(
    setup: Setup, state: SearchState, decision: Decision, table: SensitivityTable, expectation: Expectation
) -> Decision:
    """Return the decision with why each kind of layer got its precision, or keeps its own, and what each choice did.

    Args:
        table: gradient errors.
        expectation: the models, fitted to the runs.
    """
    problem = setup.problem
    params = problem.params_of(problem.baseline) if decision.run is None else decision.run.params
    whole_ms = _measured_saving(setup, state, decision) if setup.measured and decision.run is not None else None
    found = explanation(problem, expectation.time.mean()[0], table, params, whole_ms)
    if whole_ms is None:
        whole_ms = setup.steps.of(problem.params_of(problem.baseline)).time_ms - setup.steps.of(params).time_ms
    return replace(decision, explanation=found | {"decisions": decision_shares(problem, expectation, params, whole_ms)})


def _measured_saving(setup: Setup, state: SearchState, decision: Decision) -> float:
    """Return the milliseconds of a step that the chosen policy saves against the baseline of the reasons."""
    script_ms = float(reference_metrics(setup, state)["step_time_ms"])
    plain = sixteen_bit_speedup(setup, state.store.records) if setup.problem.baseline != KEEP else None
    return script_ms / (plain or 1.0) - float(final_metrics(setup, state, decision)["step_time_ms"])


def _row(record: Run, decision: Decision, errors: Collection[str]) -> dict[str, Any]:
    """Return a trial as a row of the result; ``reason`` says why it failed, was rejected, or was not taken.

    ``errors`` names policies whose gradient error was measured as a whole; that of others is predicted.
    """
    said = (("rejected", decision.rejected), ("not taken", decision.not_taken))
    why = record.reason or next((f"{what}: {found[record.name]}" for what, found in said if record.name in found), "")
    kept = _without_unknown(record.to_row()) | {"seeds": int(record.get("seeds") or record.ok)}
    if record.ok and "gradient_error" in kept:
        kept["gradient_error_source"] = "measured" if record.name in errors else "predicted"
    return kept | {"number": record.number, "status": record.status, "reason": why}


def _refused(state: SearchState) -> Iterator[Document]:
    """Yield a row for each policy that people write by hand and that cannot be run here."""
    for name, why in state.refused.items():
        yield {"name": name, "kind": "preset", "status": "refused", "reason": why, "seeds": 0}


def search_result(
    setup: Setup,
    state: SearchState,
    decision: Decision,
    runner: PairedRunner,
    *,
    bound_speedup: float,
    policy_path: str,
) -> SearchResult:
    """Assemble the result of a search.

    Args:
        runner: what ran its trials; where that was one after the other, what was not training is overhead.
        bound_speedup: the most the cost model expected of any policy.
    """
    seconds, work = state.elapsed(), runner.work
    timings = state.seconds.to_json() | work.to_json() | {"total_s": seconds, "sessions": float(state.store.sessions)}
    if state.table is not None and state.seconds.sensitivity_s is not None:
        timings["sensitivity_passes"] = float(state.table.passes)
    if decision.timing_noise:  # which says nothing of whole models where trials compiled a block
        timings["timing_noise"] = decision.timing_noise if state.whole is None else MOST_NOISE
    if runner.workers == 1 and seconds:
        timings["overhead_share"] = max(0.0, 1.0 - work.training_s / seconds)
    tried = pooled(state.store.records)
    known = [_figures(setup, state, record, tried) for record in state.store.learned()]
    row = partial(_row, decision=decision, errors=state.measured_errors)
    return SearchResult(
        verdict=decision.verdict,
        reason=decision.reason,
        policy=policy_path,
        best=final_metrics(setup, state, decision),
        reference=reference_metrics(setup, state),
        presets=tuple(row(r) for r in known if r.kind == "preset") + tuple(_refused(state)),
        front=tuple(row(r) for r in front(known)),
        baseline=_baseline(setup, known),
        trials=state.store.count(),
        study_name=setup.options.study,
        storage=state.store.url,
        mlflow={},
        seconds=state.store.seconds(),
        target=setup.target.name,
        script=" ".join(redact_arguments(setup.options.command)),
        budget={
            **setup.options.compared,
            "max_gradient_error": setup.options.max_gradient_error,
            "gradient_noise": state.gradient_noise,
            "gradient_limit": state.gradient_limit(),
            "bound_speedup": bound_speedup,
        }
        | _times(setup, _source(reference_metrics(setup, state), setup)),
        sensitivity=tuple(state.table.rows()) if state.table is not None else (),
        timings={key: round(value, 3) for key, value in timings.items()},
        notes=tuple(state.notes),
        cut_short="; ".join(state.cut_short),
        stopped=state.stopped,
        resume=setup.options.with_budget_for(state.needed_s).resume_command(stored=True) if state.cut_short else "",
        explanation=decision.explanation,
        variants=tuple(row | {"adopted": row == state.variant(decision.run)} for row in state.variants),
        rejected={name: str(why) for name, why in decision.rejected.items()},
        not_taken={name: str(why) for name, why in decision.not_taken.items()},
        reasons=tuple(reason.to_json() for reason in decision.reasons),
    )


def _front_policy(setup: Setup, state: SearchState, record: Run, point: Mapping[str, Any]) -> Policy:
    """Return the policy of one point of a result's front, with its figures (four digits) as evidence."""
    seeds = int(point["seeds"])
    evidence: Document = {
        **record.policy.get("evidence", {}),
        **_under(state.variant(record)),
        "target": setup.target.name,
        "source": setup.source,
        "trial": point["name"],
        "reference": setup.options.reference,
        "seeds": seeds,
        "steps": setup.options.steps,
        **(setup.options.compared if setup.options.metric else {}),
        **figures_of_evidence(point),
        "limit": "one short trial, not measured again" if seeds == 1 else "short trials see early divergence only",
    }
    return Policy.model_validate({**record.policy, "evidence": evidence})


def save_front(setup: Setup, state: SearchState, result: SearchResult) -> None:
    """Write ``front/00.yaml``, ``01.yaml``, ... into the study's folder, in the order of the result's front.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        result: the result whose front is written.
    """
    records = {record.name: record for record in state.store.learned()}
    for index, point in enumerate(result.front):
        policy = _front_policy(setup, state, records[str(point["name"])], point)
        save_policy(policy, setup.study_dir / "front" / f"{index:02d}.yaml")


def _times(setup: Setup, source: str) -> Document:
    """Return what the times of a result are: their source, the script's own dtype, and what modelled ones rest on."""
    out: Document = {"source": source, "written": written_in(setup.graph)}
    if source == MODELLED:
        as_compiled = setup.cost.compiled and not setup.host.compiled and not setup.target.is_cpu
        out |= {"cost": setup.cost.label, "cost_scale": setup.options.cost_scale, "as_compiled": as_compiled}
    return {name: value for name, value in out.items() if value}


def _baseline(setup: Setup, known: Sequence[Run]) -> str:
    """Return the name of the 16-bit run that gains are given over; empty on a CPU, and where none was measured."""
    plain = None if setup.target.is_cpu else fastest_plain(known)
    return plain.name if plain is not None else ""
