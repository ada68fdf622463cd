"""Duels of a search: the speed of whatever decides is timed beside the script's own, in turns of a few steps.

Step times of two trials a minute apart may differ by a quarter on a busy machine. So what a verdict rests on (policies
that people write by hand, what would be adopted, and what is tied with it) is timed again in blocks of steps that take
turns, each in a process of its own (:mod:`autoprec.trial.inside.forked_duel`) or, where the script cannot be
forked, all in one (:mod:`autoprec.trial.inside.duel`); its speed-up has a 95 % interval from then on. A duel is a run
of its own in the study; its losses mean nothing, and what the loss says of a policy comes from paired trials.

Where the runs of a search compile blocks (:mod:`autoprec.tuning.by_block`), so do its duels, which then only rank; what
would be the answer, and what people write by hand, is in a last one of whole models, whose speeds stand.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autoprec.policy import CommunicationPolicy, OptimizerPolicy, Policy, compiles
from autoprec.support.plain import Document
from autoprec.support.units import counted, speed_text
from autoprec.trial.intervals import FEWEST, median_interval, ratio_interval
from autoprec.trial.probe_log import append_round, read_rounds
from autoprec.trial.protocol import REFERENCE, DuelRounds, DuelSpec, Probe, TrainSpec, TrialResult
from autoprec.tuning.decide.decision import Standing
from autoprec.tuning.decide.metrics import step_time
from autoprec.tuning.decide.noise import student95
from autoprec.tuning.decide.sampler.expectation import MODEL_RESOLUTION
from autoprec.tuning.libraries.choice import BACKENDS
from autoprec.tuning.paired import OVERRUN, PairedRunner, room_for
from autoprec.tuning.schedule import CACHED_COMPILE
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import BY_BLOCK, DUEL, LEAST_NOISE, MOST_NOISE, Metric, Params, Run, last_duels

#: Half the width of an interval that is enough, relative to the speed-up.
PRECISE = 0.02
#: Seconds of its own that a duel of one policy takes at most, for each further one, and in runs of the reference.
_FIRST_S, _EACH_S, _RUNS = 12.0, 7.0, 1.5
#: Policies of a second duel, and seconds of its own that it takes at most: page faults make two processes of one
#: program differ by 4 to 6 % (standard deviation), so that it takes thirty rounds to know a speed-up within 2 %.
AGAIN, AGAIN_S = 3, 40.0
#: Half the width from which on there are further ones, up to so many: the fastest of three was once 13 % slower (dlrm).
_ROUGH, _MOST_AGAIN = 0.04, 3
#: Seconds of a block in the shortest duel that a time budget keeps time for.
_SHORT_BLOCK_S = 0.25
#: Processes that a duel goes on in where the script ends soon, and steps of a run of those that are timed apart.
_PROCESSES, STEPS_APART, WARMUP_APART = 4, 6, 2
#: Policies of one duel: each holds its compiled graphs, or a model.
MOST_AT_ONCE = 4


class Duels:
    """Times policies against the reference, where times are measured at all."""

    def __init__(self, setup: Setup, runner: PairedRunner, state: SearchState) -> None:
        self._setup, self._runner, self._state = setup, runner, state
        self._tried: set[tuple[str, bool]] = set()
        #: Duels of each policy beyond its first, those of an earlier session included.
        self._again = Counter(run.name for run in state.store.records if run.kind == DUEL and run.ok)
        self._again -= Counter(set(self._again))
        #: Of whole models, and of blocks.
        self._rounds: dict[bool, list[dict[str, float]]] = {False: [], True: []}

    def between(self, one: Standing, other: Standing) -> tuple[float, float, float] | None:
        """Return how many times as fast one policy is as another, with its 95 % interval; None if not both were timed.

        Of two that were timed apart the interval is that of their intervals, which is wider.
        """
        for rounds in self._rounds.values():  # those of whole models first
            if (found := ratio_interval(rounds, other.name, one.name)) is not None:
                return found
        if None in (bounds := (one.low, one.high, other.low, other.high)):
            return None
        own_low, own_high, low, high = (float(bound or 0.0) for bound in bounds)
        return one.speedup / other.speedup, own_low / high, own_high / low

    def known(self, *, whole: bool = False) -> dict[str, Run]:
        """Return what is known of each policy's speed, by name; ``whole``: only by duels of whole models."""
        records = self._state.store.records
        return last_duels([run for run in records if BY_BLOCK not in run.tags] if whole else records)

    def wanted(self, runs: Sequence[Run], *, whole: bool = False) -> list[Run]:
        """Return those of some runs that can be timed in a duel, one of whole models if asked, and were not yet."""
        if not self._setup.measured:
            return []
        known = self.known(whole=whole)
        asked = {run.name: run for run in runs if run.ok and run.policy and run.name not in known}
        return [run for name, run in asked.items() if (name, self._by_block(whole)) not in self._tried]

    def _by_block(self, whole: bool) -> bool:
        return self._runner.by_block.active and not whole

    def least_s(self, runs: Sequence[Run], *, whole: bool = False) -> float:
        """Return the wall-clock seconds of the shortest duel that gives these runs an interval; 0 without runs."""
        count = len(self.wanted(runs, whole=whole)[:MOST_AT_ONCE])
        return self._least_s(count) + self._compile_s(count, self._by_block(whole)) if count else 0.0

    def time(self, runs: Sequence[Run], rivals: Sequence[Run] = (), *, whole: bool = False) -> bool:
        """Time policies that were not yet, a few at once; returns whether anything was learnt.

        Args:
            runs: of a policy each, what an answer rests on first; a time budget that is short leaves out the last.
            rivals: are timed beside them where there is room, whether they were before or not.
            whole: as the script compiles its model, also where runs compile blocks.
        """
        wanted, by_block = _beside(self.wanted(runs, whole=whole), rivals, MOST_AT_ONCE), self._by_block(whole)
        if not wanted:
            return False

        def seconds() -> float:
            return self._seconds(len(wanted), may_overrun=True, compile_s=self._compile_s(len(wanted), by_block))

        while wanted and seconds() <= 0:
            wanted.pop()
        if not wanted:
            self._state.cut(
                "the time budget left no time to time the policies beside each other that the answer rests on"
            )
            return False
        self._tried |= {(run.name, by_block) for run in wanted}
        return self._time(wanted, seconds(), by_block=by_block)

    def time_again(self, picked: Sequence[Run], rivals: Sequence[Run]) -> bool:
        """Time once more what is not known well yet, where a time budget leaves the time; says whether that was done.

        The fastest of several that were timed is on average slower than it seemed. Rounds of all duels count.

        Args:
            picked: policies, each of them timed.
            rivals: are timed beside them if they were timed; all once, what is still rough up to three times.
        """
        known = {name: half_width(run) for name, run in self.known().items()}

        def may(run: Run) -> bool:
            most = _MOST_AGAIN if known.get(run.name, 0.0) > _ROUGH else 1
            return run.name in known and self._again[run.name] < most

        unsure = [run for run in picked if may(run) and known[run.name] > PRECISE]
        wanted = _beside(unsure, list(filter(may, rivals)), AGAIN)
        if not self._setup.measured or not wanted or not self._can_fork(wanted):
            return False
        within = min(AGAIN_S, self._seconds(len(wanted), usual_s=AGAIN_S))
        self._again.update(run.name for run in wanted)
        return within > 0 and self._time(wanted, within)

    def _time(self, wanted: Sequence[Run], within: float, *, by_block: bool = False) -> bool:
        with self._booked(run.name for run in wanted):
            return self._timed(wanted, within, by_block=by_block)

    @contextmanager
    def _booked(self, names: Iterable[str]) -> Iterator[None]:
        """Say whose duel it is, and count its seconds."""
        began = time.monotonic()
        self._state.listener.phase("duel", ", ".join(names))
        yield
        self._state.seconds.duels_s = (self._state.seconds.duels_s or 0.0) + time.monotonic() - began

    def _timed(self, wanted: Sequence[Run], within: float, *, by_block: bool) -> bool:
        began = time.time(), time.monotonic()
        here = [run for run in wanted if not self._runner.is_elsewhere(run.params)]
        together, failure, known = list[Run](), "", self._rounds[by_block]
        for forks, group in self._groups(here):
            exchanged = [run for run in group if forks or can_be_exchanged(run.policy)]
            spec = self._spec(forks=forks, by_block=by_block)
            policies = {run.name: self._runner.as_run(run.policy) for run in exchanged}
            share = within * len(group) / len(here)
            rounds, failed, refused = timed_together(self._runner.duel, spec, policies, share)
            known += rounds
            failure = failure or failed or "; ".join(f"{name}: {why}" for name, why in refused.items())
            together += exchanged
        if failure:
            self._state.note(f"a duel failed ({failure}): times are those of trials")
        apart = [run for run in wanted if run not in together]
        times = {run.name: times_of(known, run.name) for run in together}
        times |= {run.name: self._apart(run, within, by_block=by_block) for run in apart}
        tags, seconds = (BY_BLOCK,) if by_block else (), time.monotonic() - began[1]
        timed = [run for run in wanted if len(times[run.name]) >= FEWEST]
        found = [self._store(run, times[run.name], tags, began[0], seconds) for run in timed]
        if found:  # what gave no interval is known to the next session, which does not try it again
            self._runner.duels_are_stored()
        short = [run.name for run in together if len(times[run.name]) < FEWEST]
        if short and not failure and self._setup.options.budget_s is not None:
            self._state.cut("the time budget ended a duel before it had an interval")
        elif short and not failure:
            took = f"{counted(min(len(times[name]) for name in short), 'round')} in {within:.0f} s"
            self._state.note(f"a duel took {took}, and an interval takes {FEWEST}: no speed of {', '.join(short)}")
        if found:
            speeds = {one.name: one.metrics["speedup"] for one in found}
            told = [f"{name} {speed_text(speed.value, speed.low, speed.high)}" for name, speed in speeds.items()]
            how = "its blocks compiled, to rank them" if by_block else "in turns"
            self._state.listener.note(f"timed beside the script, {how}: {', '.join(told)}")
        return bool(found)

    def _spec(self, *, forks: bool, by_block: bool) -> DuelSpec:
        """Return a duel beside the reference, without its contenders and the seconds that it may take."""
        return replace(
            self._runner.duel_spec(self._setup.reference_policy(), compiling=not forks),
            side_by_side=2 if forks else 1,
            on_the_clock=self._setup.options.budget_s is not None,
            by_block=by_block,
        )

    def _groups(self, runs: Sequence[Run]) -> Iterator[tuple[bool, list[Run]]]:
        """Yield policies that are timed in one way, and whether each has a process: none does that compiles."""
        for compiled in (False, True):
            group = [run for run in runs if compiles(run.policy) is compiled]
            if group:
                yield self._can_fork(group), group

    def by_backend(self, run: Run, policies: Mapping[str, Document]) -> tuple[list[dict[str, float]], dict[str, str]]:
        """Time a policy beside itself, as it is run by each of several backends.

        Args:
            run: of the policy.
            policies: backend -> the policy whose evidence names it.

        Returns:
            Milliseconds per step by backend, round by round; and why a backend was not timed. Nothing where a time
            budget leaves no time for it.
        """
        by_block = self._by_block(False)
        within = self._seconds(len(policies), compile_s=self._compile_s(len(policies), by_block))
        if within <= 0 or self._runner.is_elsewhere(run.params) or not can_be_exchanged(run.policy):
            return [], {}
        spec = replace(self._spec(forks=self._can_fork([run]), by_block=by_block), by_backend=True)
        with self._booked(f"{run.name} by {name}" for name in policies):
            rounds, failed, refused = timed_together(self._runner.duel, spec, policies, within)
        return rounds, dict.fromkeys(policies, failed) if failed else refused

    def book(self, run: Run, times: Sequence[tuple[float, float]]) -> None:
        """Store what the duel of backends says of a policy by the fastest of them.

        Args:
            run: of the policy, whose evidence names the backend.
            times: milliseconds per step of the reference and of the policy, round by round.
        """
        by_block = (BY_BLOCK,) if self._by_block(False) else ()
        self._store(run, times, (*by_block, BACKENDS))
        self._runner.duels_are_stored()

    def _store(
        self,
        run: Run,
        times: Sequence[tuple[float, float]],
        tags: tuple[str, ...],
        started: float = 0.0,
        seconds: float = 0.0,
    ) -> Run:
        """Store what a duel says of a policy, and return it."""
        done = duel_run(run.name, run.policy, times, self._state.reference.step_ms)
        number = self._state.store.next_number()
        done = replace(done, number=number, params=run.params, tags=tags, started=started, seconds=seconds)
        self._state.store.add(done)
        return done

    def _can_fork(self, runs: Sequence[Run]) -> bool:
        """Say whether each contender can have a process: nothing is compiled, and memory holds another model."""
        eager = not any(compiles(run.policy) for run in runs)
        host, fits = self._setup.host, room_for(max(1, int(self._state.reference.memory_bytes))) > 0
        return host.launch == "fork" and eager and not host.compiled and fits

    def _seconds(self, count: int, *, usual_s: float = 0.0, may_overrun: bool = False, compile_s: float = 0.0) -> float:
        """Return the seconds that a duel may take; 0 where the budget leaves too few for an interval.

        Without a budget they are the process's own; with one they are on the clock. What the answer rests on may end
        after the budget, as a trial may (``may_overrun``).
        """
        state, budget = self._state, self._setup.options.budget_s
        least = self._least_s(count)
        most = max(least, usual_s or usual_seconds(count), _RUNS * self._run_s())
        if budget is None:
            return most
        used = state.elapsed() + state.seconds_to_close() + compile_s
        if budget - used >= least:
            return min(most, budget - used)
        return least if may_overrun and OVERRUN * budget - used >= least else 0.0

    def _least_s(self, count: int) -> float:
        """Return the seconds on the clock of the fewest rounds of so many policies, the start of the process included.

        A round has a block of each contender, in a process that starts, and steps before it that are not timed; a
        script that compiles its model has one process, which compiles before the first round.
        """
        options, start_s = self._setup.options, self._runner.work.start_s
        step_s = self._run_s() / (options.steps + options.warmup)
        each_s = 0.0 if self._setup.host.compiled else start_s
        return start_s + (count + 1) * FEWEST * (each_s + max(step_s, _SHORT_BLOCK_S) + WARMUP_APART * step_s)

    def _run_s(self) -> float:
        """Return the seconds of a run of the reference, without what it compiles."""
        options, seconds = self._setup.options, self._state.seconds
        steps = options.steps + options.warmup
        return seconds.reference_run_s or 0.0 if seconds.step_s is None else steps * seconds.step_s

    def _compile_s(self, count: int, by_block: bool) -> float:
        """Return the seconds in which so many contenders of a duel and the reference compile; 0 for an eager script.

        Graphs of blocks, of the reference and of one policy, which is run before, are in torch's cache.
        """
        compile_s = self._state.seconds.compile_s or 0.0
        if by_block:
            return CACHED_COMPILE * (count + 1) * compile_s / self._setup.host.blocks
        return (2 * CACHED_COMPILE + count - 1) * compile_s

    def _apart(self, run: Run, within_s: float, *, by_block: bool) -> list[tuple[float, float]]:
        """Return times of adjacent runs, of a policy that changes what is stored and cannot be taken off again."""

        def short(policy: Document | None, params: Params) -> TrainSpec:
            return self._runner.train_spec(policy, params, steps=STEPS_APART, warmup=WARMUP_APART, by_block=by_block)

        both = [(self._setup.reference_policy(), {}), (run.policy, run.params)]
        log = self._runner.turns([short(*one) for one in both])
        rounds, taken = read_rounds([log] if log is not None else [])
        found, began = times_of(rounds, run.name), time.monotonic() - taken
        while len(found) < 2 * FEWEST and (len(found) < FEWEST or time.monotonic() - began < within_s):
            contest = both[::-1] if len(found) % 2 else both
            results = [self._runner.on_host(short(*one)) for one in contest]
            if not all(result.ok for result in results):
                break
            ms = [step_time(result.step_ms, result.warmup) for result in results]
            found.append((ms[0], ms[1]) if not len(found) % 2 else (ms[1], ms[0]))
            times = {REFERENCE: found[-1][0], run.name: found[-1][1]}
            append_round(log or "", times, time.monotonic() - began)
            budget = self._setup.options.budget_s
            if budget is not None and self._state.elapsed() > budget:
                break
        if log is not None:
            log.unlink(missing_ok=True)
        return found


