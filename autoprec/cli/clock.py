"""When this process began, by the operating system: what a person waits for begins there, not at an import."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

#: Python starts within so many seconds. A process that is older was something else first: the shell of
#: ``bash -c "pip install ... && autoprec search ..."``, which becomes its last command.
LONGEST_START_S = 5.0


def process_began() -> float:
    """Return the ``time.monotonic()`` at which this process was started.

    Now, where the system does not say (no /proc), or where the process is older than Python takes to start
    (:data:`LONGEST_START_S`). The system counts in ticks of 10 ms.
    """
    now = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): seconds after boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        return now - max(0.0, age) if age < LONGEST_START_S else now
    return now
