"""Ctrl-C, SIGTERM and SIGHUP end a command once: the first unwinds it, the next ones do not disturb the tidying up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

#: 128 and the number of the signal, as a shell says it.
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_TERMINATED)


@contextlib.contextmanager
def ended_once() -> Iterator[None]:
    """Let the first signal unwind the stack, so that files are finished and children ended.

    A second Ctrl-C, or the SIGTERM that follows a SIGHUP, would otherwise cut the saving short: they are ignored from
    then on (SIGQUIT and SIGKILL still end the process). ``nohup`` is respected. Outside the main thread nothing
    happens, because signals belong to that.
    """
    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN and before is not None:
                previous[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, before in previous.items():
            if signal.getsignal(number) is _end:
                signal.signal(number, before)
