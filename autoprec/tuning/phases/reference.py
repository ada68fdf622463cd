"""The reference of each paired seed: the run everything is compared with, and the noise floor around it."""

from __future__ import annotations

import time

from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.trial.protocol import TrialResult
from autoprec.tuning.context import Context
from autoprec.tuning.decide.metrics import Reference, divergence, step_time
from autoprec.tuning.options import fewer_steps
from autoprec.tuning.study.records import TrialRecord

__all__ = ["measure_reference", "reference_of"]


def measure_reference(context: Context) -> Reference:
    """Run the reference twice and once benignly perturbed; store it as seed 0's reference.

    The second run tells whether the script is deterministic; the perturbation (every weight rounded once to
    bfloat16) tells how large a loss gap means nothing.

    Raises:
        ScriptError: the reference itself fails in the script's own code.
        NothingAcceptableError: the script has fewer steps than asked for, or its loss is not finite.
    """
    began = time.monotonic()
    first = _run(context)
    context.timings["reference_run_s"] = time.monotonic() - began
    second = _run(context)
    noisy = _run(context, perturb="bf16")
    deterministic = first.losses == second.losses
    own = 0.0 if deterministic else divergence(second.losses, first.losses)
    floor = max(own, divergence(noisy.losses, first.losses))
    if not deterministic:
        context.note(
            f"the script is not deterministic: two identical runs differ by {own:.3%}; that is part of the noise floor"
        )
    reference = reference_of(context, first, second).with_noise(floor, deterministic)
    context.references[0] = reference
    _store(context, reference, first, noisy)
    if floor > context.limits.divergence:
        context.note(
            f"the noise floor ({floor:.3%}) is above the divergence budget ({context.limits.divergence:.3%}): "
            "a gap below the floor cannot be told from chance; more --steps lower it"
        )
    return reference


def reference_of(context: Context, *results: TrialResult) -> Reference:
    """Return a reference from one or more identical runs (the faster clock reading counts)."""
    estimate = None if context.measured else context.reference_estimate()
    measured = min(step_time(result.step_ms, result.warmup) for result in results)
    first = results[0]
    return Reference(
        losses=first.losses,
        step_ms=measured if estimate is None else estimate.time_ms,
        memory_bytes=first.memory_bytes if estimate is None else estimate.memory_bytes,
        samples=first.samples,
        warmup=first.warmup,
    )


def _run(context: Context, perturb: str = "") -> TrialResult:
    result = context.run(context.spec(context.reference_policy(), perturb=perturb))
    if result.ok:
        return result
    where = context.pool.info(0).model.get("class", "the script")
    if result.status == "too_short":
        steps = context.options.steps + context.options.warmup
        raise NothingAcceptableError(
            f"the script ended after {len(result.losses)} of {steps} training steps",
            where=str(where),
            fix=fewer_steps(len(result.losses), context.options.warmup),
        )
    if result.status == "diverged":
        raise NothingAcceptableError(
            f"the script's own loss is not finite without any change by AutoPrec: {result.reason}",
            where=str(where),
            fix="make the script train as it is first",
        )
    raise ScriptError(
        f"the script failed while training as written: {result.status}: {result.reason}\n{result.tail}".rstrip(),
        where=str(where),
        fix="this run was not changed by AutoPrec; make the script train as it is first",
    )


def _store(context: Context, reference: Reference, first: TrialResult, noisy: TrialResult) -> None:
    known = {(record.kind, record.seed) for record in context.store.records}
    metrics = {
        "step_time_ms": reference.step_ms,
        "throughput": 1000.0 / reference.step_ms,
        "memory_bytes": float(reference.memory_bytes),
        "speedup": 1.0,
        "effective_speedup": 1.0,
        "gradient_error": 0.0,
        "noise_floor": reference.noise_floor,
    }
    if reference.samples:
        metrics["samples_per_s"] = reference.samples * 1000.0 / reference.step_ms
    sources = dict.fromkeys(metrics, context.source) | {"noise_floor": "measured", "divergence": "measured"}
    rows = (
        (
            "reference",
            "script as written" if context.options.reference == "script" else context.options.reference,
            first,
        ),
        ("noise", "weights rounded once to bf16", noisy),
    )
    for kind, name, result in rows:
        if (kind, 0) not in known:
            record = TrialRecord(
                number=context.store.next_number(),
                kind=kind,
                name=name,
                params={},
                policy={},
                status="ok",
                metrics=metrics | {"divergence": divergence(result.losses, reference.losses)},
                sources=sources,
                losses=result.losses,
                reference_losses=reference.losses,
                started=time.time() - result.wall_s,
                seconds=result.wall_s,
            )
            context.store.add(record)
            context.listener.trial(record, 0, context.options.trials, None, 0.0)
