"""The study's loop: ask for what has most value (a new policy, or one more seed), run it, store it, and refit.

It ends when nothing is expected to gain enough for a run to pay; ``--trials`` and ``--budget`` are maxima.
"""

from __future__ import annotations

import math
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial

import optuna

from autoprec.errors import NothingAcceptableError
from autoprec.policy import Policy, save_policy
from autoprec.support.units import counted
from autoprec.trial.driver.failures import how_to_mend
from autoprec.trial.protocol import OUT_OF_TIME
from autoprec.tuning.by_block import whole_seconds
from autoprec.tuning.decide.decision import Decision
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import VARIANT, Params, Point
from autoprec.tuning.decide.published import library_presets
from autoprec.tuning.decide.sampler.expectation import EXPLORATORY, Expectation, Goals
from autoprec.tuning.decide.sampler.prior import Prior
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler, Proposal, make_sampler
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.libraries.choice import BACKENDS, able, fastest, row_of, run_by
from autoprec.tuning.paired import OVERRUN, PairedRunner
from autoprec.tuning.phases.answer import explained
from autoprec.tuning.phases.duels import usual_search_s
from autoprec.tuning.phases.finalists import SeedAllocation
from autoprec.tuning.phases.gains import by_parts
from autoprec.tuning.phases.measuring import first_run, goals_of, leader, make_prior, with_gain
from autoprec.tuning.phases.variants import NEAR
from autoprec.tuning.schedule import usual_trials
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import by_hand, first_presets
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import Run
from autoprec.tuning.timing.in_turns import times_of

#: This many failures in a row end the search: the cause is then not the policy. Where others ran, twice as many do: a
#: target that cannot run FP8 fails one recipe after the other.
FAILURES_IN_A_ROW = 5
#: Presets may take half of the trials, but never fewer than these are tried.
FEWEST_PRESETS = 8
#: Ask at most this many times per wanted trial when a sampler proposes what was already measured.
ASKS_PER_TRIAL = 20


def hopeless_gap(setup: Setup, state: SearchState) -> float:
    """Return the loss gap beyond which a trial cannot become acceptable any more and is ended early.

    Single steps of a harmless FP8 run are off by up to ten times the usual budget; a mean of twenty times the budget,
    or of ten times the noise floor, over the last quarter is beyond recovery.
    """
    return max(20.0 * setup.options.tolerance, 10.0 * state.reference.noise_floor)


def reserve(setup: Setup, allocation: SeedAllocation, state: SearchState) -> float:
    """Return the seconds kept for the further seeds without which nothing is adopted; none before anything may be.

    Args:
        setup: what is searched.
        allocation: which seeds the contenders have had.
        state: what the search has learnt so far.
    """
    speed_alone = setup.options.objective == "throughput"  # then what is slower than the script is never adopted
    may_be = [record for record in state.acceptable_ones() if not setup.problem.is_script(record.params)]
    if not any(record["speedup"] > 1.0 or not speed_alone for record in may_be):
        return 0.0
    return (allocation.fewest - 1) * allocation.seed_s + whole_seconds(setup, state)


def seconds_left(setup: Setup, runner: PairedRunner, state: SearchState, allocation: SeedAllocation) -> float:
    """Return the seconds until the search usually ends, further seeds and duels included; at most, with a time budget.

    Args:
        setup: what is searched.
        runner: runs trials beside the reference.
        state: what the search has learnt so far.
        allocation: which seeds the contenders have had.
    """
    options, done = setup.options, len(state.store.learned())
    most = options.trials if options.budget_s is not None else usual_trials(options, timed=setup.measured)
    trials = max(0, most - done) * state.seconds_per_run() / max(1, runner.workers)
    left = trials + reserve(setup, allocation, state) + state.seconds_to_close()
    if setup.measured:
        left += max(0.0, usual_search_s(state.seconds.cached_compile_s or 0.0) - (state.seconds.duels_s or 0.0))
    return left if options.budget_s is None else min(left, max(0.0, options.budget_s - state.elapsed()))


