"""How the times of a duel are taken: blocks of steps in a few processes, or whole runs, of contenders that take turns.

A process that times all contenders needs some dozen steps for each. Where the script ends before, the next ones are
told after how many steps, and take shorter blocks of fewer contenders; where not even one contender fits, or a policy
cannot be taken off between two steps, whole runs take turns. Either way what is compared ran within minutes: the times
of trials may be those of another day, beside another load, of a search that was killed and goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autoprec.policy import CommunicationPolicy, Policy
from autoprec.support.plain import Document
from autoprec.trial.intervals import FEWEST
from autoprec.trial.probe_log import append_round, read_rounds
from autoprec.trial.protocol import REFERENCE, DuelRounds, DuelSpec, Probe, TrainSpec, TrialResult
from autoprec.tuning.decide.metrics import step_time
from autoprec.tuning.paired import PairedRunner
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import Params, Run

#: Processes that a duel goes on in where the script ends soon, and steps of a run of those that are timed apart.
PROCESSES, STEPS_APART, WARMUP_APART = 4, 6, 2
#: How many rounds of runs in turns there are at most.
_MOST_ROUNDS = 2 * FEWEST
#: Steps that a contender takes to settle, and of the shortest block with those before it that are not timed.
_SETTLING, _BLOCK = 3, 2


@dataclass(frozen=True, slots=True)
class Timed:
    """What a duel has shown.

    Attributes:
        rounds: milliseconds per step by name, :data:`~autoprec.trial.protocol.REFERENCE` among them, round by round.
        failed: why a process failed; empty where none did.
        refused: why policies were not timed, by name.
        ends_after: steps after which the script ends; None where that is not known.
        alone: one process has timed all contenders, so that how it differs from others is not seen.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    failed: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    ends_after: int | None = None
    alone: bool = False


