"""A duel in which each contender trains in a process of its own, as it will at the user's.

Policies that take turns in one process share its heap. What one of them allocates decides how the C library serves the
others: large blocks that fp32 steps have freed teach malloc to keep blocks of that size, and narrower steps then ask
the system for fewer pages than they do alone (``benchmarks/results/2026-11-28_heaps.md``). So where a process
can be forked, every contender is a fork of the script at its first training step.

Two processes of one program differ as well, by where their memory lies, and by far more than the blocks of one of them
differ from each other: an interval over blocks of few processes is too narrow. So each block has a process of its own,
whose heap is first filled in a random way, and what a duel returns are independent samples of how a process of this
program may fare (Curtsinger and Berger, "Stabilizer: statistically sound performance evaluation", ASPLOS 2013).
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from autoprec.errors import AutoPrecError
from autoprec.trial.inside.applying import apply_document, by_its_backend
from autoprec.trial.inside.duel import is_late, undecided
from autoprec.trial.inside.forking import take_threads
from autoprec.trial.inside.isolate.answering import Unanswered, answer, await_answer, fork_to_answer
from autoprec.trial.inside.isolate.isolation import before_forks
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.observe.loop import Loop
from autoprec.trial.inside.observe.measure import clock_for, own_seconds, some_heap
from autoprec.trial.intervals import FEWEST
from autoprec.trial.probe_log import append_round
from autoprec.trial.protocol import REFERENCE, DuelRounds, DuelSpec

#: A block takes about so long (s).
_BLOCK_S = 0.4
#: Steps that go by before a block: so many, or as many as take so long (s), but never fewer than two (in the first
#: optimizer state is made). Until the C library has the pages that a step needs, each asks for some, and a policy of
#: narrow formats loses more of its gain to that than the script (6 % after two steps, 4 % after five, after thirty no
#: less than after ten that could be measured: ``benchmarks/results/2026-11-28_settled.md``).
_SETTLING, _SETTLING_S, _LEAST_SETTLING = 10, 1.0, 2


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
        self._writer, self._settled, self._block = -1, 0, 0

    def run(self) -> DuelRounds | Unanswered | None:
        """Return what was timed, in this process; None in a contender, which goes on into its forward."""
        before_forks()
        rounds: list[dict[str, float]] = []
        refused: dict[str, str] = {}
        open_, began, own_s = list(self._policies), time.monotonic(), 0.0
        steps = 0
        while len(open_) > 1 and REFERENCE not in refused and not is_late(self._spec, own_s, began):
            times: dict[str, float] = {}
            for name in self._random.sample(open_, len(open_)):
                pid, descriptor = fork_to_answer()
                if not pid:
                    self._contend(name, descriptor)
                    return None
                found = await_answer(pid, descriptor, 0.8 * self._spec.timeout_s)
                self._beat()
                if isinstance(found, str):
                    found = {"failed": f"no block of steps: {found}"}
                own_s += found.get("own_s", 0.0)
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
        return DuelRounds(tuple(rounds), steps, refused=refused)

    # ---------------------------------------------------------------- in a contender
    def _contend(self, name: str, writer: int) -> None:
        """Put a policy on, and count the steps from here on, in the script's forward."""
        self._writer = writer
        take_threads()
        self._kept = some_heap(os.getpid())  # another one in every search, too
        sys.excepthook = lambda kind, error, _trace: self._say(failed=f"{kind.__name__}: {error}"[:300])
        self._on_exit(self._ended)
        try:
            named = self._policies[name] if self._spec.by_backend else None
            with by_its_backend(named, self._found.root):
                apply_document(self._policies[name], self._found, self._spec.backend)
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
        """Begin the block once steps have settled, and say how many it has."""
        block_s, settling_s = _BLOCK_S, _SETTLING_S
        if self._spec.within_s is not None:  # the fewest rounds take half of the time
            share = self._spec.within_s / (2 * FEWEST * len(self._policies))
            block_s, settling_s = min(block_s, share), min(settling_s, share)
        spans = loop.clock.milliseconds()
        enough = loop.steps >= _SETTLING or sum(spans) / 1e3 >= settling_s
        if loop.steps >= _LEAST_SETTLING and enough:
            self._settled = loop.steps
            self._block = math.ceil(block_s / max(spans[-1] / 1e3, 1e-6))

    def _ended(self) -> NoReturn:
        """Answer with the steps of the block, or as many as the script had."""
        spans = self.loop.clock.milliseconds() if self.loop is not None else []
        spans = spans[self._settled or _LEAST_SETTLING :]
        self._say(ms=sum(spans) / max(len(spans), 1), steps=len(spans))

    def _say(self, **what: Any) -> NoReturn:
        answer(self._writer, what | {"own_s": own_seconds(self._found.parameters[0].device)})
