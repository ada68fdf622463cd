"""The fork server: a process that has come to a certain point stays there, and is forked once for each request.

Two processes are one: the host, which waits at the script's first training forward and is forked once per trial, and
the zygote (:mod:`autoprec.trial.inside.zygote`), which waits where the imports are done. The driver speaks to it over
one stream socket, a JSON document per line (:mod:`autoprec.trial.messages`). Requests: ``{"op": "fork", "id", "config",
"environment"}``, each with the descriptor that the fork's output goes to, and ``{"op": "exit"}``. Answers: ``{"op":
"forked", "id", "pid"}``, ``{"op": "ended", "id", "wait_status"}``. How long a fork may take is the driver's affair.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from autoprec.support.plain import Document
from autoprec.trial.inside.isolate.entropy import fork
from autoprec.trial.inside.isolate.isolation import before_forks
from autoprec.trial.messages import Lines, send_message
from autoprec.trial.processes import adopt_orphans, die_with_parent, end_group, end_orphans, reaps_children, sweep

#: Seconds between two looks at whether a fork has ended.
_LOOK_S = 0.01
#: A server that was not used for this long does what the caller gives it to do meanwhile.
_IDLE_S = 1.5


def settle() -> None:
    """Prepare for being forked: note the files made so far, collect once, keep the collector off the shared pages."""
    before_forks()
    gc.collect()
    gc.freeze()
    flush_streams()


def flush_streams() -> None:
    """Write out what the script printed before the fork, so that no child prints it again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def serve_forks(control: socket.socket, mark: str = "", when_idle: Callable[[], None] | None = None) -> Document:
    """Fork a child per request until the driver says exit or goes away.

    Returns only in a child, with its configuration; in the server itself the process ends here.

    Args:
        control: the connection to the driver.
        mark: at the end what carries this mark is ended as well; empty for nothing but the forks.
        when_idle: called once, while nothing is asked.
    """
    server = _ForkServer(control, mark, when_idle)
    while True:
        config = server.turn()
        if config is not None:
            return config


class _ForkServer:
    def __init__(self, control: socket.socket, mark: str, when_idle: Callable[[], None] | None) -> None:
        self._control, self._mark, self._when_idle = control, mark, when_idle
        self._lines = Lines()
        self._outputs: deque[int] = deque()  # of requests that are not complete yet
        self._children: dict[int, int] = {}
        self._own = adopt_orphans()  # what the script itself had started before
        self._handlers = {
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGINT: signal.SIG_DFL,
            signal.SIGCHLD: reaps_children(),
        }

    def turn(self) -> Document | None:
        """Handle what has happened; returns a configuration only in a child made for it."""
        patience = _LOOK_S if self._children else None if self._when_idle is None else _IDLE_S
        ready, _, _ = select.select([self._control], [], [], patience)
        self._reap()
        if not ready and not self._children and self._when_idle is not None:
            self._when_idle()
            self._when_idle = None
        for request in self._lines.feed(self._receive()) if ready else ():
            if request["op"] == "exit":
                self._end()
            if self._fork(request):
                return dict(request["config"])
        return None

    def _receive(self) -> bytes:
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._control, 1 << 20, 16)
        except OSError:
            chunk, descriptors = b"", []
        self._outputs += descriptors
        if not chunk:
            self._end()
        return chunk

    def _end(self) -> None:
        for pid in self._children:
            end_group(pid)
        sweep(self._mark, self._children, patience_s=1.0)
        end_orphans(self._own)  # among its own is the zygote, which tells the driver of other hosts' ends
        os._exit(0)

    def _fork(self, request: Document) -> bool:
        """Fork; True in the child."""
        output = self._outputs.popleft()
        pid = fork()
        if pid:
            os.close(output)
            self._children[pid] = int(request["id"])
            self._tell(op="forked", id=request["id"], pid=pid)
            return False
        os.setsid()
        die_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in (output, *self._outputs):
            os.close(descriptor)
        self._control.close()
        signal.set_wakeup_fd(-1)
        os.environ |= request["environment"]
        for number, handler in self._handlers.items():
            with contextlib.suppress(ValueError, TypeError):  # not in the main thread; one that Python cannot name
                signal.signal(number, handler)
        return True

    def _reap(self) -> None:
        for pid, number in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[pid]
                end_group(pid)  # what it started and left behind
                self._tell(op="ended", id=number, wait_status=status)
                if not self._children:  # then every orphan is of a fork that has ended
                    end_orphans(self._own)

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            send_message(self._control, **message)
