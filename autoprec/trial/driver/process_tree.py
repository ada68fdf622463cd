"""One started process tree as the driver sees it: its output pumped into a bounded log, its end, its killing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoprec.support.redact import Redactor
from autoprec.trial.driver.launched import own_words
from autoprec.trial.processes import end_group, marked_processes, remove_shared_memory, shared_memory_of, sweep

#: What is kept of a process's output in memory and in its log: a script may print without end.
_TAIL_BYTES, _LOG_BYTES = 32_768, 4 * 1024 * 1024


class ProcessTree(ABC):
    """A process in a session of its own whose output comes through a pipe.

    ProcessTree goes to ``log`` (at most 4 MiB) and the last 32 KiB are kept in memory.
    """

    pid: int

    def __init__(self, reader: int, mark: str, log: Path | None) -> None:
        self._reader, self._mark, self._log = reader, mark, log
        self._tail = bytearray()
        self._pump = threading.Thread(target=self._read, name="autoprec-output", daemon=True)
        self._pump.start()

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code (negative: signal), or None while it runs."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; None when the time is over."""

    def _read(self) -> None:
        written, pending, redact = 0, b"", Redactor()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._reader)
            sink = None
            if self._log is not None:
                with contextlib.suppress(OSError):  # without a log there is still the tail; an unread pipe would block
                    self._log.parent.mkdir(parents=True, exist_ok=True)
                    sink = stack.enter_context(self._log.open("ab"))
            while True:
                try:
                    chunk = os.read(self._reader, 65536)
                except OSError:
                    return
                self._tail += chunk
                del self._tail[:-_TAIL_BYTES]
                if sink is not None and written < _LOG_BYTES:
                    lines, pending = _whole_lines(pending + chunk, redact, final=not chunk)
                    with contextlib.suppress(OSError):  # a full disk must not stop the trial
                        sink.write(lines[: _LOG_BYTES - written])
                        sink.flush()
                    written += len(lines)
                if not chunk:
                    return

    @property
    def tail(self) -> str:
        """The last lines of its output, without a launcher's report of a failure."""
        return own_words(bytes(self._tail).decode("utf-8", "replace"))

    def settle(self) -> None:
        """Give the output pump a moment to read what the process wrote last."""
        self._pump.join(1.0)

    def end(self, *, grace_s: float = 0.0) -> None:
        """End the whole tree: SIGTERM and a grace period if asked for, then SIGKILL, then all that it left."""
        if grace_s > 0 and self.poll() is None:
            end_group(self.pid, signal.SIGTERM)
            self.wait(grace_s)
        shared = shared_memory_of(marked_processes(self._mark, [self.pid]))
        if self.pid:
            end_group(self.pid)
        self.wait(5.0)
        sweep(self._mark, [self.pid])
        remove_shared_memory(shared)
        self._pump.join(1.0)


def _whole_lines(output: bytes, redact: Redactor, *, final: bool) -> tuple[bytes, bytes]:
    """Split output into what may be written down, secrets hidden, and the beginning of a line that is not complete."""
    end = max(output.rfind(b"\n"), output.rfind(b"\r")) + 1
    if final or len(output) - end > _TAIL_BYTES:
        end = len(output)
    lines = redact(output[:end].decode("utf-8", "surrogateescape"))
    return lines.encode("utf-8", "surrogateescape"), output[end:]


class NewProcess(ProcessTree):
    """Starts ``argv`` as a new process."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, mark: str, log: Path | None) -> None:
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self.pid = self._process.pid
        super().__init__(reader, mark, log)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process so many seconds at most; return its exit code, or None where it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None
