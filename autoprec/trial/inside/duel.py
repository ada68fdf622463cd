"""A duel: the step times of several policies against the reference's, beside each other.

Step times of two runs, a minute apart, differ by up to a quarter on a busy machine, however many steps each has. Here
blocks of a few steps take turns in random order, and of each round the ratio of two blocks is taken: what slows one of
them slows the other as well. The median of these ratios has a 95 % interval (:mod:`autoprec.trial.intervals`), and a
duel goes on until that is narrow enough.

This is the duel in one process, of scripts that cannot be forked (CUDA, several ranks) or that would compile too long:
policies are put on and taken off between blocks. Of all others each block has a process
(:mod:`autoprec.trial.inside.forked_duel`).

Policies are exchanged while the clock is stopped, and the first steps after an exchange are not timed, because caches
are cold. Whatever compiles does so before the first round; a duel's own seconds begin only then. All policies go on
training the same model, so a duel's losses mean nothing.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterable

from autoprec.applying.compiling import allow_contenders, cache_graphs, is_compiled
from autoprec.applying.policy import apply_policy
from autoprec.applying.prepared import Prepared
from autoprec.errors import AutoPrecError
from autoprec.numerics.sharded import any_rank, rank, world_size
from autoprec.optim.optimizer import check_step, step_as
from autoprec.policy import OptimizerPolicy, Policy, compiles, policy_from_dict
from autoprec.trial.inside.applying import by_block, by_its_backend
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.loop import Loop
from autoprec.trial.inside.observe.measure import clock_for, own_seconds
from autoprec.trial.intervals import FEWEST, median_interval
from autoprec.trial.probe_log import append_round
from autoprec.trial.protocol import REFERENCE, DuelRounds, DuelSpec

#: A block takes about so long (s), in so many steps at most; a step beyond that is a block by itself.
_BLOCK_S, _MOST_STEPS = 0.5, 32
#: Steps that go by untimed after an exchange, and the first time that a policy is on.
_SETTLING, _SETTLING_FIRST = 1, 2
#: Steps that a policy may go on compiling before it is timed all the same.
MOST_SETTLING = 40
#: Rounds and steps of a block where several ranks must all do the same: none looks at its own clock.
_RANKED_ROUNDS, _RANKED_STEPS = 12, 2
#: On a busy machine a duel may take so many times longer than its own seconds.
_BUSY = 4.0


class Duel:
    """Times the policies of ``spec.probes`` against ``spec.policy``, the reference, in a script's own loop.

    Args:
        answer: is given what was timed, and ends the process.
        beat: called when a step is done.
    """

    def __init__(
        self, spec: DuelSpec, found: Found, answer: Callable[[DuelRounds], None], beat: Callable[[], None]
    ) -> None:
        self._spec, self._found, self._answer = spec, found, answer
        self._ranked = world_size() > 1
        self._lanes: dict[str, Prepared] = {}
        self._refused: dict[str, str] = {}
        self._steps: dict[str, OptimizerPolicy] = {}
        self._rounds: list[dict[str, float]] = []
        self._round: dict[str, float] = {}
        self._order: list[str] = []
        self._lane, self._settled_s = REFERENCE, 0.0
        self._unsettled: list[str] = []
        self._settle, self._since, self._timed = _SETTLING_FIRST, 0, 0
        self._block = _RANKED_STEPS  # until all have settled
        self._steps_s: list[float] = []
        self._random = random.Random(0)
        self._began, self._own = time.monotonic(), self._own_seconds()
        self.loop = Loop(
            found,
            total=sys.maxsize,
            clock=clock_for(found.parameters[0].device, duel=True),
            then=lambda _loop: None,
            check=self._stepped,
            beat=beat,
            silent=lambda _other: self.end(),
        )

    def begin(self) -> None:
        """Start with the reference, inside the first training forward."""
        asked = [self._spec.policy or {}, *(probe.policy for probe in self._spec.probes)]
        if is_compiled(self._found.root) or any(map(compiles, asked)):
            cache_graphs()
            allow_contenders(len(asked))
        self._prepare()
        self.loop.start()

    def end(self) -> None:
        """Answer with the rounds so far, also where the script ends by itself: another process may go on."""
        rounds = tuple(self._rounds)
        self._answer(DuelRounds(rounds, self.loop.steps, self._block, self._refused, self._settled_s))

    def _own_seconds(self) -> float:
        return own_seconds(self._found.parameters[0].device)

    # ---------------------------------------------------------------- between two steps: the clock stands still
    def _stepped(self, loop: Loop) -> None:
        if self._settle:
            compiled = loop.has_compiled and loop.steps - self._since < MOST_SETTLING
            compiled = any_rank(compiled, self._found.parameters[0].device)  # else one goes on settling alone
            self._settle = max(self._settle - 1, int(compiled))
            if not self._settle and self._unsettled:
                self._settled(loop)
            return
        self._timed += 1
        if self._timed < self._block:
            return
        self._round[self._lane] = sum(loop.clock.milliseconds()[-self._timed :]) / self._timed
        self._next(loop)

    def _settled(self, loop: Loop) -> None:
        """Let the next contender settle; when all have, say how many steps a block has, and begin."""
        self._steps_s.append(max(loop.clock.milliseconds()[-1] / 1e3, 1e-6))
        self._put(self._unsettled.pop(), loop, _SETTLING_FIRST)
        if self._unsettled:  # the last one is the reference, which has settled before
            return
        if not self._ranked:
            step_s = sum(self._steps_s) / len(self._steps_s)
            within = math.inf if self._spec.within_s is None else self._spec.within_s
            # the fewest rounds take half of the time
            block_s = min(_BLOCK_S, within / (2 * FEWEST * len(self._lanes)) - _SETTLING * step_s)
            self._block = max(1, min(_MOST_STEPS, self._room(loop.steps), math.ceil(block_s / step_s)))
        self._settled_s = time.monotonic() - self._began
        self._began, self._own = time.monotonic(), self._own_seconds()

    def _room(self, steps: int) -> int:
        """Return the most steps of a block with which there are enough rounds before the script ends."""
        if self._spec.ends_after is None:
            return _MOST_STEPS
        blocks = len(self._lanes) * (FEWEST // 2) + 1  # one of the reference goes before the first round
        return (self._spec.ends_after - steps - _SETTLING_FIRST) // blocks - _SETTLING

    def _prepare(self) -> None:
        """Put every policy on once, and hold what it changed."""
        root = self._found.root
        before = Prepared(root)
        asked = {REFERENCE: self._spec.policy} | {probe.id: probe.policy for probe in self._spec.probes}
        for name, document in asked.items():
            try:
                wanted = by_block(document, root) if self._spec.by_block else document
                if wanted is not None:
                    policy: Policy = policy_from_dict(wanted)
                    for optimizer in self._found.optimizers:
                        check_step(optimizer, policy.optimizer)
                    self._steps[name] = policy.optimizer
                    with by_its_backend(wanted if self._spec.by_backend else None, root):
                        apply_policy(policy, root, backend=self._spec.backend)
                self._lanes[name] = Prepared(root)
            except AutoPrecError as error:
                self._refused[name] = str(error)
            before.put()
        self._lanes[REFERENCE].put()
        self._unsettled = [REFERENCE, *(name for name in self._lanes if name != REFERENCE)]

    def _next(self, loop: Loop) -> None:
        """Exchange the policy for the next one of this round, or begin another round."""
        if not self._order:
            if self._round and self._round.keys() >= self._lanes.keys():
                self._rounds.append(self._round)
                self._log()
            self._round = {}
            if self._is_known(loop):
                self.end()
            self._order = list(self._lanes)
            self._random.shuffle(self._order)
        lane, self._timed = self._order.pop(), 0
        if lane != self._lane:
            self._put(lane, loop, _SETTLING)

    def _log(self) -> None:
        own_s, spec = self._own_seconds() - self._own, self._spec
        seconds = time.monotonic() - self._began if spec.on_the_clock else own_s
        append_round(spec.log if rank() == 0 else "", self._round, seconds)

    def _put(self, lane: str, loop: Loop, steps: int) -> None:
        """Exchange the policy, and let so many steps go by."""
        self._lanes[lane].put()
        for optimizer in self._found.optimizers:
            step_as(optimizer, self._steps.get(lane, OptimizerPolicy()))
        self._lane, self._settle, self._since = lane, steps, loop.steps

    def _is_known(self, loop: Loop) -> bool:
        """Say whether it is enough; a policy that is known well enough is timed no more."""
        if self._ranked:
            return len(self._rounds) >= _RANKED_ROUNDS
        for name in self._lanes.keys() - {REFERENCE, *undecided(self._rounds, self._lanes, self._spec.precision)}:
            del self._lanes[name]
        late = is_late(self._spec, self._own_seconds() - self._own, self._began)
        return late or len(self._lanes) < 2 or not math.isfinite(loop.last_loss)


def undecided(rounds: list[dict[str, float]], names: Iterable[str], precision: float) -> list[str]:
    """Return those of some policies whose speed is not known well enough, nor surely below that of another.

    The reference is one of the others: how much slower than the script a policy is changes no answer.

    Args:
        rounds: milliseconds per step by contender, round by round.
        names: the names of contenders.
        precision: half the width of an interval that is enough, relative.
    """
    ratios = {name: ratios_of(rounds, name) for name in names if name != REFERENCE}
    known = {name: median_interval(found) for name, found in ratios.items() if found}
    best = max([1.0, *(low for _, low, _ in known.values())])

    def is_open(name: str) -> bool:
        if name not in known:
            return True
        middle, low, high = known[name]
        return high - low > 2 * precision * middle and high >= best

    return [name for name in ratios if is_open(name)]


def is_late(spec: DuelSpec, own_s: float, began: float) -> bool:
    """Say whether a duel's time is used up: its processes' own, or on a busy machine that on the clock.

    Args:
        spec: the duel's spec.
        own_s: seconds of its processes' own.
        began: ``time.monotonic()`` of its begin.
    """
    if spec.within_s is None:
        return False
    most = spec.within_s if spec.on_the_clock else _BUSY * spec.within_s
    return own_s > spec.within_s or time.monotonic() - began > most


def ratios_of(rounds: list[dict[str, float]], name: str) -> list[float]:
    """Return the reference's time over a contender's, of each round that both took part in."""
    return [] if name == REFERENCE else [r[REFERENCE] / r[name] for r in rounds if name in r and r[name] > 0]
