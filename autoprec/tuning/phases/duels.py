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
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autoprec.policy import compiles
from autoprec.precision.hardware import cores
from autoprec.support.plain import Document
from autoprec.support.units import counted, speed_text
from autoprec.trial.intervals import FEWEST, median_interval, ratio_interval
from autoprec.trial.protocol import DuelSpec
from autoprec.tuning.decide.decision import Standing
from autoprec.tuning.libraries.choice import BACKENDS
from autoprec.tuning.paired import OVERRUN, PairedRunner, room_for
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import BY_BLOCK, DUEL, Metric, Run, last_duels
from autoprec.tuning.timing.in_turns import (
    STEPS_APART,
    WARMUP_APART,
    can_be_exchanged,
    in_turns,
    timed_together,
    times_of,
)

#: Half the width of an interval that is enough, relative to the speed-up.
PRECISE = 0.02
#: Seconds of its own that a duel of one policy takes at most, for each further one, and in runs of the reference.
_FIRST_S, _EACH_S, _RUNS = 12.0, 7.0, 1.5
#: Policies of a second duel, and seconds of its own that it takes at most: page faults make two processes of one
#: program differ by 4 to 6 % (standard deviation), so that it takes thirty rounds to know a speed-up within 2 %.
AGAIN, AGAIN_S = 3, 40.0
#: Seconds of its own that a policy without one of its parts has.
_PART_S = 5.0
#: Half the width from which on there are further ones, up to so many: the fastest of three was once 13 % slower (dlrm).
_ROUGH, _MOST_AGAIN = 0.04, 3
#: Standard deviation of a speed-up from process to process of one program on a CPU, by the page faults of its heap:
#: 1.3 to 3.3 % of two compiled scripts, 6 % of a third whose rounds show it. A duel in one process cannot see it.
PROCESS_SD = 0.03
#: Seconds of a block in the shortest duel that a time budget keeps time for.
_SHORT_BLOCK_S = 0.25
#: Seconds of its own of a usual block that has a process: steps until it has settled, and those that are timed.
_WHOLE_BLOCK_S = 1.4
#: Seconds in which a script's graphs may be read from torch's cache in each block of a duel.
_MOST_COMPILE_S = 5.0
#: Policies of one duel: each holds its compiled graphs, or a model; and of those whose whole runs take turns instead.
MOST_AT_ONCE, MOST_APART = 4, 2


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
        #: Steps after which the script ends, where that was before a duel had its rounds.
        self._ends_after: int | None = None

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
        wanted = self.wanted(runs, whole=whole)[:MOST_AT_ONCE]
        together = sum(can_be_exchanged(run.policy) for run in wanted)
        whole_s, by_block = self._whole_runs_s(len(wanted) - together), self._by_block(whole)
        return whole_s + (self._least_s(together, by_block) + self._compile_s(together, by_block) if together else 0.0)

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
            return self._seconds(len(wanted), by_block, may_overrun=True)

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
            rivals: are timed beside them if they were timed; all once, what is still rough up to three times. Where
                each block compiles before it is timed, only what is rough is, and once.
        """
        known = {name: half_width(run) for name, run in self.known(whole=True).items()}
        enough, often = (_ROUGH, 1) if self._setup.host.compiled else (PRECISE, _MOST_AGAIN)

        def may(run: Run) -> bool:
            most = often if known.get(run.name, 0.0) > _ROUGH else 1
            return run.name in known and self._again[run.name] < most

        unsure = [run for run in picked if may(run) and known[run.name] > enough]
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
        together, alone, failure, known = list[Run](), set[str](), "", self._rounds[by_block]
        for forks, group in self._groups(here, by_block):
            exchanged = [run for run in group if forks or can_be_exchanged(run.policy)]
            spec = self._spec(forks=forks, by_block=by_block)
            policies = {run.name: self._runner.as_run(run.policy) for run in exchanged}
            timed = timed_together(self._runner.duel, spec, policies, within * len(group) / len(here))
            known += timed.rounds
            self._ends_after = timed.ends_after or self._ends_after
            failure = failure or timed.failed or "; ".join(f"{name}: {why}" for name, why in timed.refused.items())
            together += exchanged
            if self._setup.target.is_cpu and timed.alone:
                alone |= {run.name for run in exchanged}
        apart = [run for run in wanted if run not in together]
        if short := self._lacking(together, by_block):  # the script ends too soon, or cannot hold them all
            fewest = min(len(times_of(known, run.name)) for run in short)
            told = (
                f"failed: {failure}" if failure else f"had {counted(fewest, 'round')}, and an interval takes {FEWEST}"
            )
            self._state.note(f"a duel {told}")
            apart += short[:MOST_APART]
            # the others are timed when an answer rests on them
            self._tried -= {(run.name, by_block) for run in short[MOST_APART:]}
        if apart:
            known += self._whole_runs(apart, within, by_block=by_block)
        tags, seconds = (BY_BLOCK,) if by_block else (), time.monotonic() - began[1]
        missing = self._lacking(wanted, by_block)
        found = [
            self._store(run, times_of(known, run.name), tags, began[0], seconds, alone=run.name in alone)
            for run in wanted
            if run not in missing
        ]
        if found:  # what gave no interval is known to the next session, which does not try it again
            self._runner.duels_are_stored()
            speeds = {one.name: one.metrics["speedup"] for one in found}
            said = [f"{name} {speed_text(speed.value, speed.low, speed.high)}" for name, speed in speeds.items()]
            how = "its blocks compiled, to rank them" if by_block else "in turns"
            self._state.listener.note(f"timed beside the script, {how}: {', '.join(said)}")
        elif self._setup.options.budget_s is not None:
            self._state.cut("the time budget ended a duel before it had an interval")
        else:
            self._state.note(f"no speed of {', '.join(run.name for run in missing)} beside the script is known")
        return bool(found)

    def _lacking(self, runs: Sequence[Run], by_block: bool) -> list[Run]:
        """Return those of some policies of which there are too few rounds for an interval."""
        return [run for run in runs if len(times_of(self._rounds[by_block], run.name)) < FEWEST]

    def _whole_runs(self, runs: Sequence[Run], within: float, *, by_block: bool) -> list[dict[str, float]]:
        """Time whole runs of as many policies in turns as a time budget has room for."""
        budget, some = self._setup.options.budget_s, list(runs)
        left = math.inf if budget is None else OVERRUN * budget - self._state.elapsed() - self._state.seconds_to_close()
        while some and self._whole_runs_s(len(some)) > left:
            some.pop()
        return in_turns(self._setup, self._runner, self._state, some, within, by_block=by_block) if some else []

    def _whole_runs_s(self, count: int) -> float:
        """Return the seconds in which so many policies and the reference have an interval by whole runs; 0 of none."""
        options, compile_s = self._setup.options, self._state.seconds.cached_compile_s or 0.0
        share = min(1.0, (STEPS_APART + WARMUP_APART) / (options.steps + options.warmup))
        each_s = self._runner.work.start_s + compile_s + share * self._run_s()
        return FEWEST * (count + 1) * each_s if count else 0.0

    def _spec(self, *, forks: bool, by_block: bool) -> DuelSpec:
        """Return a duel beside the reference, without its contenders and the seconds that it may take."""
        two = self._setup.host.compiled and cores() > 1 and _room(self._state) > 1  # read torch's cache at once
        return replace(
            self._runner.duel_spec(self._setup.reference_policy(), compiling=not forks),
            side_by_side=(3 if two else 2) if forks else 1,
            on_the_clock=self._setup.options.budget_s is not None,
            by_block=by_block,
            precision=PRECISE,
            ends_after=None if forks else self._ends_after,
        )

    def _groups(self, runs: Sequence[Run], by_block: bool) -> Iterator[tuple[bool, list[Run]]]:
        """Yield policies that are timed in one way, and whether each block has a process."""
        for compiled in (False, True):
            group = [run for run in runs if compiles(run.policy) is compiled]
            if group:
                yield self._can_fork(group, by_block), group

    def by_backend(self, run: Run, policies: Mapping[str, Document]) -> tuple[list[dict[str, float]], dict[str, str]]:
        """Time a policy beside itself, as it is run by each of several backends.

        Args:
            run: of the policy.
            policies: backend -> the policy whose evidence names it.

        Returns:
            Milliseconds per step by backend, round by round; and why a backend was not timed. Nothing where a time
            budget leaves no time for it.
        """
        return self._among(run, policies, (f"{run.name} by {name}" for name in policies), by_backend=True)

    def without(self, run: Run, policies: Mapping[str, Document]) -> list[dict[str, float]]:
        """Time a policy beside itself without one of its parts each, some seconds of each, as they are only told.

        Args:
            run: of the policy, which is timed as well.
            policies: part -> the policy without it.

        Returns:
            Milliseconds per step by part, and of the policy by its name, round by round; empty where a time budget
            leaves no time, or nothing can be exchanged between two steps.
        """
        documents = {run.name: run.policy, **policies}
        names, usual_s = (f"{run.name} without {name}" for name in policies), _PART_S * len(documents)
        return self._among(run, documents, names, usual_s=usual_s, precision=_ROUGH)[0]

    def _among(
        self,
        run: Run,
        policies: Mapping[str, Document],
        names: Iterable[str],
        *,
        by_backend: bool = False,
        usual_s: float = 0.0,
        precision: float = PRECISE,
    ) -> tuple[list[dict[str, float]], dict[str, str]]:
        """Time documents that are no run of the search, and return their rounds, and why one was not timed."""
        by_block = self._by_block(False)
        within = self._seconds(len(policies), by_block, usual_s=usual_s)
        if within <= 0 or self._runner.is_elsewhere(run.params) or not all(map(can_be_exchanged, policies.values())):
            return [], {}
        spec = self._spec(forks=self._can_fork([run], by_block), by_block=by_block)
        spec = replace(spec, by_backend=by_backend, precision=precision)
        with self._booked(names):
            timed = timed_together(self._runner.duel, spec, policies, within)
        return timed.rounds, dict.fromkeys(policies, timed.failed) if timed.failed else timed.refused

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
        *,
        alone: bool = False,
    ) -> Run:
        """Store what a duel says of a policy, and return it; ``alone``: in one process for all."""
        done = duel_run(run.name, run.policy, times, self._state.reference.step_ms, PROCESS_SD if alone else 0.0)
        number = self._state.store.next_number()
        done = replace(done, number=number, params=run.params, tags=tags, started=started, seconds=seconds)
        self._state.store.add(done)
        return done

    def _can_fork(self, runs: Sequence[Run], by_block: bool = False) -> bool:
        """Say whether each block can have a process: memory holds another model, and torch's cache what compiles.

        A duel of compiled blocks only ranks, and has one process.
        """
        host, compile_s = self._setup.host, self._state.seconds.cached_compile_s
        if host.compiled:
            is_short = compile_s is not None and compile_s <= _MOST_COMPILE_S
        else:  # how long what a policy compiles takes out of the cache is not known
            is_short = not any(compiles(run.policy) for run in runs)
        return not by_block and host.launch == "fork" and is_short and _room(self._state) > 0

    def _seconds(self, count: int, by_block: bool = False, *, usual_s: float = 0.0, may_overrun: bool = False) -> float:
        """Return the seconds that a duel may take; 0 where the budget leaves too few for an interval.

        Without a budget they are the process's own; with one they are on the clock. What the answer rests on may end
        after the budget, as a trial may (``may_overrun``).
        """
        state, budget = self._state, self._setup.options.budget_s
        usual_s = max(usual_s or usual_seconds(count), _RUNS * self._run_s())
        if budget is None:
            return max(usual_s, (count + 1) * FEWEST * self._block_s())
        least = self._least_s(count, by_block)
        most = max(least, usual_s)
        used = state.elapsed() + state.seconds_to_close() + self._compile_s(count, by_block)
        if budget - used >= least:
            return min(most, budget - used)
        return least if may_overrun and OVERRUN * budget - used >= least else 0.0

    def _least_s(self, count: int, by_block: bool) -> float:
        """Return the seconds on the clock of the fewest rounds of so many policies, the start of the process included.

        A round has a block of each contender, in a process that starts and compiles, and steps before it that are not
        timed; what takes long to compile, or is compiled by block, has one process for all.
        """
        start_s, forks = self._runner.work.start_s, self._can_fork([], by_block)
        each_s = start_s + (self._state.seconds.cached_compile_s or 0.0) if forks else 0.0
        return start_s + (count + 1) * FEWEST * (each_s + self._block_s())

    def _block_s(self) -> float:
        """Return the seconds of the shortest block and of the steps before it that are not timed."""
        step_s = self._run_s() / (self._setup.options.steps + self._setup.options.warmup)
        return max(step_s, _SHORT_BLOCK_S) + WARMUP_APART * step_s

    def _run_s(self) -> float:
        """Return the seconds of a run of the reference, without what it compiles."""
        options, seconds = self._setup.options, self._state.seconds
        steps = options.steps + options.warmup
        return seconds.reference_run_s or 0.0 if seconds.step_s is None else steps * seconds.step_s

    def _compile_s(self, count: int, by_block: bool) -> float:
        """Return the seconds in which so many contenders of a duel and the reference compile; 0 for an eager script.

        What ran before is in torch's cache: of whole models where trials compile blocks, the reference and one policy.
        Where each block compiles, what it reads from there is a part of the block (:meth:`_least_s`).
        """
        seconds = self._state.seconds
        compile_s, cached_s = seconds.compile_s or 0.0, seconds.cached_compile_s or 0.0
        if by_block:
            return cached_s * (count + 1) / self._setup.host.blocks
        others = count - 1 if self._runner.by_block.active else 0
        return (0.0 if self._can_fork([]) else (count + 1 - others) * cached_s) + others * compile_s


def _room(state: SearchState) -> int:
    """Return for how many further models there is memory."""
    return room_for(max(1, int(state.reference.memory_bytes)))


def _beside(runs: Sequence[Run], rivals: Sequence[Run], most: int) -> list[Run]:
    """Return so many of some runs and their rivals, each name once; nothing where there are none of the former."""
    named: dict[str, Run] = {}
    for run in (*runs, *rivals):
        named.setdefault(run.name, run)
    return list(named.values())[:most] if runs else []


def half_width(run: Run) -> float:
    """Return half the width of a duel's 95 % interval, relative to its speed-up."""
    metric = run.metrics["speedup"]
    return (float(metric.high or math.inf) - float(metric.low or 0.0)) / (2.0 * metric.value)


