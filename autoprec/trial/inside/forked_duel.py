"""A duel in which each contender trains in a process of its own, as it will at the user's.

Policies that take turns in one process share its heap. What one of them allocates decides how the C library serves the
others: large blocks that fp32 steps have freed teach malloc to keep blocks of that size, and narrower steps then ask
the system for fewer pages than they do alone (``benchmarks/results/2026-11-28_heaps.md``). So where a process
can be forked, every contender is a fork of the script at its first training step.

Two processes of one program differ as well, by where their memory lies, and by far more than the blocks of one of them
differ from each other: an interval over blocks of few processes is too narrow. So each block has a process of its own,
whose heap is first filled in a random way, and what a duel returns are independent samples of how a process of this
program may fare (Curtsinger and Berger, "Stabilizer: statistically sound performance evaluation", ASPLOS 2013).

What compiles does so in each block, mostly out of torch's cache. A fork of a process that has compiled and trained
already would be faster, and wrong: its steps find the heap that those before the fork have left (a convolutional net in
bf16 gained 7 to 12 % then, 19 to 21 % in processes of its own: 2026-11-30_compiled_processes.md). But reading the cache
takes one core and longer than a block, so two contenders do it side by side, and then wait until it is their turn to
train: nothing else runs beside what is timed.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from autoprec.applying.compiling import cache_graphs, is_compiled
from autoprec.errors import AutoPrecError
from autoprec.policy import compiles
from autoprec.support.plain import Document
from autoprec.trial.inside.applying import apply_document, by_its_backend
from autoprec.trial.inside.duel import MOST_SETTLING, is_late, undecided
from autoprec.trial.inside.forking import take_threads
from autoprec.trial.inside.isolate.answering import Unanswered, answer, await_answer, fork_to_answer
from autoprec.trial.inside.isolate.isolation import before_forks
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.observe.loop import Loop
from autoprec.trial.inside.observe.measure import clock_for, own_seconds, some_heap
from autoprec.trial.intervals import FEWEST
from autoprec.trial.probe_log import append_round
from autoprec.trial.progress import Deadline
from autoprec.trial.protocol import REFERENCE, DuelRounds, DuelSpec

#: A block takes about so long (s).
_BLOCK_S = 0.4
#: Steps that go by before a block: so many, or as many as take so long (s), but never fewer than two (in the first
#: optimizer state is made). Until the C library has the pages that a step needs, each asks for some, and a policy of
#: narrow formats loses more of its gain to that than the script (6 % after two steps, 4 % after five, after thirty no
#: less than after ten that could be measured: ``benchmarks/results/2026-11-28_settled.md``).
_SETTLING, _SETTLING_S, _LEAST_SETTLING = 10, 1.0, 2
#: What has had its time already is ended after so long (s).
_AT_ONCE_S = 0.1
#: The fewest rounds, without which there is no interval, may take so many times as long as a duel was given.
_FEWEST_TAKE = 2.0


class ForkedDuel:
    """Times the policies of ``spec.probes`` against ``spec.policy``; create it inside a training forward.

    Args:
        on_exit: replaces what happens when the script ends by itself.
        beat: called when a block is done.

    Attributes:
        loop: in a contender what counts its steps; None elsewhere.
    """

    def __init__(
        self,
        spec: DuelSpec,
        found: Found,
        hooks: Hooks,
        on_exit: Callable[[Callable[[], None]], None],
        beat: Callable[[], None],
    ) -> None:
        self._spec, self._found, self._hooks = spec, found, hooks
        self._on_exit, self._beat = on_exit, beat
        self._policies = {REFERENCE: spec.policy} | {probe.id: probe.policy for probe in spec.probes}
        self._random = random.Random(0)
        self.loop: Loop | None = None
        self._writer, self._since, self._settled, self._block = -1, 0, 0, 0
        self._turn: int | None = None
        self._began = self._own_began = self._compile_s = 0.0

    def run(self) -> DuelRounds | Unanswered | None:
        """Return what was timed, in this process; None in a contender, which goes on into its forward."""
        before_forks()
        rounds: list[dict[str, float]] = []
        refused: dict[str, str] = {}
        open_, began, own_s = list(self._policies), time.monotonic(), 0.0
        steps, compile_s = 0, 0.0
        while len(open_) > 1 and REFERENCE not in refused and not self._is_late(len(rounds), own_s, began, compile_s):
            times: dict[str, float] = {}
            order = self._random.sample(open_, len(open_))
            together = max(1, self._spec.side_by_side - 1)
            for names in (order[at : at + together] for at in range(0, len(order), together)):
                contenders = []
                for name in names:
                    pid, descriptor, turn = _fork_in_turn(alone=len(names) == 1)
                    if not pid:
                        self._contend(name, descriptor, turn)
                        return None
                    contenders.append((name, pid, descriptor, turn))
                for name, found in self._answers(contenders):
                    own_s, compile_s = own_s + found.get("own_s", 0.0), compile_s + found.get("compile_s", 0.0)
                    if "failed" in found:
                        refused[name] = found["failed"]
                    elif found["steps"]:
                        times[name], steps = found["ms"], steps + found["steps"]
            open_ = [name for name in open_ if name not in refused]
            if times.keys() != set(open_):
                break  # the script ends before a step that could be timed
            rounds.append(times)
            append_round(self._spec.log, times, time.monotonic() - began if self._spec.on_the_clock else own_s)
            open_ = [REFERENCE, *undecided(rounds, open_, self._spec.precision)]
        if REFERENCE in refused:
            return Unanswered(f"the reference of a duel failed: {refused[REFERENCE]}")
        return DuelRounds(tuple(rounds), steps, refused=refused, settled_s=compile_s)

    def _answers(self, contenders: Sequence[tuple[str, int, int, int | None]]) -> Iterator[tuple[str, Document]]:
        """Yield what contenders answer, which take their turns once all of them have compiled, or hang and were ended.

        Args:
            contenders: name, process id, descriptor of the answer, and that of its turn, each.
        """
        limit_s, hangs = 0.8 * self._spec.timeout_s, set[int]()
        for _, pid, descriptor, turn in contenders:
            if turn is not None and not Deadline(limit_s, pid).awaits(descriptor):
                hangs.add(pid)
        for name, pid, descriptor, turn in sorted(contenders, key=lambda one: one[1] not in hangs):
            if turn is not None:
                with contextlib.suppress(OSError):  # it has ended
                    os.write(turn, b".")
                os.close(turn)
            found = await_answer(pid, descriptor, _AT_ONCE_S if pid in hangs else limit_s)
            self._beat()
            yield name, {"failed": f"no block of steps: {found}"} if isinstance(found, str) else found

    def _is_late(self, rounds: int, own_s: float, began: float, compile_s: float) -> bool:
        """Say whether the time is used up: on the clock, or, without what compiles, after the fewest rounds."""
        if self._spec.on_the_clock:
            return is_late(self._spec, own_s, began)
        return is_late(self._spec, own_s / (1.0 if rounds >= FEWEST else _FEWEST_TAKE), began + compile_s)

    # ---------------------------------------------------------------- in a contender
    def _contend(self, name: str, writer: int, turn: int | None) -> None:
        """Put a policy on, and count the steps from here on, in the script's forward."""
        self._writer, self._turn = writer, turn
        take_threads()
        self._kept = some_heap(os.getpid())  # another one in every search, too
        self._began, self._own_began = time.monotonic(), self._own_seconds()
        sys.excepthook = lambda kind, error, _trace: self._say(failed=f"{kind.__name__}: {error}"[:300])
        self._on_exit(self._ended)
        document = self._policies[name]
        if is_compiled(self._found.root) or (document is not None and compiles(document)):
            cache_graphs()
        try:
            with by_its_backend(document if self._spec.by_backend else None, self._found.root):
                apply_document(document, self._found, self._spec.backend)
        except AutoPrecError as error:
            self._say(failed=str(error))
        self.loop = Loop(
            self._found,
            total=sys.maxsize,
            clock=clock_for(self._found.parameters[0].device, duel=True),
            then=lambda _loop: None,
            check=self._stepped,
            silent=lambda _other: self._ended(),
        )
        self._hooks.events = self.loop
        self.loop.start()

    def _stepped(self, loop: Loop) -> None:
        """Between two steps, where the clock stands still: answer when the block is complete."""
        if not math.isfinite(loop.last_loss):
            self._say(failed=f"the loss is {loop.last_loss}")
        if not self._settled:
            self._settle(loop)
        elif loop.steps == self._settled + self._block:
            self._ended()

    def _settle(self, loop: Loop) -> None:
        """Begin the block once nothing compiles any more and steps have settled, and say how many it has."""
        if loop.has_compiled and loop.steps < MOST_SETTLING:
            self._since, self._compile_s = loop.steps, time.monotonic() - self._began
            self._own_began = self._own_seconds()
            return
        if self._turn is not None:  # a blank before the answer says that it waits
            os.write(self._writer, b" ")
            os.read(self._turn, 1)
            self._turn, self._since, self._own_began = None, loop.steps, self._own_seconds()
            return
        block_s, settling_s = _BLOCK_S, _SETTLING_S
        if self._spec.within_s is not None:  # the fewest rounds take half of the time
            share = self._spec.within_s / (2 * FEWEST * len(self._policies))
            block_s, settling_s = min(block_s, share), min(settling_s, share)
        spans = loop.clock.milliseconds()[self._since :]
        enough = len(spans) >= _SETTLING or sum(spans) / 1e3 >= settling_s
        if len(spans) >= _LEAST_SETTLING and enough:
            self._settled = loop.steps
            self._block = math.ceil(block_s / max(spans[-1] / 1e3, 1e-6))

    def _ended(self) -> NoReturn:
        """Answer with the steps of the block, or as many as the script had."""
        spans = self.loop.clock.milliseconds() if self.loop is not None else []
        spans = spans[self._settled or self._since + _LEAST_SETTLING :]
        self._say(ms=sum(spans) / max(len(spans), 1), steps=len(spans))

    def _say(self, **what: Any) -> NoReturn:
        own_s = self._own_seconds() - self._own_began
        answer(self._writer, what | {"own_s": own_s, "compile_s": self._compile_s})

    def _own_seconds(self) -> float:
        return own_seconds(self._found.parameters[0].device)


def _fork_in_turn(*, alone: bool) -> tuple[int, int, int | None]:
    """Fork as :func:`fork_to_answer`, with a descriptor that gives, or awaits, a turn to train; None if ``alone``."""
    if alone:
        return *fork_to_answer(), None
    awaits, gives = os.pipe()
    pid, descriptor = fork_to_answer()
    os.close(awaits if pid else gives)
    return pid, descriptor, gives if pid else awaits