@dataclass(slots=True)
class _Loop:
    """The state of one run of the loop.

    Attributes:
        allocation: everything measured, and where it stands.
        goal, done: trials that are wanted at most, and that are finished (in earlier sessions, too).
        failures: how many of the last trials failed one after the other.
        seen: what every point that was tried gave.
        running: trials that have not ended yet.
        by_hand: keys of what people write by hand, which is run first, whatever the budget says.
        backend_due: who runs quantised layers is decided as soon as what people write by hand was run.
        used_up: the sampler proposed nothing new any more.
        fitted_at: how many records there were when the models were last fitted.
        saved: name of the best policy so far, which is in ``best.yaml``.
    """

    setup: Setup
    runner: PairedRunner
    state: SearchState
    table: SensitivityTable
    allocation: SeedAllocation
    sampler: optuna.samplers.BaseSampler
    goal: int
    done: int = 0
    failures: int = 0
    seen: dict[Point, Run] = field(default_factory=dict)
    running: dict[Future[Run], optuna.Trial] = field(default_factory=dict)
    by_hand: frozenset[Point] = frozenset()
    used_up: bool = False
    backend_due: bool = False
    fitted_at: int = -1
    saved: str = ""

    def __post_init__(self) -> None:
        """Count on from what earlier sessions left."""
        self.refit()

    def trial(self, number: int, name: str, params: Params, tags: tuple[str, ...]) -> Run:
        setup, state = self.setup, self.state
        policy = setup.problem.policy(params).to_dict()
        plan = Run(number, "preset" if "preset" in tags else "search", name, params, policy, status="", tags=tags)
        by_loss = setup.host.world_size == 1 and not setup.options.metric
        limit = hopeless_gap(setup, state) if by_loss else None
        seen = {"reference_losses": state.reference.losses, "stop_gap": limit}
        return first_run(setup, self.runner, state, plan, self.table.predict(setup.problem, params), **seen)

    def finish(self, trial: optuna.Trial, record: Run) -> None:
        """Record one finished trial.

        Raises:
            NothingAcceptableError: too many failures in a row, with the first cause.
        """
        state = self.state
        if record.status == OUT_OF_TIME:  # nothing is known of it, and nothing is held against it
            self.by_hand -= {self.setup.problem.key(record.params)}
            state.cut(f"the time budget left no time for {record.name}: {record.reason}")
            state.store.forget(trial, record)
            return
        record = with_gain(self.setup, state, record)  # the 16-bit run may have ended while it ran
        state.store.tell(trial, record)
        self.done += 1
        self.seen[self.setup.problem.key(record.params)] = record
        self.refit()
        best = state.best()
        if best is not None and best.name != self.saved:  # so that not even kill -9 loses it
            save_policy(Policy.model_validate(best.policy), self.setup.study_dir / "best.yaml")
            self.saved = best.name
        state.listener.trial(
            record,
            self.done,
            self.goal,
            leader(self.setup, state),
            seconds_left(self.setup, self.runner, state, self.allocation),
        )
        self.failures = 0 if record.ok or record.status == "pruned" else self.failures + 1
        most = FAILURES_IN_A_ROW * (2 if any(r.ok for r in self.seen.values()) else 1)
        if self.failures >= most:
            first = state.store.learned()[-most]
            raise NothingAcceptableError(
                f"{most} trials in a row failed; the first: {first.status}: {first.reason}\n{first.tail}".rstrip(),
                fix=how_to_mend(first.reason + first.tail, "-v shows every trial; `autoprec check` runs one policy"),
            )

    def refit(self) -> None:
        """Refit to what was measured since the last time."""
        if self.fitted_at == len(self.state.store.records):
            return
        self.fitted_at = len(self.state.store.records)
        self.allocation.update()
        if isinstance(self.sampler, PrecisionSampler):
            self.sampler.learn(self.allocation.runs(), self.allocation.now.best_cost)

    def proposed(self, params: Params) -> Proposal | None:
        """Return what our sampler said of the params that it proposed last; None for others."""
        last = self.sampler.last if isinstance(self.sampler, PrecisionSampler) else None
        return last if last is not None and last.params == params else None

    # --- going on or not --------------------------------------------------------------------------------------------
    def expected(self) -> float:
        """Return what the best policy not tried yet is expected to gain per run; 0 where no trial may be run."""
        return 0.0 if self.out_of_time() else self.best_untried_value()

    def best_untried_value(self) -> float:
        if self.done + len(self.running) >= self.goal or self.used_up:
            return 0.0
        if not isinstance(self.sampler, PrecisionSampler) or self.state.store.queued():
            return math.inf
        self.refit()
        best = self.sampler.best(self.state.store.live)
        return best.value if best is not None else 0.0

    def wants_more(self) -> bool:
        if self.backend_due and not self.by_hand - self.seen.keys():
            return False
        gain = self.expected()
        return gain > 0 and gain >= self.allocation.now.gain

    def decide_backend(self) -> bool:
        """Time the best that people write by hand by each library, and take the fastest from here on; false if done.

        Nothing is run where one backend alone is able. A search that goes on takes what it had decided.
        """
        if not self.backend_due:
            return False
        self.backend_due, state, duels = False, self.state, self.allocation.duels
        before = [record for record in state.store.records if BACKENDS in record.tags]
        hand = [run for key, run in self.seen.items() if key in self.by_hand and state.acceptable(run)]
        known = [run for run in hand if len(able(run.policy)) > 1]
        if before or not known:
            state.backend = row_of(before[-1].policy) if before else {}
            return True
        best = min(known, key=state.cost)
        device = "cpu" if self.setup.host.device == "cpu" else "cuda"
        asked = {name: run_by(best.policy, {"backend": name, "device": device}) for name in able(best.policy)}
        rounds, refused = duels.by_backend(best, asked)
        for name, why in refused.items():
            state.note(f"{best.name} was not timed by {name}: {why}")
        state.backend = fastest(rounds, list(asked), device)
        if state.backend:
            name = str(state.backend["backend"])
            state.note(f"quantised layers are run by {name}: with {best.name}, {state.backend['reason']}")
            duels.book(replace(best, policy=run_by(best.policy, state.backend)), times_of(rounds, name))
            self.refit()
        return True

    def conclude(self) -> None:
        """Note why the trials ended: converged, the time, the maximum, or nothing else to try."""
        state, done = self.state, f"{self.done} of {counted(self.goal, 'trial')}"
        if self.best_untried_value() > 0 and self.allocation.seedless:
            state.end(f"ended after {done}: {state.reference_text} fails under further paired seeds")
        elif self.best_untried_value() > 0:  # only the time ends a search that has something left to try
            state.cut(f"the time budget of {self.setup.options.budget_s:.0f} s ended the trials after {done}")
            state.ended = f"ran out of time after {done}"  # the note before says it
        elif self.done >= self.goal:
            state.end(f"ran the {counted(self.goal, 'trial')} that it was allowed")
        elif self.used_up or not isinstance(self.sampler, PrecisionSampler):
            state.end(f"exhausted the space after {done}")
        else:
            # what was cut short before has not converged: no run pays by what was measured
            ended = "ended" if state.cut_short else "converged"
            state.end(f"{ended} after {done}: {self.sampler.finished(state.store.live)}")

    def out_of_time(self) -> bool:
        """Say whether the time budget leaves no room for another trial before the further seeds."""
        budget = self.setup.options.budget_s
        if budget is None:
            return False
        kept = reserve(self.setup, self.allocation, self.state)
        if self.by_hand - self.seen.keys():  # run before anything else but the seed without which nothing is adopted
            due = 0.0 if self.allocation.now.accepted else kept
            needed = self.state.seconds_per_run() + due if due else 0.0
            return self.state.elapsed() + needed > (OVERRUN if due else 1.0) * budget
        kept += self.allocation.duel_s
        needed = self.state.seconds_per_run() + kept + self.state.seconds_to_close()
        return self.state.elapsed() + needed > budget

    def room(self) -> int:
        """Return how many more trials may be started now."""
        busy = len(self.running)
        return 0 if self.out_of_time() else min(self.runner.workers - busy, self.goal - self.done - busy)


