"""The study's loop: ask the sampler, run the trial, score it, store it, tell the sampler.

Presets come first (what people run today), then what the sampler proposes. It ends when the trials or the time are used
up, or when nothing that is left is worth a trial.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import optuna

from autoprec.errors import NothingAcceptableError
from autoprec.policy import Policy, save_policy
from autoprec.trial.protocol import FAILURES
from autoprec.tuning.decide.metrics import Reference, score
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.sampler.base import is_exhausted
from autoprec.tuning.decide.sampler.other_samplers import make_sampler
from autoprec.tuning.decide.sampler.prior import Prior, build_prior
from autoprec.tuning.decide.shortlist import stop_gap
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.paired import PairedRunner
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import NAMES, first_presets, over_sixteen_bit, sixteen_bit_speedup
from autoprec.tuning.study.records import TrialRecord

__all__ = ["measured", "run_trials"]

#: This many failures in a row end the search: the cause is then not the policy.
FAILURES_IN_A_ROW = 5
#: Presets may take half of the trials, but never fewer than these are tried.
FEWEST_PRESETS = 8
#: At most this share of the time left after the setup is kept for finalists: the trials before them find them.
FINALISTS_SHARE = 0.4
#: Ask at most this many times per wanted trial when a sampler proposes what was already measured.
ASKS_PER_TRIAL = 20


def make_prior(setup: Setup, table: SensitivityTable) -> Prior:
    """Return what the cost model and the sensitivity table say before the first trial."""

    def step_cost(params: Mapping[str, Any]) -> tuple[float, float]:
        estimate = setup.steps.of(params)
        return estimate.time_ms, float(estimate.memory_bytes)

    return build_prior(
        setup.problem,
        table,
        setup.cost.layer_time_ms,
        step_cost,
        measured=setup.measured,
        with_memory=setup.limits.memory is not None or setup.options.objective != "throughput",
    )


def hopeless_gap(setup: Setup, ledger: Ledger, params: Mapping[str, Any]) -> float:
    """Return the loss gap beyond which a trial cannot become acceptable any more and is ended early.

    Single steps of a harmless FP8 run are off by up to ten times the usual budget; a mean of twenty times the budget,
    or of ten times the noise floor, over the last quarter is beyond recovery. Where the step time is modelled the
    front of the finished trials may say so sooner.
    """
    floor, budget = ledger.reference.noise_floor, setup.limits.divergence
    fixed = max(20.0 * budget, 10.0 * floor)
    if setup.measured:
        return fixed
    front = [(r.metrics["step_time_ms"], r.metrics["divergence"]) for r in ledger.store.learned() if r.ok]
    expected = setup.steps.of(params).time_ms
    return min(fixed, stop_gap(expected, front, max_divergence=budget, noise_floor=floor))


def measured(
    setup: Setup,
    runner: PairedRunner,
    ledger: Ledger,
    plan: TrialRecord,
    reference: Reference,
    gradient_error: float,
    **spec: Any,
) -> TrialRecord:
    """Run the policy of a record under the record's paired seed; return it with everything that was measured."""
    began, clock = time.time(), time.monotonic()  # the wall clock may jump; durations must not
    result = runner.run(runner.spec(plan.policy, **spec), plan.seed)
    estimate = None if setup.measured else setup.steps.of(plan.params)
    doubt = result.unreliable if setup.measured else ""
    scored = score(result, reference, estimate=estimate, gradient_error=gradient_error)
    done = replace(
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
    over = over_sixteen_bit(done.metrics, sixteen_bit_speedup(setup, [*ledger.store.records, done]))
    sources = dict.fromkeys(over, setup.source)
    return replace(done, metrics={**done.metrics, **over}, sources={**done.sources, **sources})


def reserve(setup: Setup, runner: PairedRunner, ledger: Ledger, began_s: float) -> float:
    """Return the seconds kept for measuring again the finalists there would be now; none are kept for none.

    Args:
        setup, runner, ledger: of the search.
        began_s: when the trials began, seconds into the search: only what was left then is shared with finalists.
    """
    fit = [r for r in ledger.acceptable_ones() if not setup.problem.is_script(r.params)]
    count = min(len(fit), setup.options.finalists + 1)
    runs = setup.options.seeds * (count + 1) if count else 0  # and the reference of each seed
    needed = runs * ledger.seconds_per_run() / runner.final_workers
    budget = setup.options.budget_s
    return needed if budget is None else min(needed, FINALISTS_SHARE * max(0.0, budget - began_s))


@dataclass(slots=True)
class _Loop:
    """The state of one run of the loop.

    Attributes:
        goal, done: trials that are wanted, and that are finished (in earlier sessions, too).
        failures: how many of the last trials failed one after the other.
        seen: what every point that was tried gave.
        running: trials that have not ended yet.
        began_s, began_done: when this loop began (seconds into the search), and what was finished then.
        yardstick: the 16-bit run, which is measured whatever the budget says; None where the space has none.
    """

    setup: Setup
    runner: PairedRunner
    ledger: Ledger
    table: SensitivityTable
    goal: int
    done: int = 0
    failures: int = 0
    seen: dict[tuple[Any, ...], TrialRecord] = field(default_factory=dict)
    running: dict[Future[TrialRecord], optuna.Trial] = field(default_factory=dict)
    began_s: float = 0.0
    began_done: int = 0
    yardstick: tuple[Any, ...] | None = None

    def trial(self, number: int, kind: str, name: str, params: dict[str, Any]) -> TrialRecord:
        """Run one policy of the study and return its scored record."""
        setup, reference = self.setup, self.ledger.reference
        policy = setup.problem.policy(params).to_dict()
        tags = ("preset",) if kind == "preset" else ()
        plan = TrialRecord(number, kind, name, params, policy, status="", tags=tags)
        gap = hopeless_gap(setup, self.ledger, params)
        predicted = self.table.predict(setup.problem, params)
        return measured(
            setup,
            self.runner,
            self.ledger,
            plan,
            reference,
            predicted,
            reference_losses=reference.losses,
            stop_gap=gap,
            by_block=True,
        )

    def finish(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Book one finished trial.

        Raises:
            NothingAcceptableError: too many failures in a row, with the first cause.
        """
        ledger = self.ledger
        ledger.store.tell(trial, record)
        self.done += 1
        self.seen[self.setup.problem.key(record.params)] = record
        best = ledger.best()
        if best is not None and best is record:  # so that not even kill -9 loses it
            save_policy(Policy.model_validate(best.policy), self.setup.study_dir / "best.yaml")
        ledger.listener.trial(record, self.done, self.goal, best, self.seconds_left())
        self.failures = 0 if record.ok or record.status == "pruned" else self.failures + 1
        if self.failures >= FAILURES_IN_A_ROW:
            first = ledger.store.learned()[-FAILURES_IN_A_ROW]
            raise NothingAcceptableError(
                f"{FAILURES_IN_A_ROW} trials in a row failed; the first: {first.status}: {first.reason}",
                fix=f"its output ended with:\n{first.tail}" if first.tail else "run with -v to see every trial",
            )

    def known(self, params: Mapping[str, Any]) -> TrialRecord | None:
        """Return what is known of a proposal without running it: it ran before, or it is bound to fail.

        A script that ``torch.compile`` failed on twice and never ran under is not compiled again.
        """
        found = self.seen.get(self.setup.problem.key(params))
        execution = params.get("execution", "keep")
        if found is not None or execution == "keep":
            return found
        same = [r for r in self.ledger.store.learned() if r.params.get("execution") == execution]
        failed = [r for r in same if r.status in FAILURES and r.status != "diverged"]
        return failed[0] if len(failed) > 1 and not any(r.ok for r in same) else None

    def seconds_left(self) -> float:
        """Return the expected seconds until the search ends, finalists included."""
        per_trial = (self.ledger.elapsed() - self.began_s) / max(1, self.done - self.began_done)
        return (self.goal - self.done) * per_trial + reserve(self.setup, self.runner, self.ledger, self.began_s)

    def out_of_time(self) -> bool:
        """Say whether the time budget leaves no room for another trial before the finalists."""
        budget = self.setup.options.budget_s
        if budget is None or (self.yardstick is not None and self.yardstick not in self.seen and not self.running):
            return False
        kept = reserve(self.setup, self.runner, self.ledger, self.began_s)
        return self.ledger.elapsed() + self.ledger.seconds_per_run() + kept > budget

    def room(self) -> int:
        """Return how many more trials may be started now."""
        busy = len(self.running)
        return 0 if self.out_of_time() else min(self.runner.workers - busy, self.goal - self.done - busy)


def run_trials(setup: Setup, runner: PairedRunner, ledger: Ledger, table: SensitivityTable) -> None:
    """Run the study until its trials or its time are used up, or nothing is left that is worth a trial.

    Raises:
        NothingAcceptableError: five trials in a row failed.
    """
    options, problem, store = setup.options, setup.problem, ledger.store
    sampler = make_sampler(
        options.sampler,
        problem,
        make_prior(setup, table),
        max_divergence=setup.limits.divergence,
        max_gradient=ledger.gradient_limit(),
        max_memory=setup.limits.memory,
        noise_floor=ledger.reference.noise_floor,
        seed=options.seed,
        trials=options.trials,
        objective=options.objective,
    )
    first = first_presets(presets(problem))[: max(FEWEST_PRESETS, options.trials // 2)]
    store.start(sampler, problem.distributions(), first)
    seen = {problem.key(record.params): record for record in store.learned()}
    done = len(store.learned())
    loop = _Loop(setup, runner, ledger, table, options.trials, done, seen=seen)
    loop.began_s, loop.began_done = ledger.elapsed(), done
    loop.yardstick = next((problem.key(params) for name, params in first if name in NAMES), None)
    with runner.threads(runner.workers, "trial") as threads:
        _drive(loop, threads.submit, lambda: is_exhausted(sampler))
    if loop.done < loop.goal and loop.out_of_time():
        ledger.cut(f"the time budget of {options.budget_s:.0f} s ended the trials after {loop.done} of {loop.goal}")


def _drive(loop: _Loop, submit: Callable[..., Future[TrialRecord]], exhausted: Callable[[], bool]) -> None:
    store = loop.ledger.store
    number, asked = store.next_number(), 0
    # the N of the progress's N/30, not the number of the record: that one counts reference and finalist runs too
    place = max((int(r.name[6:]) for r in store.learned() if re.fullmatch(r"trial \d+", r.name)), default=0)
    while loop.running or (loop.done < loop.goal and not loop.out_of_time()):
        while loop.room() > 0 and not exhausted() and asked < ASKS_PER_TRIAL * loop.goal:
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
            future = submit(loop.trial, number, kind, name or f"trial {place}", params)
            loop.running[future] = trial
            number += 1
        if not loop.running:
            if loop.out_of_time():
                return
            loop.ledger.note(f"the space is exhausted after {loop.done} different policies")
            return
        finished, _ = wait(loop.running, return_when=FIRST_COMPLETED)
        for future in sorted(finished, key=lambda f: loop.running[f].number):
            loop.finish(loop.running.pop(future), future.result())
