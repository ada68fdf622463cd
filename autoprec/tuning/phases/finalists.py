"""The finalists: the best few policies again, over paired seeds and with an annealed learning rate.

One short trial cannot tell 0.25 % from chance (one paired seed of FP8 has a standard deviation near 0.15 %), and the
best of many noisy trials is biased by having been picked: everything that decides is measured again here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.tuning.context import Context
from autoprec.tuning.decide.decision import Candidate, choose
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.decide.shortlist import faster_ones, shortlist, smoothed_divergence
from autoprec.tuning.phases.answer import Answer
from autoprec.tuning.phases.reference import reference_of
from autoprec.tuning.phases.sensitivity import measure_errors
from autoprec.tuning.phases.trials import measured
from autoprec.tuning.study.records import TrialRecord

__all__ = ["pick_finalists", "run_finals"]

#: Bounds of the relative timing noise of a median over the seeds.
LEAST_NOISE, MOST_NOISE = 0.01, 0.10
#: A mean below this share of the budget is worth more seeds; so many finalists get them.
UNCERTAIN_SHARE, MOST_UNCERTAIN = 0.7, 3
#: Shares of the divergence budget that safer finalists must keep to, round after round.
SAFER_SHARES = (0.35, 0.15)
#: Step times closer than this are a tie (run-to-run noise of a shared machine); modelled ones have no noise.
TIE, MODELLED_TIE = 0.03, 0.01


def pick_finalists(context: Context) -> list[TrialRecord]:
    """Return the records worth measuring again.

    The best few by the objective, the best preset, and the safest of the fast ones; and, because the fastest of many
    noisy trials is within the budget partly by luck, those whose divergence the model of all trials believes.
    """
    fit = sorted((r for r in context.store.learned() if context.acceptable(r)), key=context.rank)
    fit = [record for record in fit if not context.problem.is_script(record.params)]
    if not fit:
        return []
    count = context.options.finalists
    believed: list[TrialRecord] = []
    if context.table is not None and len(fit) > count:
        floor = context.references[0].noise_floor
        budget = context.limits.divergence
        believed = shortlist(
            context.problem, context.table, fit, max_divergence=budget, noise_floor=floor, count=max(1, count - 1)
        )
    best_preset = [record for record in fit if record.kind == "preset"][:1]
    close = [record for record in fit if context.rank(record) <= context.rank(fit[0]) * (1 + TIE)]
    safest = sorted(close, key=lambda record: record.metrics["gradient_error"])[:1]
    unique: dict[int, TrialRecord] = {}
    for record in (fit[0], *believed, *best_preset, *safest, *fit[1:count]):
        unique.setdefault(record.number, record)
    return list(unique.values())[: count + 1]


def pick_safer(context: Context, tried: Sequence[TrialRecord], turn: int) -> list[TrialRecord]:
    """Return what to measure when none of the finalists so far is surely within the budget: safer, so slower ones."""
    known = {record.number for record in tried}
    rest = [r for r in context.store.learned() if context.acceptable(r) and r.number not in known]
    rest = [record for record in rest if not context.problem.is_script(record.params)]
    if not rest or context.table is None:
        return []
    floor = context.references[0].noise_floor
    believed = smoothed_divergence(context.problem, context.table, rest, floor)
    worst = {r.number: max(b, r.metrics["divergence"]) for r, b in zip(rest, believed, strict=True)}
    limit = SAFER_SHARES[turn] * max(context.limits.divergence, floor)
    safe = sorted((r for r in rest if worst[r.number] <= limit), key=context.rank)[:2]
    safest = min(rest, key=lambda record: worst[record.number])
    unique = {record.number: record for record in (*safe, safest)}
    return list(unique.values())


def pick_faster(
    context: Context, tried: Sequence[TrialRecord], rows: dict[int, list[TrialRecord]], chosen: TrialRecord
) -> list[TrialRecord]:
    """Return what to measure when faster finalists were rejected: what lies between them and the chosen one."""
    if context.table is None or context.options.objective != "throughput":
        return []
    ahead = chosen.metrics["step_time_ms"] * (1 - (TIE if context.measured else MODELLED_TIE))
    if all(record.metrics["step_time_ms"] >= ahead for record in tried):
        return []
    floor = context.references[0].noise_floor
    records = [r for r in context.store.learned() if not context.problem.is_script(r.params)]
    means = {
        record.number: statistics.fmean(
            run.metrics["divergence"] if run.ok else math.inf for run in rows[record.number]
        )
        for record in tried
        if rows[record.number]
    }
    limit = max(context.limits.divergence, floor)
    return faster_ones(
        context.problem, context.table, records, means, limit=limit, noise_floor=floor, ahead_of_ms=ahead
    )


def run_finals(context: Context) -> Answer:
    """Measure the finalists over the paired seeds and decide; safer ones follow while none is surely acceptable.

    When one is, but slower than finalists that were rejected, what lies between them gets its chance, once.
    """
    picked = pick_finalists(context)
    answer = Answer("stay", _why_nothing(context), None, seeds=0)
    began = time.monotonic()
    tried: list[TrialRecord] = []
    rows: dict[int, list[TrialRecord]] = {}
    errors: dict[str, float] = {}
    rejected: dict[str, str] = {}
    references: dict[int, Reference] = {}
    for turn in range(1 + len(SAFER_SHARES)):
        if not picked:
            break
        seeds = context.options.seeds
        _measure_all(context, picked, rows, references, range(seeds))
        errors |= measure_errors(context, {str(record.number): record.policy for record in picked})
        tried += picked
        answer, rejected = _decide(context, tried, rows, errors)
        uncertain = _uncertain(context, picked, rows) if len(rejected) == len(tried) else []
        if uncertain and not _over_budget(context):
            context.listener.note(f"within the budget on average, but not surely: {seeds} more paired seeds")
            _measure_all(context, uncertain, rows, references, range(seeds, 2 * seeds))
            answer, rejected = _decide(context, tried, rows, errors)
        if len(rejected) < len(tried) or turn == len(SAFER_SHARES) or _over_budget(context):
            break
        context.listener.note("none of these is surely within the limits over all seeds: safer ones are measured")
        picked = pick_safer(context, tried, turn)
    between = pick_faster(context, tried, rows, answer.chosen.tag) if answer.chosen is not None else []
    if between and not _over_budget(context):
        context.listener.note("faster finalists were rejected: what lies between them and the best so far is measured")
        _measure_all(context, between, rows, references, range(context.options.seeds))
        errors |= measure_errors(context, {str(record.number): record.policy for record in between})
        answer, rejected = _decide(context, [*tried, *between], rows, errors)
    for name, why in rejected.items():
        context.note(f"finalist {name} was rejected: {why}")
    context.timings["finalists_s"] = time.monotonic() - began
    return answer


def _uncertain(
    context: Context, finalists: Sequence[TrialRecord], rows: dict[int, list[TrialRecord]]
) -> list[TrialRecord]:
    """Return those whose mean is well within the budget while its bound is not: more seeds can tell.

    FP8 runs differ a lot from seed to seed (most at 0.02 %, some at 0.3 %): four of them bound a mean poorly.
    """
    limit = UNCERTAIN_SHARE * max(context.limits.divergence, context.references[0].noise_floor)
    out = []
    for record in finalists:
        runs = rows[record.number]
        if runs and all(run.ok for run in runs):
            mean = statistics.fmean(run.metrics["divergence"] for run in runs)
            out += [record] if mean <= limit and context.acceptable(record) else []
    return sorted(out, key=context.rank)[:MOST_UNCERTAIN]


def _over_budget(context: Context) -> bool:
    budget = context.options.budget_s
    return budget is not None and context.elapsed() > budget


def _measure_all(
    context: Context,
    finalists: Sequence[TrialRecord],
    rows: dict[int, list[TrialRecord]],
    references: dict[int, Reference],
    seeds: range,
) -> None:
    """Run the finalists under paired seeds, adding their records to ``rows``."""
    began = time.monotonic()
    jobs, done = len(seeds) * len(finalists), 0
    for record in finalists:
        rows.setdefault(record.number, [])
    for seed in seeds:
        if _out_of_time(context, seed):
            break
        if seed + 1 in seeds:
            context.pool.prepare(seed + 1)
        try:
            if seed not in references:
                references[seed] = _reference(context, seed)
        except AutoPrecError as error:
            context.note(f"paired seed {seed} could not be used: {error.what}")
            continue
        for original, record in _measure(context, seed, references[seed], _rotated(finalists, seed)):
            rows[original.number].append(record)
            done += 1
            left = (time.monotonic() - began) / done * (jobs - done)
            context.listener.trial(record, done, jobs, context.best(), left)


def _out_of_time(context: Context, seed: int) -> bool:
    """Say whether the time budget is used up; the script's own seed and one more are always measured."""
    if seed < 2 or not _over_budget(context):
        return False
    context.note(f"the time budget is used up: the finalists were measured over {seed} paired seeds")
    return True