def _beside(runs: Sequence[Run], rivals: Sequence[Run], most: int) -> list[Run]:
    """Return so many of some runs and their rivals; nothing where there are none of the former."""
    return [*runs, *(rival for rival in rivals if rival not in runs)][:most] if runs else []


def half_width(run: Run) -> float:
    """Return half the width of a duel's 95 % interval, relative to its speed-up."""
    metric = run.metrics["speedup"]
    return (float(metric.high or math.inf) - float(metric.low or 0.0)) / (2.0 * metric.value)


def usual_seconds(count: int) -> float:
    """Return the seconds of its own that a duel of so many policies may take."""
    return _FIRST_S + _EACH_S * count


def timed_together(
    run: Callable[[DuelSpec], TrialResult],
    spec: DuelSpec,
    policies: Mapping[str, Document],
    within_s: float,
) -> tuple[list[dict[str, float]], str, dict[str, str]]:
    """Time policies beside the reference in one process, or in a few where the script ends soon.

    Args:
        run: runs one trial.
        spec: of the reference.
        policies: name -> document; each :func:`can_be_exchanged`.
        within_s: a process's own seconds, or where the spec says so those on the clock, which a time budget counts;
            those in which it compiles are not among them.

    Returns:
        Milliseconds per step by name, :data:`~autoprec.trial.protocol.REFERENCE` among them, round by round; why a
        process failed, empty where none did; and why policies were refused, by name.
    """
    rounds: list[dict[str, float]] = []
    probes, began = tuple(Probe(*named) for named in policies.items()), time.monotonic()
    for _ in range(_PROCESSES if probes else 0):
        left = max(1.0, within_s - (time.monotonic() - began))
        result = run(replace(spec, probes=probes, within_s=left, precision=PRECISE))
        if not isinstance(result.answer, DuelRounds):
            return rounds, f"{result.status}: {result.reason}", {}
        found, refused = result.answer.rounds, dict(result.answer.refused)
        rounds += found
        if refused:
            return rounds, "", refused
        if not found or len(rounds) >= FEWEST or time.monotonic() - began > within_s:
            break
    return rounds, "", {}


