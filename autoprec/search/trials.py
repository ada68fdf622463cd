"""The study's loop: ask, run, score, keep, tell; until the trials or the time are used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna

from autoprec.errors import NothingAcceptableError
from autoprec.search.context import Context
from autoprec.search.presets import presets
from autoprec.search.problem import GroupVariable
from autoprec.search.records import TrialRecord
from autoprec.search.sampler import make_sampler
from autoprec.search.score import score
from autoprec.search.tables import FloatTable
from autoprec.space import Choice

__all__ = ["prior_times", "run_trials", "trial_record"]

#: So many failures in a row end the search: the cause is then not the policy.
FAILURES_IN_A_ROW = 5
#: Ask at most so many times per wanted trial when a sampler proposes what was already measured.
ASKS_PER_TRIAL = 20


def prior_times(context: Context) -> tuple[FloatTable, float]:
    """Return (modelled milliseconds per group and choice ``[G, C]``, the rest of the step in milliseconds)."""
    problem, cost = context.problem, context.cost
    baseline = problem.params_of(problem.baseline)
    activations = str(problem.value(baseline, "activations"))
    recipes = problem.space.recipes_with(baseline)

    def milliseconds(group: GroupVariable, choice: str) -> float:
        plan = Choice.parse(choice).plan(recipes)
        return sum(cost.layer_time_ms(layer, plan, activations=activations) for layer in group.layers)

    times = problem.table(milliseconds)
    chosen = times[np.arange(len(problem.groups)), problem.indices(baseline)]
    return times, max(context.estimate(baseline).time_ms - float(chosen.sum()), 0.0)


def trial_record(
    context: Context, number: int, kind: str, name: str, params: dict[str, Any], seed: int = 0, **spec: Any
) -> TrialRecord:
    """Run one policy and return its scored record."""
    policy = context.problem.policy(params).to_dict()
    reference = context.references[seed]
    began = time.time()
    result = context.run(context.spec(policy, **spec), seed)
    estimate = None if context.measured else context.estimate(params)
    scored = score(result, reference, estimate=estimate, gradient_error=context.gradient_error(params))
    return TrialRecord(
        number=number,
        kind=kind,
        name=name,
        params=params,
        policy=policy,
        status=scored.status,
        reason=scored.reason,
        tail=result.tail,
        metrics=scored.metrics,
        sources=scored.sources,
        losses=result.losses,
        reference_losses=reference.losses,
        tags=("preset",) if kind == "preset" else (),
        started=began,
        seconds=time.time() - began,
        seed=seed,
    )


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
    """Return the seconds the finalists will need."""
    runs = context.options.seeds * (context.options.finalists + 2)
    parallel = 1 if context.measured else context.workers
    return runs * context.timings.get("reference_run_s", 0.0) / parallel


def run_trials(context: Context) -> None:
    """Run the study until its trials or its time are used up.

    Raises:
        NothingAcceptableError: five trials in a row failed.
    """
    options, problem, store = context.options, context.problem, context.store
    times, base = prior_times(context)
    if context.table is None:
        raise NothingAcceptableError("the sensitivity table is missing", fix="run the scan first")
    sampler = make_sampler(
        options.sampler,
        problem,
        prior_time=times,
        prior_error2=context.table.error2,
        base_time=base,
        max_divergence=context.limits.divergence,
        max_gradient_error=context.gradient_limit(),
        max_memory=context.limits.memory,
        seed=options.seed,
        trials=options.trials,
    )
    store.start(sampler, problem.distributions(), presets(problem))
    loop = _Loop(context, options.trials, done=len(store.learned()))
    loop.seen = {problem.key(record.params): record for record in store.learned()}
    context.timings["search_began_s"] = context.elapsed()
    with ThreadPoolExecutor(max_workers=context.workers, thread_name_prefix="trial") as threads:
        try:
            _drive(loop, threads.submit)
        finally:
            for future in loop.running:
                future.cancel()


def _drive(loop: _Loop, submit: Callable[..., Future[TrialRecord]]) -> None:
    context, store = loop.context, loop.context.store
    number, asked = store.next_number(), 0
    while loop.running or (loop.done < loop.goal and not loop.out_of_time()):
        room = min(context.workers - len(loop.running), loop.goal - loop.done - len(loop.running))
        while room > 0 and not loop.out_of_time() and asked < ASKS_PER_TRIAL * loop.goal:
            asked += 1
            trial = store.ask()
            known = loop.seen.get(context.problem.key(trial.params))
            if known is not None:
                store.forget(trial, known)
                continue
            name = trial.user_attrs.get("preset")
            kind = "preset" if name else "search"
            future = submit(trial_record, context, number, kind, name or f"trial {number}", dict(trial.params))
            loop.running[future] = trial
            number, room = number + 1, room - 1
        if not loop.running:
            context.note(f"the space is exhausted after {loop.done} different policies")
            return
        finished, _ = wait(loop.running, return_when=FIRST_COMPLETED)
        for future in sorted(finished, key=lambda f: loop.running[f].number):
            loop.finish(loop.running.pop(future), future.result())
