"""Further paired seeds for what was tried: as many as the decision needs, where they change it.

One short trial cannot tell 0.25 % from chance (one paired seed of FP8 has a standard deviation near 0.15 %). All runs,
trials and further seeds alike, are one pool: the model that is fitted to them says what each policy's mean over seeds
may be at most (:mod:`autoprec.tuning.decide.ranking`), and which next seed pays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from autoprec.trial.protocol import OUT_OF_TIME
from autoprec.tuning.by_block import is_whole, whole_seconds
from autoprec.tuning.decide.decision import Decision, Rules, Standing, choose
from autoprec.tuning.decide.problem import Point
from autoprec.tuning.decide.ranking import Ranking, fewest_seeds, rank
from autoprec.tuning.decide.sampler.expectation import Expectation
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.paired import OVERRUN, PairedRunner
from autoprec.tuning.phases.duels import PRECISE, Duels
from autoprec.tuning.phases.gains import beside_compiled, best_preset, over_compiled, over_preset, with_fastest
from autoprec.tuning.phases.measuring import PairedSeeds, first_run, leader
from autoprec.tuning.phases.reasons import why_nothing, with_faster, with_unsure
from autoprec.tuning.phases.safety import SAFER, safer_policy, what_was_taken_back
from autoprec.tuning.phases.sensitivity import measure_errors
from autoprec.tuning.schedule import CONTENDERS
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import fastest_plain, sixteen_bit_speedup
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import Metric, Run
from autoprec.tuning.timing.speeds import drift, timing_noise, worth_timing

#: Paired seeds under which the script as written may fail before no further one is tried.
UNUSABLE_SEEDS = 2
#: What a measured gradient error may be of the predicted one (0.7 to 1.4 of mixed assignments, and of unlike batches).
_OFF_BY = 1.5
#: How many times as fast as by its trials a policy may be beside others (an LSTM under autocast: 1.22x, then 1.7x).
_OFF_TRIALS = 1.5


class SeedAllocation:
    """Pools all runs and chooses which policy gets the next paired seed.

    Args:
        expectation: the models that are fitted to every run.
        by_hand: keys of what people write by hand.
        seconds_left: returns how long the search usually takes from here on; at most, with a time budget.

    Attributes:
        now: accepted policies, incumbent, next seed.
    """

    def __init__(
        self,
        setup: Setup,
        runner: PairedRunner,
        state: SearchState,
        expectation: Expectation,
        by_hand: Collection[Point] = (),
        seconds_left: Callable[[SeedAllocation], float] = lambda _: 0.0,
    ) -> None:
        self._setup, self._runner, self._state, self.expectation = setup, runner, state, expectation
        self._by_hand_keys, self._seconds_left = by_hand, seconds_left
        self._rows: dict[int, list[Run]] = {}
        self._tried: list[Run] = []
        self._seeds = PairedSeeds(setup, runner, state)
        self._asked_errors: set[str] = set()
        self._known: dict[str, Run] = {}  # duels
        self._drift = 1.0
        self._eased: set[str] = set()
        self._is_over = self._is_timed = False  # a run was ended for want of time; what is near was timed
        self.duels = Duels(setup, runner, state)
        self.now: Ranking = self.update()

    @property
    def fewest(self) -> int:
        """Paired seeds under which a policy must have been measured to be accepted."""
        return fewest_seeds(self._setup.options.seeds, uninformative=self.expectation.goals.uninformative)

    @property
    def seed_s(self) -> float:
        """Seconds of one more paired seed."""
        return self._state.seconds_per_seed(self._setup.host.setup_s, self._runner.final_workers)

    @property
    def seedless(self) -> bool:
        """Whether the script as written fails under further paired seeds, so that nothing can be accepted."""
        return len(self._seeds.unusable) >= UNUSABLE_SEEDS

    def runs(self) -> list[Run]:
        """Return every run, with the times that duels show."""
        return [self._corrected(run) for runs in self._rows.values() for run in runs]

    def _corrected(self, run: Run) -> Run:
        """Return a run with the step time of its policy's duel, or with what duels say of the script's own time."""
        duel = self._known.get(run.name)
        if "step_time_ms" not in run.metrics or not self._known:
            return run
        if duel is not None:
            return run.with_metrics({"step_time_ms": duel.metrics["step_time_ms"]})
        if run.seed:  # its reference ran beside it
            return run
        changed = {"step_time_ms": 1.0 / self._drift, "speedup": self._drift}
        return run.with_metrics({name: Metric(run[name] * factor) for name, factor in changed.items()})

    def update(self) -> Ranking:
        """Take in what was measured since, refit, and rank anew."""
        known, is_script = self._state.store.learned(), self._setup.problem.is_script
        self._tried = [record for record in known if not is_script(record.params)]
        further: dict[str, list[Run]] = {}
        for record in self._state.store.records:
            if record.kind == "finalist":
                further.setdefault(record.name, []).append(record)
        self._rows, self._known = {}, self.duels.known()
        for record in self._tried:
            rows = sorted(further.get(record.name, ()), key=lambda r: r.seed)
            whole = [row for row in rows if row.seed == record.seed]  # says more of that seed than blocks did
            self._rows[record.number] = [*(whole[-1:] or [record]), *(row for row in rows if row.seed != record.seed)]
        self._drift = drift([(record["speedup"], self._known[record.name]["speedup"]) for record in self._duelled()])
        rules = self._rules()
        self.expectation.goals = replace(self.expectation.goals, uninformative=rules.uninformative is not None)
        self.expectation.fit(self.runs())
        self._ok = [record for record in self._tried if record.ok]
        entrants = [(record.params, self._standing(record)) for record in self._ok]
        self.now = self._state.ranking = rank(self.expectation, entrants, rules, seeds=self._setup.options.seeds)
        return self.now

    def _duelled(self) -> list[Run]:
        """Return the first trials, under the script's own seed, of policies that were in a duel."""
        return [run for run in self._tried if run.ok and run.seed == 0 and run.name in self._known]

    def run(self, elsewhere: Callable[[], float]) -> None:
        """Give seeds to policies that may still change the answer, until none can or a new policy has more value.

        Args:
            elsewhere: returns what the best policy that was not tried yet is expected to gain.
        """
        began = time.monotonic()
        while True:
            self._confirm()
            if self.now.next is None and not self.now.accepted and self._perturb_all():
                self.update()
            if self.now.next is None or elsewhere() > self.now.gain or self._must_end():
                break
            following = self._ok[self.now.next]
            if not (self._may_break_limit(following) and self._measure_error(following)):
                self._one_more(following)
        self._state.seconds.finalists_s = (self._state.seconds.finalists_s or 0.0) + time.monotonic() - began

    def _must_end(self) -> bool:
        """Say whether the search has to end here.

        It ends where the time budget is used up, and where the script itself fails under one seed after the other. A
        second seed of one policy may end a little after the budget, as without it nothing can be adopted.
        """
        if self.seedless:
            name, failed = self._state.reference_text, [*self._seeds.unusable.values()]
            self._state.cut(f"{name} failed under {len(failed)} further paired seeds: {failed[0]}")
            return True
        budget = self._setup.options.budget_s
        if self._is_over:
            return True
        if budget is None or not self._is_late():
            return False
        enough = OVERRUN * budget - self._state.elapsed() > self.seed_s
        if enough and all(len(rows) < self.fewest for rows in self._rows.values()):
            return False
        self._state.cut("the time budget ended the paired seeds while one more could still have changed the answer")
        return True

    @property
    def duel_s(self) -> float:
        """Seconds kept for a duel of the best acceptable policy and the best by hand; 0 where they had one."""
        best = min((self._ok[i] for i in self.now.accepted), key=self._state.cost, default=None)
        rests = [] if best is None else [best, *self._by_hand()[:1]]
        whole = self.duels.least_s(rests, whole=True) if self._runner.by_block.active else 0.0
        return self.duels.least_s(rests) + whole

    def _is_late(self) -> bool:
        """Whether the time budget leaves no room for one more paired seed."""
        budget = self._setup.options.budget_s
        needed = self.seed_s + self.duel_s + self._state.seconds_to_close()
        return budget is not None and self._state.elapsed() + needed > budget

    # --- measuring --------------------------------------------------------------------------------------------------
    def _one_more(self, record: Run) -> None:
        """Run a policy under its next paired seed, beside that seed's reference where it was not run yet."""
        seed = self._rows[record.number][-1].seed + 1
        while seed in self._seeds.unusable:
            seed += 1
        self._measure(record, seed, by_block=self._runner.by_block.active and not is_whole(record))

    def _measure(self, record: Run, seed: int, *, by_block: bool) -> None:
        """Run a policy under a paired seed, beside a reference that is compiled likewise, and judge all again."""
        state = self._state
        plan = replace(record, kind="finalist", tags=("finalist",), seed=seed)
        done = self._seeds.measure(plan, self._error(record), by_block=by_block)
        if done is None:
            return
        if done.status == OUT_OF_TIME:
            self._is_over = True
            state.cut(f"the time budget ended paired seed {seed} of {record.name}: {done.reason}")
            return
        # stored as soon as it is known, so that a killed search repeats as little as possible
        self._book(done, 1 + sum(r.kind == "finalist" for r in state.store.records))

    def _book(self, done: Run, count: int) -> None:
        """Store a run, judge all again, and tell of it, the ``count``-th of its kind."""
        total = 0 if done.kind == "finalist" else self._setup.options.trials
        done = replace(done, number=self._state.store.next_number())
        self._state.store.add(done)
        self.update()
        self._state.listener.trial(done, count, total, leader(self._setup, self._state), self._seconds_left(self))

    def _perturb_all(self) -> bool:
        """Run the benign perturbation under every seed so far where gaps beyond the budget are held against all.

        The noise floor is that of one seed. Under another, or near a loss of zero, the same rounding may move the loss
        much further: that is known before anything is rejected for such a gap.
        """
        budget, known = self._setup.options.tolerance, len(self._seeds.benign)
        runs = [run for rows in self._rows.values() for run in rows if run.ok]
        if all(run["divergence"] <= budget for run in runs) or self._must_end():
            return False
        self._seeds.perturb(*sorted({run.seed for run in runs} - {0}))
        return len(self._seeds.benign) > known

    def _confirm(self) -> None:
        """Measure the gradient error of the best that is accepted by a predicted one, and judge it again."""
        while self.now.accepted:
            best = min((self._ok[i] for i in self.now.accepted), key=self._state.cost)
            if not self._measure_error(best):
                return

    def _measure_error(self, record: Run) -> bool:
        """Measure the gradient error of a policy as a whole, and judge all again; false where it was measured."""
        if record.name in self._asked_errors or self._runner.is_over:
            return False
        self._asked_errors.add(record.name)  # where it cannot be measured, it stays the predicted one
        found = measure_errors(self._setup, self._runner, self._state, {record.name: record.policy})
        self._state.measured_errors.update(found)
        self.update()
        return True

    def _may_break_limit(self, record: Run) -> bool:
        """Say whether the gradient error of a policy, once measured, may refuse it: that takes no further seed."""
        limit = self._rules().gradient_limit
        return limit is not None and self._error(record) * _OFF_BY > limit

    def _error(self, record: Run) -> float:
        """Return the gradient error of a policy as a whole: measured where it was, else predicted."""
        return self._state.measured_errors.get(record.name, record["gradient_error"])

    # --- judging ----------------------------------------------------------------------------------------------------
    def _rules(self) -> Rules:
        return self._state.rules(self._seeds.baseline)

    def _standing(self, record: Run) -> Standing:
        runs, duel = [self._corrected(run) for run in self._rows[record.number]], self._known.get(record.name)
        one = Standing.of(record.name, [*runs, *([duel] if duel is not None else [])], self._error(record))
        memory, preset = one.memory_bytes or record["memory_bytes"], record.kind == "preset"
        return replace(one, memory_bytes=memory, preset=preset, run=record)

    def _decide(self) -> Decision | None:
        """Return the decision over the script and everything measured; None where nothing was under enough seeds."""
        setup, state = self._setup, self._state
        # lowerings that were taken back are confirmed by one run: the policy itself was measured under more
        final = [one for one in self.now.standings if one.seeds >= self.fewest or SAFER in _run(one).tags]
        if not final:
            return None
        memory = state.reference.memory_bytes
        script = Standing("script as written", 1.0, (0.0,), memory_bytes=memory, reference=True)
        fit = {one.name for one in self.now.standings if not one.rejection}
        compiled = [one for one in final if one.name in fit and one.speedup > 1.0 and self._is_known(_run(one))]
        if len(compiled) >= CONTENDERS:  # no further whole model is compiled for an estimate
            timed = self.duels.known(whole=True)
            final = [one for one in final if self._is_known(_run(one)) or one.name in timed or one.name not in fit]
        noise = timing_noise(setup.measured, [self._comparable(_run(one)) for one in final])
        decision = choose(
            [script, *worth_timing(final, noise)],
            self._rules(),
            objective=setup.options.objective,
            timing_noise=noise,
            reference_memory=memory,
            sixteen_bit=sixteen_bit_speedup(setup, state.store.records),
        )
        return replace(decision, timing_noise=noise)

    def _is_known(self, record: Run) -> bool:
        """Whether a policy was run as the script, or the policy itself, compiles the model.

        A run that failed by block may not have come as far as to say that it compiled blocks.
        """
        return any(is_whole(run) and (run.ok or run.seed == record.seed) for run in self._rows[record.number])

    def _comparable(self, first: Run) -> list[float]:
        """Return the speed-ups of a policy over its seeds that were compiled in one way: their spread is noise."""
        rows = self._rows[first.number]
        # a run of the whole model stands for the first one, which is still the one to compare further seeds with
        runs = [run for run in (first, *(row for row in rows if row is not first)) if run.ok]
        blocks, whole = ([run["speedup"] for run in runs if is_whole(run) is how] for how in (False, True))
        return whole if len(whole) > len(blocks) else blocks

    def measured_whole(self) -> bool:
        """Run what would be adopted as the script compiles it, and time it so, beside what people run instead.

        On a GPU the 16-bit run that its gain is given over is run, too.

        Returns:
            Whether anything was learnt: the search then looks again at which run pays.
        """
        decision = self._decide()
        if decision is None or not self._runner.by_block.active:
            return False
        adopted = decision.run if decision.verdict == "adopt" else None
        known, budget = self.duels.known(whole=True), self._setup.options.budget_s
        answers = with_fastest(decision, alone=bool(known) or budget is not None)
        plain = None if self._setup.target.is_cpu else fastest_plain(self._state.store.records)
        asked = {} if adopted is None else {one.name: one for one in (plain, *answers) if one is not None}
        wanted = [record for record in asked.values() if not self._is_known(record)]
        if wanted and adopted is not None and self._measure_error(adopted):
            return True  # of those that are tied the safest is adopted: that may be another one now
        rests = self._timed_whole(decision, answers)
        needed = self.duels.least_s(rests, whole=True) + self._state.seconds_to_close()
        needed += len(wanted) * whole_seconds(self._setup, self._state)
        if wanted and budget is not None and self._state.elapsed() + needed > OVERRUN * budget:
            self._state.cut(
                "the time budget left no time to run what would be adopted as the script compiles it, and to time it so"
            )
            return False
        for record in wanted:
            self._measure(record, record.seed, by_block=False)
        timed = [one.run for one in decision.ranking if one.run is not None and one.name in known]
        if self.duels.time(rests, [*rests, *timed], whole=True):
            self.update()
            return True
        return bool(wanted)

    def _timed_whole(self, decision: Decision, answers: list[Run]) -> list[Run]:
        """Return what is timed as the script compiles it: possible answers, the best by hand, and the best preset."""
        hand = self._by_hand()
        if decision.run is None or decision.chosen is None:  # all by hand must have lost before it is to stay
            return [*hand, *(_run(one) for one in self._fit()[:1])]
        best = self._best_preset(decision.chosen)
        return [*answers, *hand[:1], *([best.run] if best is not None and best.run is not None else [])]

    def answer(self) -> Decision:
        """Return the decision, after the runs that it still takes to be sure of it."""
        setup, state = self._setup, self._state
        while True:
            decision = self._decide()
            if decision is None:
                failed = [run for run in self._tried if not run.ok]
                return Decision("stay", (why_nothing(state, self.now.standings, self._rules(), self.fewest, failed),))
            if not (self.measured_whole() or self._made_surer(decision)):
                break
        for name, why in decision.rejected.items():
            state.note(f"{name} was rejected: {why}")
        chosen = decision.chosen
        if chosen is None:
            return with_unsure(decision, self.now.standings, self._rules(), self.fewest)
        if self._runner.by_block.active and setup.measured and chosen.name not in self.duels.known(whole=True):
            bounds = {"low": chosen.low, "high": chosen.high} if chosen.timed else {}
            only = Reason("only_blocks", {"name": chosen.name, "speedup": chosen.speedup} | bounds)
            return replace(decision, verdict="undecided", reasons=(only,))
        over = over_preset(chosen, self._best_preset(chosen), self.duels, decision.timing_noise)
        over += over_compiled(setup, chosen, self.now.standings, self.duels)
        over += what_was_taken_back(setup, self.expectation, chosen, self._tried)
        found = with_faster(state, decision, chosen, self.now.standings, self._rules(), self.fewest)
        return found.with_reasons(*over)

    def _made_surer(self, decision: Decision) -> bool:
        """Make the next run that a decision still takes; false where it takes none.

        That is the gradient error of what is adopted (of those that are tied the safest was taken, by predicted ones),
        the safety pass, a duel of what decides, a further seed of what it shows to be faster, and a second duel.
        """
        if decision.run is not None and self._measure_error(decision.run):
            return True
        steps = (self._take_back, self._time_what_decides, self._seed_of_what_is_faster, self._time_again)
        return any(step(decision) for step in steps)

    def timed_first(self) -> bool:
        """Time what would be the answer, and what people write by hand, once no trial pays; false if that was done.

        What saves too little for its error is taken back before, so that one duel times both. Trials are run minutes
        apart; where their times were wrong, a further one may pay all the same.
        """
        if self._is_timed:
            return False
        decision = self._decide() or Decision("stay", ())
        return self._take_back(decision) or self._time_what_decides(decision)

    def _by_hand(self) -> list[Run]:
        """Return what people write by hand that ran, acceptable ones first, then the fastest."""
        state, key = self._state, self._setup.problem.key
        hand = [record for record in self._ok if key(record.params) in self._by_hand_keys]
        return sorted(hand, key=lambda record: (not state.acceptable(record), state.cost(record)))

    def _time_what_decides(self, decision: Decision) -> bool:
        """Time in a duel what a decision rests on; in the first one also the best by hand and what may be faster.

        A trial's speed is off by up to the timing noise: what is slower than the answer by less may be faster. The gain
        is said over the best preset. To stay all by hand must have lost. A duel of blocks ranks possible answers first.
        """
        rests = [run for i in decision.rests_on if (run := decision.ranking[i].run) is not None]
        if decision.run is not None and decision.chosen is not None:
            best, noise = self._best_preset(decision.chosen), decision.timing_noise
            off = 1.0 + noise if self._is_timed else _OFF_TRIALS
            if best is not None and best.run is not None and decision.chosen.speedup <= best.speedup * off:
                rests = [decision.run, best.run, *rests]
        hand, near = self._by_hand(), self._may_be_faster(decision)
        if not self._is_timed:
            self._is_timed, some = True, hand[:1] if decision.run is not None else hand
            first = [*near, *some] if self._runner.by_block.active else [*some, *rests[1:2], *near]
            rests = [*rests[:1], *first, *rests[1:]]
        rests = beside_compiled(self._setup, decision.run, rests, self._ok)
        if not self.duels.time(rests, [run for run in near if run in hand]):
            return False
        self.update()
        return True

    def _time_again(self, decision: Decision) -> bool:
        """Time once more what would be adopted, which was picked as the fastest, or what an answer to stay refuses.

        Of what people write by hand that is whatever may still be faster than the script. What is adopted is timed
        beside what may be as fast.
        """
        hand = self._by_hand()
        near = [_run(one) for one in self._fit() if one.timed and (one.high or 0.0) > 1.0 + PRECISE]
        picked = [run for run in near if run in hand] if decision.run is None else [decision.run]
        if not self.duels.time_again(picked, self._may_be_faster(decision)):
            return False
        self.update()
        return True

    def _best_preset(self, chosen: Standing) -> Standing | None:
        return best_preset(self._setup, self._state, self.expectation, self.now.standings, self._tried, chosen)

    def _fit(self) -> list[Standing]:
        """Return what nothing speaks against so far, the fastest first."""
        fit = [one for one in self.now.standings if not one.rejection and all(map(math.isfinite, one.divergences))]
        return sorted(fit, key=lambda one: -one.speedup)

    def _may_be_faster(self, decision: Decision) -> list[Run]:
        """Return what may be faster than the answer for all that was timed; where whole models are, by hand first."""
        if self._setup.options.objective != "throughput":
            return []
        chosen, hand = decision.chosen, self._by_hand()
        if chosen is None:
            return [_run(one) for one in self._fit() if one.speedup > 1.0]
        least, noise = chosen.low or chosen.speedup, decision.timing_noise

        def most(one: Standing) -> float:
            return one.high or one.speedup * (_OFF_TRIALS if _run(one) in hand else 1.0 + noise)

        found = [_run(one) for one in self._fit() if one.name != chosen.name and most(one) > least]
        return sorted(found, key=lambda run: run not in hand and not self._runner.by_block.active)

    def _seed_of_what_is_faster(self, decision: Decision) -> bool:
        """Run a seed of what a duel shows to be faster than the answer and that lacks one; false if there is none."""
        chosen = decision.chosen
        least = 1.0 if chosen is None else chosen.high or math.inf
        if self._setup.options.objective != "throughput" or not self._setup.measured:
            return False
        lacking = [one for one in self._fit() if one.seeds < self.fewest and one.is_surely_above(least)]
        if not lacking or self._must_end():
            return False
        self._one_more(_run(lacking[0]))
        return True

    def _take_back(self, decision: Decision) -> bool:
        """Run the policy once without lowerings that save too little for their error; false where there are none."""
        setup, state, name = self._setup, self._state, decision.run.name if decision.run is not None else ""
        wanted = bool(name) and name not in self._eased and setup.options.objective == "throughput"
        wanted = wanted and len(state.store.learned()) < setup.options.trials
        if not wanted or self._runner.by_block.active or self._is_late():
            return False
        self._eased.add(name)
        plan = safer_policy(setup, state, self.expectation, decision, self._tried)
        if plan is None or state.table is None:
            return False
        done = first_run(setup, self._runner, state, plan, state.table.predict(setup.problem, plan.params))
        self._book(done, 1 + len(state.store.learned()))
        if done.ok:
            self._measure_error(done)
        return done.ok


def _run(one: Standing) -> Run:
    """Return the first run of a policy that was tried."""
    assert one.run is not None  # only the script's standing has none
    return one.run