def times_of(rounds: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """Return milliseconds per step of the reference and of a policy, in the rounds that it took part in."""
    return [(one[REFERENCE], one[name]) for one in rounds if name in one]


def duel_run(name: str, policy: Document, times: Sequence[tuple[float, float]], reference_ms: float) -> Run:
    """Return a duel as a run: a speed-up, and the step time that follows from the reference's, with intervals.

    Args:
        name: of the policy.
        policy: its document.
        times: milliseconds per step of the reference and of the policy, round by round.
        reference_ms: step time of the reference, to which the ratio is applied.
    """
    middle, low, high = median_interval([reference / own for reference, own in times])
    step = Metric(reference_ms / middle, low=reference_ms / high, high=reference_ms / low)
    metrics = {"speedup": Metric(middle, low=low, high=high), "step_time_ms": step}
    return Run(0, DUEL, name, {}, policy, "ok", metrics=metrics)


def can_be_exchanged(document: Document) -> bool:
    """Say whether a policy can be taken off between two steps: it leaves weights, state and gradients as they are."""
    policy = Policy.model_validate({key: value for key, value in document.items() if key != "evidence"})
    plain = policy.optimizer == OptimizerPolicy() and policy.communication == CommunicationPolicy()
    return plain and policy.loss_scaling == "none" and not policy.phases


def drift(speedups: Sequence[tuple[float, float]]) -> float:
    """Return by what factor the speed-ups of trials are off on a machine that has changed since the reference ran.

    The reference of all trials ran minutes before them: its time divides every one of their speed-ups. Where policies
    were in a duel as well, their ratios (standard deviation 3 %, that of the reference's time 6 %) say how it is now.

    Args:
        speedups: (by its trial, by its duel) of each policy that has both.
    """
    logs = [math.log(duel / trial) for trial, duel in speedups if trial > 0.0]
    return math.exp(sum(logs) / (len(logs) + 0.25)) if logs else 1.0


def timing_noise(measured_times: bool, speedups: Sequence[Sequence[float]]) -> float:
    """Return the relative difference of two median speed-ups that noise alone stays below with 95 %.

    The spread over the seeds is pooled over the candidates; with few seeds it is itself uncertain (Student's t).
    Modelled ones have the model's resolution instead.
    """
    if not measured_times:
        return MODEL_RESOLUTION
    several = [s for s in speedups if len(s) > 1]
    if not several:
        return MOST_NOISE
    free = sum(len(s) - 1 for s in several)
    spread = math.sqrt(sum((len(s) - 1) * (statistics.stdev(s) / statistics.fmean(s)) ** 2 for s in several) / free)
    error = spread * math.sqrt(2 / statistics.fmean(len(s) for s in several))
    return min(MOST_NOISE, max(LEAST_NOISE, student95(free) * error))
