"""A duel in which each contender trains in a process of its own, as it will at the user's.

Policies that take turns in one process share its heap. What one of them allocates decides how the C library serves the
others: large blocks that fp32 steps have freed teach malloc to keep blocks of that size, and narrower steps then ask
the system for fewer pages than they do alone (``benchmarks/search/heap.py`` prints by how much). So where a process
can be forked, every contender is a fork of the script at its first training step; what the script itself had allocated
until then, all of them still begin with. One of them works at a time, in blocks of a few steps in random order, as in
:mod:`autoprec.trial.inside.duel`, and after some rounds all are forked anew: two processes of one program differ by 2
to 3 %, by where their memory lies.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from autoprec.errors import AutoPrecError
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.duel import MOST_STEPS, SETTLING, SETTLING_FIRST, is_late, undecided
from autoprec.trial.inside.isolate.entropy import fork
from autoprec.trial.inside.isolate.isolation import add_layer_of_probe, before_forks
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.observe.loop import Loop
from autoprec.trial.inside.observe.measure import clock_for
from autoprec.trial.intervals import FEWEST
from autoprec.trial.processes import die_with_parent
from autoprec.trial.progress import Deadline
from autoprec.trial.protocol import REFERENCE, TrialSpec

#: A block takes about so long (s): no exchange of policies goes before it, so more of them are better.
_BLOCK_S = 0.2
#: Rounds after which the contenders are forked anew.
_GENERATION = FEWEST


@dataclass
class _Lane:
    """The process of one contender, seen from outside."""

    pid: int
    asks: int
    answers: int
    #: CPU seconds it has taken.
    own_s: float = 0.0
    rest: bytes = field(default=b"", repr=False)


class Lanes:
    """Times the policies of ``spec.probes`` against ``spec.policy``; create it inside a training forward.

    Args:
        on_exit: replaces what happens when the script ends by itself.
        beat: called when a block is done.

    Attributes:
        loop: in a contender what counts its steps; None elsewhere.
    """

    def __init__(
        self,
        spec: TrialSpec,
        found: Found,
        hooks: Hooks,
        on_exit: Callable[[Callable[[], None]], None],
        beat: Callable[[], None],
    ) -> None:
        self._spec, self._found, self._hooks = spec, found, hooks
        self._on_exit, self._beat = on_exit, beat
        self._policies = {REFERENCE: spec.policy} | {probe.id: probe.policy for probe in spec.probes}
        self._open = list(self._policies)
        self._refused: dict[str, str] = {}
        self._rounds: list[dict[str, float]] = []
        self._steps = self._processes = 0
        self._random = random.Random(0)
        self._began, self._own_s = time.monotonic(), 0.0
        self.loop: Loop | None = None

    def run(self) -> dict[str, Any] | None:
        """Return the payload of a duel in this process, and None in a contender, which goes on into its forward."""
        before_forks()
        while len(self._open) > 1 and REFERENCE in self._open:
            before = len(self._rounds), len(self._refused)
            lanes: dict[str, _Lane] = {}
            for name in self._open:
                lane = self._fork(name)
                if lane is None:
                    return None
                lanes[name] = lane
            try:
                known = self._generation(lanes)
            finally:
                for lane in lanes.values():
                    _end(lane)
            if known or before == (len(self._rounds), len(self._refused)):
                break
        if REFERENCE in self._refused:
            return {"failed": f"the reference of a duel failed: {self._refused[REFERENCE]}"}
        found = {"rounds": self._rounds, "steps": self._steps, "refused": self._refused}
        return {"duel": found | {"processes": self._processes}}

    def _generation(self, lanes: dict[str, _Lane]) -> bool:
        """Run some rounds; returns whether the duel is over: all is known, or its time is used up."""
        if any(self._answer_of(name, lane) is None for name, lane in lanes.items()):  # on, and settled
            return False
        for _ in range(_GENERATION):
            times: dict[str, float] = {}
            for name in self._random.sample(self._open, len(self._open)):
                with contextlib.suppress(BrokenPipeError):
                    os.write(lanes[name].asks, b"\n")
                answer = self._answer_of(name, lanes[name])
                if answer is None:
                    return False
                times[name] = answer["ms"]
                self._steps += answer["steps"]
            self._rounds.append(times)
            self._open = [REFERENCE, *undecided(self._rounds, self._open, self._spec.precision)]
            own_s = self._own_s + sum(lane.own_s for lane in lanes.values())
            if len(self._open) < 2 or is_late(self._spec, own_s, self._began):
                return True
        self._own_s += sum(lane.own_s for lane in lanes.values())
        return False

    # ---------------------------------------------------------------- seen from outside
    def _fork(self, name: str) -> _Lane | None:
        (asks, go), (answers, told) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._processes += 1
        pid = fork()
        if pid:
            os.close(asks)
            os.close(told)
            return _Lane(pid, go, answers)
        die_with_parent()
        os.close(go)
        os.close(answers)
        add_layer_of_probe()
        contender = _Contender(self._spec, self._found, self._hooks, self._on_exit, (asks, told))
        self.loop = contender.begin(self._policies[name])
        return None

    def _answer_of(self, name: str, lane: _Lane) -> dict[str, Any] | None:
        """Wait for a contender; None where it ended, and refused unless the script came to its end."""
        deadline = Deadline(0.8 * self._spec.timeout_s, lane.pid)
        while b"\n" not in lane.rest:
            if not deadline.awaits(lane.answers):
                self._refuse(name, "no step before the deadline")
                return None
            data = os.read(lane.answers, 65536)
            if not data:
                return None  # the script came to its end
            lane.rest += data
        line, _, lane.rest = lane.rest.partition(b"\n")
        self._beat()
        answer: dict[str, Any] = json.loads(line)
        lane.own_s = answer.get("own_s", lane.own_s)
        if "failed" in answer:
            self._refuse(name, answer["failed"])
            return None
        return answer

    def _refuse(self, name: str, why: str) -> None:
        self._refused[name] = why
        self._open.remove(name)


def _end(lane: _Lane) -> None:
    with contextlib.suppress(OSError):
        os.kill(lane.pid, signal.SIGKILL)
    os.close(lane.asks)
    os.close(lane.answers)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(lane.pid, 0)


class _Contender:
    """One contender, in its own process: says when it has settled, then runs a block for each byte that it is sent."""

    def __init__(
        self,
        spec: TrialSpec,
        found: Found,
        hooks: Hooks,
        on_exit: Callable[[Callable[[], None]], None],
        pipes: tuple[int, int],
    ) -> None:
        self._spec, self._found, self._hooks, self._on_exit = spec, found, hooks, on_exit
        self._asks, self._told = pipes
        self._left, self._block = SETTLING_FIRST + 1, 0

    def begin(self, policy: dict[str, Any] | None) -> Loop:
        """Put the policy on, and return what counts the steps from here on, in the script's forward."""
        sys.excepthook = lambda kind, error, _trace: self._failed(f"{kind.__name__}: {error}"[:300])
        self._on_exit(self._done)
        try:
            apply_document(policy, self._found, self._spec.backend)
        except AutoPrecError as error:
            self._failed(str(error))
        loop = Loop(
            self._found,
            total=sys.maxsize,
            clock=clock_for(self._found.parameters[0].device),
            then=lambda _loop: None,
            check=self._stepped,
            silent=lambda _other: self._done(),
        )
        self._hooks.events = loop
        loop.start()
        return loop

    def _stepped(self, loop: Loop) -> None:
        """Between two steps, where the clock stands still: answer when a block is complete, and wait for the next."""
        self._left -= 1
        if self._left:
            return
        spans = loop.clock.milliseconds()
        if not math.isfinite(loop.last_loss):
            self._failed(f"the loss is {loop.last_loss}")
        if not self._block:  # the first settled step tells how long one takes
            block_s = _BLOCK_S
            if self._spec.within_s is not None:  # the fewest rounds take half of the time
                block_s = min(block_s, self._spec.within_s / (2 * FEWEST * (len(self._spec.probes) + 1)))
            self._block = max(1, min(MOST_STEPS, math.ceil(block_s / max(spans[-1] / 1e3, 1e-6))))
            answer: dict[str, Any] = {}
        else:
            answer = {"ms": sum(spans[-self._block :]) / self._block, "steps": self._block + SETTLING}
        self._say(answer | {"own_s": time.process_time()})
        if not os.read(self._asks, 1):
            os._exit(0)
        self._left = self._block + SETTLING

    def _say(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(self._told, json.dumps(answer).encode() + b"\n")

    def _failed(self, why: str) -> NoReturn:
        self._say({"failed": why})
        os._exit(0)

    def _done(self) -> NoReturn:
        os._exit(0)