def run_study(setup: Setup, runner: PairedRunner, state: SearchState, table: SensitivityTable) -> Decision:
    """Run trials and further seeds, whichever has more value, until no run pays any more; return the answer.

    Args:
        setup: what is searched.
        runner: runs trials beside the reference.
        state: what the search has learnt so far.
        table: gradient errors.

    Raises:
        NothingAcceptableError: five trials in a row failed, ten where another one was measured.
    """
    prior, goals = make_prior(setup, state, table), goals_of(setup, state, table)
    state.refused, otherwise = library_presets(setup.problem)
    for told in otherwise:
        state.note(told)
    sampler, first = _sampler(setup, prior, goals)
    store, problem = state.store, setup.problem
    own = isinstance(sampler, PrecisionSampler)
    expectation = sampler.expectation if own else Expectation(problem, prior, goals)
    store.start(sampler, problem.distributions(), first)
    hand = frozenset(problem.key(params) for _, params in by_hand(first))
    left = partial(seconds_left, setup, runner, state)
    allocation = SeedAllocation(setup, runner, state, expectation, hand, left)
    seen = {problem.key(record.params): record for record in store.learned()}
    goal, done = setup.options.trials, len(store.learned())
    loop = _Loop(setup, runner, state, table, allocation, sampler, goal, done, seen=seen, by_hand=hand)
    loop.backend_due = setup.measured and setup.options.backend == "auto"
    state.listener.phase("search")
    while True:
        known = len(store.records), len(state.measured_errors)
        _drive(loop)
        if loop.decide_backend():
            state.listener.phase("search")
            _drive(loop)
        state.listener.phase("finalists")
        allocation.run(loop.expected)
        # where a seed is worth more than a trial, and there is time for a trial alone, neither runs
        stuck = known == (len(store.records), len(state.measured_errors))
        exhausted = loop.expected() <= 0 or allocation.seedless or stuck
        if exhausted and not allocation.timed_first() and not allocation.measured_whole():
            break
        state.listener.phase("search")
    loop.conclude()
    answer = allocation.answer()
    answer = answer.with_reasons(*by_parts(setup, answer, allocation.duels))
    return explained(setup, state, answer, table, expectation)


