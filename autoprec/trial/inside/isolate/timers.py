"""A script's own deadlines (``signal.alarm`` around each step) do not run in a trial.

A recorded step, a scan of many probes, a step in emulated formats takes many times what the script allows for one, and
a host stands still in its first step for the whole search.
"""

from __future__ import annotations

import signal
from typing import Any

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_set = signal.setitimer


def stop_timers() -> None:
    """Stop what runs, and let ``signal.alarm`` and ``signal.setitimer`` of this process do nothing from now on."""
    for timer in _TIMERS:
        _set(timer, 0)
    signal.alarm = _alarm
    signal.setitimer = _setitimer


def _alarm(seconds: int, /) -> int:  # noqa: ARG001
    return 0


def _setitimer(which: int, seconds: float, interval: float = 0.0, /) -> Any:  # noqa: ARG001
    return (0.0, 0.0)