def contenders(ends_after: int | None) -> int | None:
    """Return how many contenders one process of a script can time that ends after so many steps; None for no limit.

    Beside the reference, in half as many rounds as an interval takes.
    """
    if ends_after is None:
        return None
    rounds = FEWEST // 2
    # all settle, the reference twice; then there is a block of each in each round, and one of the reference before
    left = ends_after - 2 * _SETTLING - _BLOCK * (rounds + 1)
    return max(0, left // (_SETTLING + _BLOCK * rounds))


def _groups(count: int, ends_after: int | None) -> int:
    """Return how many processes it takes until each of so many policies was in one."""
    at_once = contenders(ends_after)
    return 1 if at_once is None else math.ceil(count / max(1, at_once))


def timed_together(
    run: Callable[[DuelSpec], TrialResult], spec: DuelSpec, policies: Mapping[str, Document], within_s: float
) -> Timed:
    """Time policies beside the reference in one process, or in a few where the script ends soon.

    Args:
        run: runs one trial.
        spec: of the reference.
        policies: name -> document; each :func:`can_be_exchanged`.
        within_s: a process's own seconds, or where the spec says so those on the clock, which a time budget counts;
            without a budget, those in which it starts and compiles are not among them.
    """
    rounds: list[dict[str, float]] = []
    waiting, spent, alone = list(policies), 0.0, False
    left = PROCESSES * _groups(len(waiting), spec.ends_after)
    while waiting and left > 0:
        some, began = waiting[: contenders(spec.ends_after)], time.monotonic()
        if not some:
            break
        probes = tuple(Probe(name, policies[name]) for name in some)
        result = run(replace(spec, probes=probes, within_s=max(1.0, within_s - spent)))
        answer = result.answer
        if not isinstance(answer, DuelRounds):
            return Timed(rounds, f"{result.status}: {result.reason}", {}, spec.ends_after, alone)
        rounds, alone = [*rounds, *answer.rounds], alone or answer.block > 0
        if answer.refused:
            return Timed(rounds, "", dict(answer.refused), spec.ends_after, alone)
        waiting = [name for name in waiting if len(times_of(rounds, name)) < FEWEST]
        before_s, took_s = result.start_s + answer.settled_s, time.monotonic() - began
        spent += took_s if spec.on_the_clock else max(0.0, took_s - before_s)
        if spent > within_s or (spec.on_the_clock and within_s - spent < before_s):
            break
        left -= 1
        if spec.side_by_side == 1 and spec.ends_after is None and waiting:
            spec = replace(spec, ends_after=answer.steps)
            left *= _groups(len(waiting), answer.steps)
        elif not answer.rounds:
            break
    return Timed(rounds, "", {}, spec.ends_after, alone)


def in_turns(
    setup: Setup, runner: PairedRunner, state: SearchState, runs: Sequence[Run], within_s: float, *, by_block: bool
) -> list[dict[str, float]]:
    """Time policies beside the reference in adjacent short runs, whose order changes; their rounds as of a duel.

    A policy whose run fails is in no further round. Rounds of a session that was killed in them count.

    Args:
        setup: what is searched.
        runner: runs trials.
        state: what the search has learnt so far.
        runs: one of each policy.
        within_s: seconds after which no further round is begun, once there are as many as an interval takes.
        by_block: whether runs compile blocks.
    """
    options = setup.options

    def short(policy: Document | None, params: Params) -> TrainSpec:
        steps, warmup = min(STEPS_APART, options.steps), min(WARMUP_APART, options.warmup)
        return runner.train_spec(policy, params, steps=steps, warmup=warmup, by_block=by_block)

    contest = {REFERENCE: short(setup.reference_policy(), {})} | {
        run.name: short(run.policy, run.params) for run in runs
    }

    def enough(rounds: Sequence[Mapping[str, float]], seconds: float) -> bool:
        late = options.budget_s is not None and state.elapsed() > options.budget_s
        running = rounds[-1] if rounds else contest
        timed = all(len(times_of(rounds, name)) >= FEWEST for name in running if name != REFERENCE)
        return late or (timed and seconds > within_s)

    log = runner.turns(list(contest.values()))
    rounds, _ = take_turns({name: partial(runner.on_host, spec) for name, spec in contest.items()}, log, enough)
    if log is not None:
        log.unlink(missing_ok=True)
    return rounds


def take_turns(
    contest: Mapping[str, Callable[[], TrialResult]],
    log: Path | None,
    enough: Callable[[Sequence[Mapping[str, float]], float], bool],
) -> tuple[list[dict[str, float]], dict[str, TrialResult]]:
    """Run contenders one after the other, in an order that changes, and return what their steps took, round by round.

    A contender whose run fails is in no further round, and nothing is timed beside a reference that fails.

    Args:
        contest: what runs each; :data:`~autoprec.trial.protocol.REFERENCE` is among them.
        log: has the rounds of a session that was killed in them, and gets those that follow; None where none are kept.
        enough: says by the rounds, and the seconds that they took, that no further one is needed.

    Returns:
        Milliseconds per step by contender, of each round, and the runs that failed.
    """
    rounds, taken = read_rounds([log] if log is not None else [])
    began, order, failed = time.monotonic() - taken, list(contest), dict[str, TrialResult]()
    while len(order) > 1 and len(rounds) < _MOST_ROUNDS and not enough(rounds, time.monotonic() - began):
        times: dict[str, float] = {}
        for name in order[:: -1 if len(rounds) % 2 else 1]:
            result = contest[name]()
            if result.ok:
                times[name] = step_time(result.step_ms, result.warmup)
            else:
                failed[name] = result
        if REFERENCE in failed:
            break
        order = [name for name in order if name not in failed]
        rounds.append(times)
        append_round(log or "", times, time.monotonic() - began)
    return rounds, failed


def times_of(rounds: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """Return milliseconds per step of the reference and of a policy, in the rounds that it took part in."""
    return [(one[REFERENCE], one[name]) for one in rounds if name in one]


def can_be_exchanged(document: Document) -> bool:
    """Say whether a policy can be taken off between two steps: it leaves weights, state and gradients as they are."""
    policy = Policy.model_validate({key: value for key, value in document.items() if key != "evidence"})
    plain = not policy.optimizer.stores and policy.communication == CommunicationPolicy()
    return plain and policy.loss_scaling == "none" and not policy.phases
