"""Deadlines that count a trial's own time since its last step: a busy machine is not a hang.

Wall time says nothing about a process that shares two cores with twelve others, or that was stopped for a
while. Own time is wall time without the time in which the trial wanted to run and was not let: the kernel counts, for
every thread, how long it waited in a run queue (``/proc/PID/schedstat``, second figure, ns), and the state of a stopped
process is ``T``. A trial that sleeps, waits for a lock or spins uses its own time; each step it completes starts a new
deadline. So only what stands still is ever ended as hung.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autoprec.trial.processes import all_processes, read_if_there

#: A tree is looked at so many times per limit, at least and at most so often (s): one look reads a line of /proc per
#: process of the machine, and five a second for each of two trials took a twelfth of a core.
_LOOKS, _SHORTEST_S, _LONGEST_S = 60, 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Usage:
    """One process: its state letter, CPU time so far, and time spent waiting for a CPU so far (None: not known), s."""

    state: str
    cpu_s: float
    waited_s: float | None


def steps_file(result: Path | str) -> Path:
    """Where a trial that writes ``result`` counts its steps."""
    return Path(f"{result}.steps")


class Beat:
    """The trial's side: it reports each finished step, which takes two microseconds."""

    def __init__(self, path: Path) -> None:
        self._count = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def __call__(self) -> None:
        self._count += 1
        with contextlib.suppress(OSError):  # a full disk: the deadline then counts from the step before
            os.pwrite(self._file, str(self._count).encode(), 0)


def tree_usage(leader: int) -> dict[int, Usage]:
    """Return every process of the session that ``leader`` leads, and of its descendants; empty without /proc."""
    rows = dict(all_processes())
    ticks = os.sysconf("SC_CLK_TCK")
    chosen = {pid for pid, fields in rows.items() if int(fields[3]) == leader or pid == leader}
    grown = True
    while grown:
        more = {pid for pid, fields in rows.items() if int(fields[1]) in chosen} - chosen
        chosen |= more
        grown = bool(more)
    cpu_s = {pid: (int(rows[pid][11]) + int(rows[pid][12])) / ticks for pid in chosen}
    return {pid: Usage(rows[pid][0].decode(), cpu_s[pid], _waited(pid)) for pid in chosen}


def _waited(pid: int) -> float | None:
    words = read_if_there(f"/proc/{pid}/schedstat").split()
    return int(words[1]) * 1e-9 if len(words) == 3 else None


class Deadline:
    """Whether a process tree has stood still for ``limit_s`` of its own time.

    Args:
        limit_s: own seconds that may pass without a step.
        leader: the process that leads the tree.
        steps: the file in which the trial counts its steps (:class:`Beat`).
        progress: called with the number of completed steps whenever it has grown.
        usage, clock: how to look; exchanged in tests.
    """

    def __init__(
        self,
        limit_s: float,
        leader: int,
        steps: Path | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        usage: Callable[[int], dict[int, Usage]] = tree_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s, self._leader, self._steps, self._progress = limit_s, leader, steps, progress
        self._usage, self._clock = usage, clock
        self._looked = clock()
        self._every_s = min(max(_SHORTEST_S, limit_s / _LOOKS), _LONGEST_S, limit_s / 4)
        self._before: dict[int, Usage] = {}
        self._seen = ""
        self.own_s = 0.0

    @property
    def steps(self) -> int:
        """How many steps the trial had completed when it was last looked at."""
        return int(self._seen or 0)

    def passed(self) -> bool:
        """Look at the tree, if it is time to; True when it has stood still for too long."""
        now = self._clock()
        if now - self._looked >= self._every_s:
            self._look(now - self._looked)
            self._looked = now
        return self.own_s > self.limit_s

    def awaits(self, descriptor: int) -> bool:
        """Wait until there is something to read, or the other end is closed; False when the tree has stood still."""
        while not select.select([descriptor], [], [], min(1.0, self.limit_s / 4))[0]:
            if self.passed():
                return False
        return True

    def _look(self, passed_s: float) -> None:
        seen = read_if_there(str(self._steps)).decode() if self._steps is not None else ""
        if seen != self._seen:
            self._seen, self.own_s = seen, 0.0
            if self._progress is not None:
                self._progress(int(seen))
        usage = self._usage(self._leader)
        kept = [_kept_waiting(self._before.get(pid), now, passed_s) for pid, now in usage.items()]
        # A wait is counted when it ends, so one look may see more of it than has passed since the last: that is repaid.
        self.own_s = max(self.own_s + passed_s - max(kept, default=0.0), 0.0)
        self._before = usage


def _kept_waiting(before: Usage | None, now: Usage, passed_s: float) -> float:
    """Return how long (s) a process wanted to run and was not let since it was last looked at."""
    if now.state in ("T", "t"):
        return passed_s
    if before is None:
        return 0.0
    waited = now.waited_s - before.waited_s if now.waited_s is not None and before.waited_s is not None else 0.0
    ran = now.cpu_s - before.cpu_s
    if now.state == "R" and waited == 0.0 and ran < 0.5 * passed_s:
        return max(passed_s - ran, 0.0)  # in the queue now; the kernel adds that up only when it gets a CPU
    return max(waited, 0.0)