def _rotated(finalists: Sequence[TrialRecord], seed: int) -> list[TrialRecord]:
    """Change the order from seed to seed, so that a drifting machine favours nobody."""
    shift = seed % len(finalists)
    return [*finalists[shift:], *finalists[:shift]]


def _stored(context: Context, kind: str, name: str, seed: int) -> TrialRecord | None:
    for record in context.store.records:
        if (record.kind, record.name, record.seed) == (kind, name, seed) and record.ok:
            return record
    return None


def _reference(context: Context, seed: int) -> Reference:
    """Return the annealed reference of a paired seed."""
    result = context.run(context.spec(context.reference_policy(), anneal=True), seed)
    if not result.ok:
        raise AutoPrecError(f"the reference failed: {result.status}: {result.reason}")
    reference = reference_of(context, result)
    return reference.with_noise(context.references[0].noise_floor, context.references[0].deterministic)


def _measure(
    context: Context, seed: int, reference: Reference, finalists: Sequence[TrialRecord]
) -> list[tuple[TrialRecord, TrialRecord]]:
    """Return (original, finalist record) of every finalist under one seed; stored ones are not run again."""

    def one(original: TrialRecord) -> tuple[TrialRecord, TrialRecord, bool]:
        known = _stored(context, "finalist", original.name, seed)
        if known is not None:
            return original, known, False
        plan = replace(original, kind="finalist", tags=("finalist",), seed=seed)
        record = measured(context, plan, reference, original.metrics["gradient_error"], anneal=True)
        return original, record, True

    parallel = 1 if context.measured else context.workers
    out = []
    with context.pool.threads(parallel, "finalist") as threads:
        for original, record, is_new in threads.map(one, finalists):
            if is_new:  # stored as soon as it is known, so that a killed search repeats as little as possible
                record = replace(record, number=context.store.next_number())
                context.store.add(record)
            out.append((original, record))
    return out


