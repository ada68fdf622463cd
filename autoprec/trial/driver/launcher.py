"""The launcher: starts every process of one script command, and holds what its runners share.

That is a mark in the environment, by which all processes of the command are found and ended, and the connection to the
zygote (see :mod:`autoprec.trial.inside.zygote`), from which a process is forked in a tenth of the time Python and torch
need to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.process_tree import ProcessTree
from autoprec.trial.messages import listen, receive_messages, send_message
from autoprec.trial.processes import private_folder, remove_folder, start_ticks, sweep

_launchers: dict[ScriptCommand, Launcher] = {}
_guard = threading.Lock()
#: How often a process is looked for while the zygote does not report its end.
_LOOK_S = 0.2


class ZygoteProcess(ProcessTree):
    """A process forked from the zygote; its parent, the zygote, reports its process id and its end."""

    def __init__(self, reader: int, mark: str, log: Path | None) -> None:
        super().__init__(reader, mark, log)
        self.pid = 0
        self._code: int | None = None
        self.known = threading.Event()
        self._ended = threading.Event()

    def set_pid(self, pid: int) -> None:
        """Take the process id that the zygote reports."""
        self.pid = pid
        self.known.set()

    def set_end(self, wait_status: int) -> None:
        """Take the end that the zygote reports, as a status of ``os.waitpid``."""
        self._code = os.waitstatus_to_exitcode(wait_status)
        self.known.set()
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the zygote tells the end, or, where the zygote is lost, until the process is seen to be gone."""
        end = time.monotonic() + timeout_s
        while not self._ended.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if self.pid and not start_ticks(self.pid) and not self._ended.wait(_LOOK_S):
                self.set_end(signal.SIGKILL)
            if time.monotonic() >= end:
                break
        return self._code


class Launcher:
    """Shared by all runners of one command in this process; the last one to leave ends every process that is left."""

    def __init__(self, command: ScriptCommand) -> None:
        self.mark = f"autoprec-{uuid.uuid4().hex}"
        self._command = command
        self._runners = 0
        self._count = 0
        self._lock = threading.Lock()
        #: the private directory in which every process of the command may write
        self.folder, self._held = private_folder()
        self._connection: socket.socket | None = None
        self._children: dict[int, ZygoteProcess] = {}
        self._folders = 0
        self._spoiled = False
        self.address = str(self.folder / "zygote")
        self._listener = listen(self.address, 4)
        threading.Thread(target=self._accept, name="autoprec-zygote", daemon=True).start()

    @classmethod
    def join(cls, command: ScriptCommand) -> Launcher:
        """Return the launcher of a command, making it if this is its first runner."""
        with _guard:
            launcher = _launchers.get(command)
            if launcher is None:
                launcher = _launchers[command] = cls(command)
            launcher._runners += 1
            return launcher

    def leave(self) -> None:
        """Let go of the launcher; the last runner that leaves ends every process that is left."""
        with _guard:
            self._runners -= 1
            if self._runners:
                return
            _launchers.pop(self._command, None)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._replace(None)
        sweep(self.mark)
        remove_folder(self.folder)
        os.close(self._held)

    def new_folder(self) -> Path:
        """Make the private directory of one more runner.

        All lie in one: what a process may write is settled when it starts, and those it forks may belong to others.
        """
        with self._lock:
            self._folders += 1
            path = self.folder / f"runner-{self._folders}"
        path.mkdir()
        return path

    def new_mark(self) -> str:
        """Return a mark of its own for one more runner."""
        with self._lock:
            self._count += 1
            return f"{self.mark}.{self._count}."

    @property
    def ready(self) -> bool:
        """True when there is a zygote to fork from."""
        return self._connection is not None and not self._spoiled

    def fork_no_more(self) -> None:
        """Forks of the zygote die before they train: start every further process anew."""
        self._spoiled = True

    def fork(
        self, config: Mapping[str, Any], environment: Mapping[str, str], mark: str, log: Path | None
    ) -> ZygoteProcess | None:
        """Start a process from the zygote; None when there is none (any more)."""
        connection = self._connection
        if connection is None:
            return None
        reader, writer = os.pipe()
        child = ZygoteProcess(reader, mark, log)
        with self._lock:
            self._count += 1
            number = self._count
            self._children[number] = child
            request = {"id": number, "config": dict(config), "environment": dict(environment)}
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], [writer])
            except OSError:
                self._children.pop(number)
                os.close(writer)
                return None
        os.close(writer)
        return child if child.known.wait(30.0) and child.pid else None

    # ---------------------------------------------------------------- the zygote's messages
    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(connection,), name="autoprec-zygote", daemon=True).start()
            self._replace(connection)

    def _replace(self, connection: socket.socket | None) -> None:
        """A later copy supersedes an earlier one; the earlier ends when its last fork has."""
        with self._lock:
            before, self._connection = self._connection, connection
        if before is not None:
            with contextlib.suppress(OSError):
                send_message(before, op="exit")

    def _listen(self, connection: socket.socket) -> None:
        for message in receive_messages(connection):
            self._handle(message)
        with self._lock:
            if self._connection is connection:
                self._connection = None
        connection.close()

    def _handle(self, message: dict[str, Any]) -> None:
        child = self._children.get(int(message.get("id", 0)))
        if child is None:
            return
        if message["op"] == "forked":
            child.set_pid(int(message["pid"]))
        else:
            child.set_end(int(message["wait_status"]))
            self._children.pop(int(message["id"]), None)
