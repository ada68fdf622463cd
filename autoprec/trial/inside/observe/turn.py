"""Turns of trials that share a device: one is timed while another starts and compiles, or not before that is done."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds between two looks, and between two signs of life.
_LOOK_S, _BEAT_S = 0.02, 1.0


def take_turn(path: Path, alive: Callable[[], None]) -> None:
    """Wait until no other process has its turn at a file; this one's ends with the process.

    The lock belongs to the process alone: what it forks, such as the workers of a data loader, does not hold it.

    Args:
        path: the file; made where there is none.
        alive: called about once a second, so that waiting is not taken for a hang.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # closed with the process: closing it would end the turn
    told = time.monotonic()
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            time.sleep(_LOOK_S)
        else:
            return
        if time.monotonic() - told >= _BEAT_S:
            alive()
            told = time.monotonic()


def wait_for_start(starting: Path, alive: Callable[[], None]) -> None:
    """Wait until the process beside this one has arrived, or its driver has given it up: its file is gone.

    Args:
        starting: the file.
        alive: called about once a second, so that waiting is not taken for a hang.
    """
    told = time.monotonic()
    while starting.exists():
        time.sleep(_LOOK_S)
        if time.monotonic() - told >= _BEAT_S:
            alive()
            told = time.monotonic()