def timing_noise(context: Context, speedups: Sequence[Sequence[float]]) -> float:
    """Return the relative noise of a median speed-up: twice the standard error seen over the seeds; 0 when modelled."""
    if not context.measured:
        return 0.0
    spreads = [statistics.stdev(s) / statistics.fmean(s) / math.sqrt(len(s)) for s in speedups if len(s) > 1]
    return min(MOST_NOISE, max(LEAST_NOISE, 2 * statistics.median(spreads))) if spreads else MOST_NOISE


def _decide(
    context: Context,
    finalists: Sequence[TrialRecord],
    rows: dict[int, list[TrialRecord]],
    errors: dict[str, float],
) -> tuple[Answer, dict[str, str]]:
    """Return the answer over everything measured, and why candidates were rejected."""
    reference = context.references[0]
    candidates = [
        Candidate(
            name="script as written",
            speedup=1.0,
            divergences=(0.0,),
            memory_bytes=reference.memory_bytes,
            reference=True,
        )
    ]
    speeds = []
    for record in finalists:
        runs = rows[record.number]
        good = [run for run in runs if run.ok]
        speeds.append([run.metrics["speedup"] for run in good])
        candidates.append(
            Candidate(
                name=record.name,
                speedup=statistics.median(speeds[-1]) if good else 0.0,
                # a failed seed is an infinite divergence: such a candidate is never accepted
                divergences=tuple(run.metrics["divergence"] if run.ok else math.inf for run in runs),
                gradient_error=errors.get(str(record.number), record.metrics["gradient_error"]),
                memory_bytes=record.metrics["memory_bytes"],
                preset=record.kind == "preset",
                tag=record,
            )
        )
    noise = timing_noise(context, speeds)
    limit = context.gradient_limit()
    decision = choose(
        candidates,
        max_divergence=context.limits.divergence,
        noise_floor=reference.noise_floor,
        max_gradient=limit if math.isfinite(limit) else None,
        max_memory=context.limits.memory,
        objective=context.options.objective,
        timing_noise=noise,
        reference_memory=reference.memory_bytes,
    )
    context.timings["timing_noise"] = noise
    chosen = candidates[decision.index] if decision.index is not None else None
    adopted = decision.verdict == "adopt" and chosen is not None
    answer = Answer(
        decision.verdict,
        decision.reason + (_over_sixteen_bits(context, chosen) if chosen is not None and adopted else ""),
        chosen.tag if chosen is not None and adopted else None,
        seeds=len(chosen.divergences) if chosen is not None and adopted else 0,
        chosen=chosen if adopted else None,
        interval=decision.interval,
    )
    return answer, decision.rejected


def _over_sixteen_bits(context: Context, chosen: Candidate) -> str:
    """Say what a policy gains over plain bf16, which is what most people would run instead; modelled times only."""
    plain = [r for r in context.store.learned() if r.ok and r.kind == "preset" and r.name == "all bf16"]
    if context.measured or not plain or plain[0].name == chosen.name:
        return ""
    return f"; {chosen.speedup / plain[0].metrics['speedup']:.2f}x over all bf16"


def _why_nothing(context: Context) -> str:
    """Say why no measured trial qualifies: the limit that most of them broke."""
    learned = [r for r in context.store.learned() if r.ok and not context.problem.is_script(r.params)]
    if not learned:
        return "no trial other than the script as written could be measured"
    limits: dict[str, Any] = {
        "divergence": lambda r: r.metrics["divergence"] > max(context.limits.divergence, r.metrics["noise_floor"]),
        "gradient error": lambda r: r.metrics["gradient_error"] > context.gradient_limit(),
        "memory": lambda r: context.limits.memory is not None and r.metrics["memory_bytes"] > context.limits.memory,
    }
    broken = {name: sum(1 for record in learned if test(record)) for name, test in limits.items()}
    worst = max(broken, key=lambda name: broken[name])
    return f"none of {len(learned)} measured policies is within the limits; {broken[worst]} exceed the {worst} limit"
