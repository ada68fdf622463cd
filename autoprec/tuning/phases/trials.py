"""The study's loop: ask, run, score, keep, tell; until the trials or the time are used up."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import optuna

from autoprec.errors import NothingAcceptableError
from autoprec.trial.protocol import FAILURES
from autoprec.tuning.context import Context
from autoprec.tuning.decide.metrics import Reference, score
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.sampler.base import is_exhausted
from autoprec.tuning.decide.sampler.other_samplers import make_sampler
from autoprec.tuning.decide.sampler.prior import Prior, build_prior
from autoprec.tuning.decide.shortlist import stop_gap
from autoprec.tuning.study.records import TrialRecord

__all__ = ["make_prior", "measured", "run_trials", "trial_record"]

#: So many failures in a row end the search: the cause is then not the policy.
FAILURES_IN_A_ROW = 5
#: Presets may take half of the trials, but never fewer than these are tried.
FEWEST_PRESETS = 8
#: Share of a time budget that is kept for the finalists at most.
FINALISTS_SHARE = 0.4
#: Ask at most so many times per wanted trial when a sampler proposes what was already measured.
ASKS_PER_TRIAL = 20


def make_prior(context: Context) -> Prior:
    """Return what the cost model and the sensitivity table say before the first trial.

    Raises:
        NothingAcceptableError: the sensitivity table was not measured.
    """
    if context.table is None:
        raise NothingAcceptableError("the sensitivity table is missing", fix="measure it before the trials")

    def step_cost(params: Mapping[str, Any]) -> tuple[float, float]:
        estimate = context.estimate(params)
        return estimate.time_ms, float(estimate.memory_bytes)

    with_memory = context.limits.memory is not None or context.options.objective != "throughput"
    return build_prior(
        context.problem,
        context.table,
        context.cost.layer_time_ms,
        step_cost,
        measured=context.measured,
        with_memory=with_memory,
    )


def hopeless_gap(context: Context, params: Mapping[str, Any]) -> float:
    """Return the loss gap beyond which a trial is hopeless and is ended early.

    Single steps of a harmless FP8 run are off by up to ten times the usual budget; twenty times the budget, or ten
    times the noise floor, on average over the last quarter is no chance any more. Where the step time is modelled the
    front of the finished trials may say so sooner.
    """
    floor = context.references[0].noise_floor
    fixed = max(20.0 * context.limits.divergence, 10.0 * floor)
    if context.measured:
        return fixed
    front = [(r.metrics["step_time_ms"], r.metrics["divergence"]) for r in context.store.learned() if r.ok]
    expected = context.estimate(params).time_ms
    return min(fixed, stop_gap(expected, front, max_divergence=context.limits.divergence, noise_floor=floor))


def measured(
    context: Context, plan: TrialRecord, reference: Reference, gradient_error: float, **spec: Any
) -> TrialRecord:
    """Run the policy of a record under the record's paired seed; return it with everything that was measured."""
    began, clock = time.time(), time.monotonic()  # the wall clock may jump; durations must not
    result = context.run(context.spec(plan.policy, **spec), plan.seed)
    estimate = None if context.measured else context.estimate(plan.params)
    doubt = result.unreliable if context.measured else ""
    scored = score(result, reference, estimate=estimate, gradient_error=gradient_error)
    return replace(
        plan,
        status=scored.status,
        reason=scored.reason or doubt,
        tags=(*plan.tags, "unreliable") if doubt else plan.tags,
        tail=result.tail,
        metrics=scored.metrics,
        sources=scored.sources,
        losses=result.losses,
        reference_losses=reference.losses,
        started=began,
        seconds=time.monotonic() - clock,
    )


def trial_record(context: Context, number: int, kind: str, name: str, params: dict[str, Any]) -> TrialRecord:
    """Run one policy of the study and return its scored record."""
    policy = context.problem.policy(params).to_dict()
    tags = ("preset",) if kind == "preset" else ()
    plan = TrialRecord(number, kind, name, params, policy, status="", tags=tags)
    reference = context.references[0]
    hopeless = {"reference_losses": reference.losses, "stop_gap": hopeless_gap(context, params)}
    return measured(context, plan, reference, context.gradient_error(params), **hopeless)


