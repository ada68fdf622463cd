"""One started process tree as the driver sees it: its output pumped into a bounded log, its end, its killing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoprec.trial.processes import end_group, sweep

__all__ = ["Started"]

_TAIL_BYTES = 32_768
_LOG_BYTES = 4 * 1024 * 1024


class Started:
    """Starts ``argv`` in its own session. Output goes to ``log`` (at most 4 MiB) and the tail is kept in memory."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, mark: str, log: Path | None) -> None:
        self._mark = mark
        self._tail = bytearray()
        self._log = log
        self.process = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._read, name="autoprec-output", daemon=True)
        self._pump.start()

    def _read(self) -> None:
        stream = self.process.stdout
        if stream is None:
            return
        written = 0
        with contextlib.ExitStack() as stack:
            sink = None
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                sink = stack.enter_context(self._log.open("ab"))
            while True:
                try:
                    chunk = os.read(stream.fileno(), 65536)
                except (OSError, ValueError):
                    return
                if not chunk:
                    return
                self._tail += chunk
                del self._tail[:-_TAIL_BYTES]
                if sink is not None and written < _LOG_BYTES:
                    with contextlib.suppress(OSError):  # a full disk must not stop the trial
                        sink.write(chunk[: _LOG_BYTES - written])
                        sink.flush()
                    written += len(chunk)

    @property
    def tail(self) -> str:
        """The last output, at most 32 KiB."""
        return bytes(self._tail).decode("utf-8", "replace")

    def poll(self) -> int | None:
        """Return the exit code (negative: signal), or None while it runs."""
        return self.process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; None when the time is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def settle(self) -> None:
        """Give the output pump a moment to read what the process wrote last."""
        self._pump.join(1.0)

    def end(self, *, grace_s: float = 0.0) -> None:
        """End the whole tree: SIGTERM and a grace period if asked for, then SIGKILL, then everything it left behind."""
        if grace_s > 0 and self.process.poll() is None:
            end_group(self.process.pid, signal.SIGTERM)
            self.wait(grace_s)
        end_group(self.process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        sweep(self._mark, [self.process.pid])
        self._pump.join(1.0)
        if self.process.stdout is not None and not self._pump.is_alive():
            self.process.stdout.close()


def wait_until(deadline: float, step_s: float = 0.01) -> bool:
    """Sleep a little; False when the deadline has passed."""
    if time.monotonic() >= deadline:
        return False
    time.sleep(step_s)
    return True
