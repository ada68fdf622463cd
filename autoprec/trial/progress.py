"""Deadlines that begin anew with each step: only a trial that stands still is ended as hung."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from autoprec.trial.processes import read_if_there

#: The file of steps is read so many times per limit, at least and at most so often (s).
_LOOKS, _SHORTEST_S, _LONGEST_S = 60, 0.2, 1.0


def steps_file(result: Path | str) -> Path:
    """Where a trial that writes ``result`` counts its steps."""
    return Path(f"{result}.steps")


class Beat:
    """The trial's side: tells that a step is done; costs two microseconds."""

    def __init__(self, path: Path) -> None:
        self._count = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def __call__(self) -> None:
        self._count += 1
        with contextlib.suppress(OSError):  # a full disk: the deadline then counts from the step before
            os.pwrite(self._file, str(self._count).encode(), 0)


class Deadline:
    """Whether a trial has taken no step for ``limit_s``, while this process was there to look.

    Args:
        limit_s: seconds that may pass without a step.
        steps: the file in which the trial counts its steps (:class:`Beat`).
        progress: called with the number of completed steps whenever it has grown.
        clock: exchanged in tests.
    """

    def __init__(
        self,
        limit_s: float,
        steps: Path | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s, self._steps, self._progress, self._clock = limit_s, steps, progress, clock
        self._looked = clock()
        self._every_s = min(max(_SHORTEST_S, limit_s / _LOOKS), _LONGEST_S, limit_s / 4)
        self._seen = ""
        self._still_s = 0.0

    @property
    def steps(self) -> int:
        """How many steps the trial had completed when it was last looked at."""
        return int(self._seen or 0)

    def passed(self) -> bool:
        """Look at the steps, if it is time to; True when there has been none for too long."""
        now = self._clock()
        if now - self._looked >= self._every_s:
            # not the time in which this process was stopped, and the trial perhaps with it
            self._look(min(now - self._looked, 2 * max(self._every_s, 1.0)))
            self._looked = now
        return self._still_s > self.limit_s

    def _look(self, passed_s: float) -> None:
        self._still_s += passed_s
        seen = read_if_there(str(self._steps)).decode() if self._steps is not None else ""
        if seen != self._seen:
            self._seen, self._still_s = seen, 0.0
            if self._progress is not None:
                self._progress(int(seen))