def usual_seconds(count: int) -> float:
    """Return the seconds of its own that a duel of so many policies may take."""
    return _FIRST_S + _EACH_S * count


def usual_search_s(cached_compile_s: float = 0.0) -> float:
    """Return the seconds of its own that a search usually gives to duels: two, and one of what decides.

    Args:
        cached_compile_s: seconds in which a script's graphs are read from torch's cache, in each block of a duel of
            whole models; 0 for an eager script.
    """
    one_s = usual_seconds(MOST_AT_ONCE)
    is_short = cached_compile_s <= _MOST_COMPILE_S
    blocks = (one_s + AGAIN_S) / _WHOLE_BLOCK_S if is_short else MOST_AT_ONCE + 1
    return 2 * one_s + AGAIN_S + blocks * cached_compile_s


def duel_run(
    name: str, policy: Document, times: Sequence[tuple[float, float]], reference_ms: float, process_sd: float = 0.0
) -> Run:
    """Return a duel as a run: a speed-up, and the step time that follows from the reference's, with intervals.

    Args:
        name: of the policy.
        policy: its document.
        times: milliseconds per step of the reference and of the policy, round by round.
        reference_ms: step time of the reference, to which the ratio is applied.
        process_sd: relative standard deviation between processes where all rounds are of one; the interval has it, too.
    """
    middle, low, high = median_interval([reference / own for reference, own in times])
    low = middle * (1.0 - math.hypot(1.0 - low / middle, 2.0 * process_sd))
    high = middle * (1.0 + math.hypot(high / middle - 1.0, 2.0 * process_sd))
    step = Metric(reference_ms / middle, low=reference_ms / high, high=reference_ms / low)
    metrics = {"speedup": Metric(middle, low=low, high=high), "step_time_ms": step}
    return Run(0, DUEL, name, {}, policy, "ok", metrics=metrics)