def _sampler(setup: Setup, prior: Prior, goals: Goals) -> tuple[optuna.samplers.BaseSampler, list[tuple[str, Params]]]:
    """Return the sampler, and the presets that are measured before it is asked.

    Ours asks for presets where a trial of them pays; only what a person would write by hand is measured anyway. The
    others measure them all.
    """
    options, problem = setup.options, setup.problem
    known = first_presets(presets(problem))
    sampler = make_sampler(options.sampler, problem, prior, goals, presets=known, seed=options.seed)
    hand = by_hand([preset for preset in known if not problem.is_script(preset[1])])
    if not isinstance(sampler, PrecisionSampler):
        others = [preset for preset in known if preset not in hand]
        return sampler, [*hand, *others][: max(FEWEST_PRESETS, options.trials // 2, len(hand))]
    near = [name for name, (slower, _) in setup.steps.shapes.items() if slower <= NEAR][1:]
    first = (hand or [preset for preset in known if not problem.is_script(preset[1])])[:2]
    return sampler, hand + [
        (f"{name}, {other}", {**params, VARIANT: other}) for other in near for name, params in first
    ]


def _drive(loop: _Loop) -> None:
    """Run trials until they are used up, further seeds have more value, or no trial pays."""
    runner = loop.runner
    with runner.threads(runner.workers, "trial") as threads:
        while loop.running or loop.wants_more():
            asked = 0
            while loop.room() > 0 and loop.wants_more() and asked < ASKS_PER_TRIAL * loop.goal:
                asked += 1
                trial = loop.state.store.ask()
                params = dict(trial.params)  # Optuna copies them deeply every time
                known = loop.seen.get(loop.setup.problem.key(params))
                if known is not None:
                    loop.state.store.forget(trial, known)
                    continue
                queued, proposed = str(trial.user_attrs.get("preset", "")), loop.proposed(params)
                name = queued or (proposed.preset if proposed is not None else "")
                exploratory = proposed is not None and proposed.exploratory and not queued
                tags = (*(("preset",) if name else ()), *((EXPLORATORY,) if exploratory else ()))
                number = loop.state.store.next_number()
                name = name or f"trial {number}" + (f", {params[VARIANT]}" if loop.runner.is_elsewhere(params) else "")
                future = threads.submit(loop.trial, number, name, params, tags)
                loop.running[future] = trial
            if not loop.running:
                loop.used_up = loop.used_up or asked >= ASKS_PER_TRIAL * loop.goal
                return
            finished, _ = wait(loop.running, return_when=FIRST_COMPLETED)
            for future in sorted(finished, key=lambda f: loop.running[f].number):
                loop.finish(loop.running.pop(future), future.result())
