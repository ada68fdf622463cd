"""When this process began, by the operating system: what a person waits for begins there, not at an import."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def process_began() -> float:
    """Return the ``time.monotonic()`` at which this process was started; now where the system does not say (no /proc).

    The system counts in ticks of 10 ms.
    """
    now = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): seconds after boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        return now - max(0.0, age)
    return now