@dataclass(slots=True)
class _Loop:
    """The state of one run of the loop."""

    context: Context
    goal: int
    done: int = 0
    failures: int = 0
    seen: dict[tuple[Any, ...], TrialRecord] = field(default_factory=dict)
    running: dict[Future[TrialRecord], optuna.Trial] = field(default_factory=dict)

    def finish(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Book one finished trial.

        Raises:
            NothingAcceptableError: too many failures in a row, with the first cause.
        """
        context = self.context
        context.store.tell(trial, record)
        self.done += 1
        self.seen[context.problem.key(record.params)] = record
        best = context.best()
        if best is record:
            context.keep_best(best)
        context.listener.trial(record, self.done, self.goal, best, self.seconds_left())
        self.failures = 0 if record.ok or record.status == "pruned" else self.failures + 1
        if self.failures >= FAILURES_IN_A_ROW:
            recent = context.store.learned()[-FAILURES_IN_A_ROW:]
            raise NothingAcceptableError(
                f"{FAILURES_IN_A_ROW} trials in a row failed; the first: {recent[0].status}: {recent[0].reason}",
                fix=f"its output ended with:\n{recent[0].tail}" if recent[0].tail else "run with -v to see every trial",
            )

    def known(self, params: Mapping[str, Any]) -> TrialRecord | None:
        """Return what is known of a proposal without running it: it ran before, or it is bound to fail.

        A script that ``torch.compile`` failed on twice and never ran under is not compiled again.
        """
        found = self.seen.get(self.context.problem.key(params))
        execution = params.get("execution", "keep")
        if found is not None or execution == "keep":
            return found
        same = [r for r in self.context.store.learned() if r.params.get("execution") == execution]
        failed = [r for r in same if r.status in FAILURES and r.status != "diverged"]
        return failed[0] if len(failed) > 1 and not any(r.ok for r in same) else None

    def seconds_left(self) -> float:
        """Return the expected seconds until the search ends, finalists included."""
        context = self.context
        per_trial = (context.elapsed() - self.context.timings["search_began_s"]) / max(1, self.done)
        return (self.goal - self.done) * per_trial + reserve(context)

    def out_of_time(self) -> bool:
        """Say whether the time budget leaves no room for another trial before the finalists."""
        budget = self.context.options.budget_s
        if budget is None:
            return False
        per_trial = self.context.timings.get("reference_run_s", 0.0)
        return self.context.elapsed() + per_trial + reserve(self.context) > budget


def reserve(context: Context) -> float:
    """Return the seconds kept for the finalists: what they need, but never more than two fifths of a time budget."""
    runs = context.options.seeds * (context.options.finalists + 2)
    parallel = 1 if context.measured else context.workers
    needed = runs * context.timings.get("reference_run_s", 0.0) / parallel
    budget = context.options.budget_s
    return needed if budget is None else min(needed, FINALISTS_SHARE * budget)


def run_trials(context: Context) -> None:
    """Run the study until its trials or its time are used up.

    Raises:
        NothingAcceptableError: five trials in a row failed.
    """
    options, problem, store = context.options, context.problem, context.store
    limit = context.gradient_limit()
    sampler = make_sampler(
        options.sampler,
        problem,
        make_prior(context),
        max_divergence=context.limits.divergence,
        max_gradient=limit if math.isfinite(limit) else None,
        max_memory=context.limits.memory,
        noise_floor=context.references[0].noise_floor,
        seed=options.seed,
        trials=options.trials,
        objective=options.objective,
    )
    first = presets(problem, limit=max(FEWEST_PRESETS, options.trials // 2))
    store.start(sampler, problem.distributions(), first)
    loop = _Loop(context, options.trials, done=len(store.learned()))
    loop.seen = {problem.key(record.params): record for record in store.learned()}
    context.timings["search_began_s"] = context.elapsed()
    with context.pool.threads(context.workers, "trial") as threads:
        _drive(loop, threads.submit, lambda: is_exhausted(sampler))


def _drive(
    loop: _Loop, submit: Callable[..., Future[TrialRecord]], exhausted: Callable[[], bool] = lambda: False
) -> None:
    context, store = loop.context, loop.context.store
    number, asked = store.next_number(), 0
    # the N of the progress's N/30, not the number of the record: that one counts reference and finalist runs too
    place = max((int(r.name[6:]) for r in store.learned() if re.fullmatch(r"trial \d+", r.name)), default=0)
    while loop.running or (loop.done < loop.goal and not loop.out_of_time()):
        room = min(context.workers - len(loop.running), loop.goal - loop.done - len(loop.running))
        while room > 0 and not exhausted() and not loop.out_of_time() and asked < ASKS_PER_TRIAL * loop.goal:
            asked += 1
            trial = store.ask()
            params = dict(trial.params)  # Optuna copies them deeply every time
            known = loop.known(params)
            if known is not None:
                store.forget(trial, known)
                continue
            name = trial.user_attrs.get("preset")
            kind = "preset" if name else "search"
            place = max(place, loop.done + len(loop.running)) + 1
            future = submit(trial_record, context, number, kind, name or f"trial {place}", params)
            loop.running[future] = trial
            number, room = number + 1, room - 1
        if not loop.running:
            context.note(f"the space is exhausted after {loop.done} different policies")
            return
        finished, _ = wait(loop.running, return_when=FIRST_COMPLETED)
        for future in sorted(finished, key=lambda f: loop.running[f].number):
            loop.finish(loop.running.pop(future), future.result())
