"""Ctrl-C, SIGTERM and SIGHUP end a command once: the first unwinds it, the next ones do not disturb the tidying up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

#: After this many seconds of tidying up a further signal ends the process at once; its children end by themselves then.
_PATIENCE_S = 10.0


class _Ending:
    """The handler of all three signals; knows when the first one came."""

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def quiet(self) -> bool:
        """True while no signal has come."""
        return self._since is None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        if self._since is None:
            self._since = time.monotonic()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(code)
        if time.monotonic() - self._since > _PATIENCE_S:
            os._exit(code)
        with contextlib.suppress(OSError, ValueError):  # a closed terminal must not stop us either
            os.write(sys.stderr.fileno(), b"autoprec: ending already, saving what was found\n")


@contextlib.contextmanager
def ended_once() -> Iterator[None]:
    """Let the first signal unwind the stack, so that files are finished and children ended.

    A second Ctrl-C, or the SIGTERM that follows a SIGHUP, would otherwise cut the saving short. ``nohup`` is respected.
    Outside the main thread nothing happens, because signals belong to that.
    """
    previous = {}
    handler = _Ending()
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN and before is not None:
                previous[number] = signal.signal(number, handler)
    except ValueError:
        previous.clear()
    try:
        yield
    finally:
        for number, before in previous.items():  # a process that is leaving is not disturbed on its last steps either
            signal.signal(number, before if handler.quiet else signal.SIG_IGN)
