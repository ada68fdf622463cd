"""Trials that compile beside each other, and are timed one at a time.

A compiler keeps one core busy for most of a trial of a compiled script, and the timed steps after it take a few
seconds. So several trials may compile at once. None computes while another is timed: whoever compiles shares a lock,
and whoever is timed holds it alone. The lock is one of POSIX, which belongs to a process: its forks do not hold it, and
it is free when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Turn:
    """One process's part in a file's lock.

    Args:
        path: the file that all trials of a search share; made where it is missing.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beside_others(self) -> None:
        """Wait until no trial is timed, and keep others from being timed meanwhile."""
        fcntl.lockf(self._file, fcntl.LOCK_SH)

    def alone(self) -> None:
        """Wait until no other trial compiles or is timed, and keep all others waiting until this process ends.

        What was shared is let go of first: of two that want the lock alone, each would wait for the other's share.
        """
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
