"""The fork server: a training process stopped at its first training forward, forked once per trial.

The host, one running copy of the script, is that process. It talks to the driver over one stream socket, a JSON
document per line (:mod:`autoprec.trial.messages`). Requests: ``{"op": "run", "id", "spec",
"result", "asked", "timeout_s"}`` and ``{"op": "exit"}``. Answers: ``{"op": "done", "id", "wait_status", "timed_out",
"tail"}``. The output of every child goes through a pipe of which only the tail is kept, so endless output is harmless.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from autoprec.trial.environment import MARK_VARIABLE
from autoprec.trial.inside.isolate.entropy import fork
from autoprec.trial.inside.isolate.isolation import before_forks
from autoprec.trial.messages import Lines, send_message
from autoprec.trial.processes import (
    adopt_orphans,
    die_with_parent,
    end_group,
    end_orphans,
    prefer_as_oom_victim,
    reaps_children,
    sweep,
)
from autoprec.trial.progress import Deadline, steps_file

TAIL_BYTES = 16_384
_GRACE_S = 2.0


@dataclass(slots=True)
class Request:
    """What a forked child was asked to do."""

    id: int
    spec: dict[str, Any]
    result: str
    asked: float
    timeout_s: float


@dataclass(slots=True)
class _Child:
    request: Request
    pid: int
    output: int
    deadline: Deadline
    kill_at: float = 0.0
    tail: bytearray = field(default_factory=bytearray)
    timed_out: bool = False
    killed: bool = False
    open: bool = True


def settle() -> None:
    """Prepare for being forked: note the files made so far, collect once, keep the collector off the shared pages."""
    before_forks()
    gc.collect()
    gc.freeze()
    flush_streams()


def serve_forks(control: socket.socket, mark: str) -> Request:
    """Fork a child per request until the driver says exit or goes away.

    Returns only in a child, with its request; in the server itself the process ends here.
    """
    server = _ForkServer(control, mark)
    while True:
        request = server.turn()
        if request is not None:
            return request


class _ForkServer:
    def __init__(self, control: socket.socket, mark: str) -> None:
        self._control, self._mark = control, mark
        self._lines = Lines()
        self._children: dict[int, _Child] = {}
        self._own = adopt_orphans()  # what the script itself had started before
        self._handlers = {
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGINT: signal.SIG_DFL,
            signal.SIGCHLD: reaps_children(),
        }

    def turn(self) -> Request | None:
        """Handle what has happened; returns a request only in a child made for it."""
        watched: list[Any] = [self._control, *(c.output for c in self._children.values() if c.open)]
        ready, _, _ = select.select(watched, [], [], self._patience())
        for source in ready:
            if source is self._control:
                continue
            self._drain(source)
        self._enforce()
        self._reap()
        if self._control in ready:
            for message in self._lines.feed(self._receive()):
                if message.pop("op") == "exit":
                    self._end()
                request = Request(**message)
                if self._fork(request):
                    return request
        return None

    def _patience(self) -> float | None:
        if not self._children:
            return None
        return 0.02 if all(child.open for child in self._children.values()) else 0.001

    def _receive(self) -> bytes:
        try:
            chunk = self._control.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            self._end()
        return chunk

    def _end(self) -> None:
        for child in self._children.values():
            end_group(child.pid)
        sweep(self._mark, [c.pid for c in self._children.values()], patience_s=1.0)
        end_orphans(self._own)  # among its own is the zygote, which tells the driver of other hosts' ends
        os._exit(0)

    # ---------------------------------------------------------------- children
    def _fork(self, request: Request) -> bool:
        """Fork; True in the child."""
        reader, writer = os.pipe()
        pid = fork()
        if pid:
            os.close(writer)
            os.set_blocking(reader, False)
            self._children[pid] = _Child(
                request, pid, reader, Deadline(request.timeout_s, pid, steps_file(request.result))
            )
            return False
        os.setsid()
        die_with_parent()
        prefer_as_oom_victim()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        for descriptor in (reader, writer, *(c.output for c in self._children.values())):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._control.close()
        self._children.clear()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.environ[MARK_VARIABLE] = f"{self._mark}.{request.id}"
        for number, handler in self._handlers.items():
            with contextlib.suppress(
                ValueError, TypeError
            ):  # not in the main thread; a handler that Python cannot name
                signal.signal(number, handler)
        return True

    def _drain(self, descriptor: int) -> None:
        child = next(c for c in self._children.values() if c.output == descriptor)
        for _ in range(64):  # a child that never stops printing must not keep us here
            try:
                chunk = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            if not chunk:
                child.open = False
                return
            child.tail += chunk[-TAIL_BYTES:]
            del child.tail[:-TAIL_BYTES]

    def _enforce(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if not child.timed_out:
                if child.deadline.passed():
                    child.timed_out, child.kill_at = True, now + _GRACE_S
                    end_group(child.pid, signal.SIGTERM)
            elif not child.killed and now >= child.kill_at:
                child.killed = True
                end_group(child.pid)

    def _reap(self) -> None:
        for pid, child in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            if child.open:
                self._drain(child.output)
            os.close(child.output)
            del self._children[pid]
            end_group(pid)  # what it started and left behind ...
            with contextlib.suppress(OSError):
                send_message(
                    self._control,
                    op="done",
                    id=child.request.id,
                    wait_status=status,
                    timed_out=child.timed_out,
                    tail=child.tail.decode("utf-8", "replace"),
                )
            if status:  # also in sessions of its own; after a good end this can wait for the end of the launcher
                sweep(f"{self._mark}.{child.request.id}\0", [pid], patience_s=1.0)
            if not self._children:  # then every orphan is of a trial that has ended
                end_orphans(self._own)


def flush_streams() -> None:
    """Write out what the script printed before the fork, so that no child prints it again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
