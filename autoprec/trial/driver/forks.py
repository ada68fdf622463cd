"""Processes that one of ours forks on request: the host, for trials, or the zygote, for hosts and trials.

Both run :mod:`autoprec.trial.inside.fork_server`; this is the driver's end of the connection. A fork starts in
milliseconds, where Python and torch take seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from autoprec.support.plain import Document
from autoprec.trial.driver.process_tree import ProcessTree
from autoprec.trial.messages import send_message
from autoprec.trial.processes import start_ticks

#: How often a process is looked for while its parent does not report its end.
_LOOK_S = 0.2
#: A server that has not forked within this many seconds hangs.
_FORKED_S = 30.0


class ForkedProcess(ProcessTree):
    """A process forked on request; its parent reports its process id and its end.

    Attributes:
        lost: its parent has ended, and the process with it.
    """

    def __init__(self, reader: int, mark: str, log: Path | None) -> None:
        super().__init__(reader, mark, log)
        self.pid, self.lost = 0, False
        self._code: int | None = None
        self.known = threading.Event()
        self._ended = threading.Event()

    def set_pid(self, pid: int) -> None:
        """Take the process id that the parent reports."""
        self.pid = pid
        self.known.set()

    def set_end(self, wait_status: int, *, lost: bool = False) -> None:
        """Take the end that the parent reports, as a status of ``os.waitpid``."""
        self._code, self.lost = os.waitstatus_to_exitcode(wait_status), lost
        self.known.set()
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the parent tells the end, or, where the parent says nothing, until the process is gone."""
        end = time.monotonic() + timeout_s
        while not self._ended.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if self.pid and not start_ticks(self.pid) and not self._ended.wait(_LOOK_S):
                self.set_end(signal.SIGKILL)
            if time.monotonic() >= end:
                break
        return self._code

    def end(self, *, grace_s: float = 0.0) -> None:
        """End the whole tree. After a good end, what it left elsewhere can wait for the end of the launcher."""
        if self.poll() == 0:
            self.settle()
        else:
            super().end(grace_s=grace_s)


class Forks:
    """The connection to a process that forks itself on request.

    Args:
        connection: to that process; closed here when it ends.
        messages: what comes from it.
    """

    def __init__(self, connection: socket.socket, messages: Iterator[Document]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._children: dict[int, ForkedProcess] = {}
        self._count = 0
        self.alive = True
        threading.Thread(target=self._listen, args=(messages,), name="autoprec-forks", daemon=True).start()

    def fork(
        self, config: Document, environment: Mapping[str, str], mark: str, log: Path | None
    ) -> ForkedProcess | None:
        """Start a process with a configuration and further variables; None where the server has ended, or hangs.

        Args:
            config: the trial's configuration.
            environment: variables that it has beside the server's.
            mark: the mark by which its processes are found.
            log: file for what it prints; None leaves the server's.
        """
        reader, writer = os.pipe()
        child = ForkedProcess(reader, mark, log)
        try:
            with self._lock:  # a request is one line: those of two threads must not mix
                if not self.alive:
                    return None
                self._count += 1
                self._children[self._count] = child
                request = {"op": "fork", "id": self._count, "config": dict(config), "environment": dict(environment)}
                data = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(self._connection, [data], [writer])
                self._connection.sendall(data[sent:])
        except OSError:
            return None
        finally:
            os.close(writer)
        return child if child.known.wait(_FORKED_S) and child.pid else None

    def end(self) -> None:
        """Let the process end, and its forks with it."""
        with self._lock, contextlib.suppress(OSError):
            send_message(self._connection, op="exit")

    def _listen(self, messages: Iterator[Document]) -> None:
        for message in messages:
            child = self._children.get(int(message.get("id", 0)))
            if child is not None and message["op"] == "forked":
                child.set_pid(int(message["pid"]))
            elif child is not None:
                child.set_end(int(message["wait_status"]))
                del self._children[int(message["id"])]
        with self._lock:
            self.alive = False
            self._connection.close()
        for child in self._children.values():
            child.set_end(signal.SIGKILL, lost=True)
