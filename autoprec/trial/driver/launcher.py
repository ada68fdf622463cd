"""What the runners of one command share: a mark to find all their processes by, and the zygote to start more from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.process_tree import Output
from autoprec.trial.messages import messages
from autoprec.trial.processes import born, private_folder, sweep

__all__ = ["Family", "Forked"]

_families: dict[ScriptCommand, Family] = {}
_guard = threading.Lock()
#: How often a process is looked at while the zygote says nothing of it.
_LOOK_S = 0.2


class Forked(Output):
    """A process forked from the zygote; behaves like :class:`autoprec.trial.driver.process_tree.Started`."""

    def __init__(self, reader: int, mark: str, log: Path | None) -> None:
        super().__init__(reader, mark, log)
        self.pid = 0
        self._code: int | None = None
        self.known = threading.Event()
        self._ended = threading.Event()

    def started(self, pid: int) -> None:
        """The zygote tells the process number."""
        self.pid = pid
        self.known.set()

    def ended(self, wait_status: int) -> None:
        """The zygote tells the end."""
        self._code = os.waitstatus_to_exitcode(wait_status)
        self.known.set()
        self._ended.set()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the zygote tells the end, or, where the zygote is lost, until the process is seen to be gone."""
        end = time.monotonic() + timeout_s
        while not self._ended.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if self.pid and not born(self.pid) and not self._ended.wait(_LOOK_S):
                self.ended(signal.SIGKILL)
            if time.monotonic() >= end:
                break
        return self._code


class Family:
    """Shared by all runners of one command in this process; the last to leave ends what is left."""

    def __init__(self, command: ScriptCommand) -> None:
        self.mark = f"autoprec-{uuid.uuid4().hex}"
        self._command = command
        self._members = 0
        self._count = 0
        self._lock = threading.Lock()
        self._folder = private_folder()
        self._connection: socket.socket | None = None
        self._children: dict[int, Forked] = {}
        self.address = str(self._folder / "zygote")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(4)
        threading.Thread(target=self._accept, name="autoprec-zygote", daemon=True).start()

    @classmethod
    def join(cls, command: ScriptCommand) -> Family:
        """Return the family of a command, making it if this is its first runner."""
        with _guard:
            family = _families.get(command)
            if family is None:
                family = _families[command] = cls(command)
            family._members += 1
            return family

    def leave(self) -> None:
        """A runner has closed."""
        with _guard:
            self._members -= 1
            if self._members:
                return
            _families.pop(self._command, None)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._replace(None)
        sweep(self.mark)
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_mark(self) -> str:
        """Return the mark of one more member."""
        with self._lock:
            self._count += 1
            return f"{self.mark}.{self._count}."

    @property
    def ready(self) -> bool:
        """True when there is a zygote to fork from."""
        return self._connection is not None

    def fork(
        self, config: Mapping[str, Any], environment: Mapping[str, str], mark: str, log: Path | None
    ) -> Forked | None:
        """Start a process from the zygote; None when there is none (any more)."""
        connection = self._connection
        if connection is None:
            return None
        reader, writer = os.pipe()
        child = Forked(reader, mark, log)
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
                before.sendall(b'{"op": "exit"}')

    def _listen(self, connection: socket.socket) -> None:
        for message in messages(connection):
            self._handle(message)
        with self._lock:
            if self._connection is connection:
                self._connection = None
        connection.close()

    def _handle(self, message: dict[str, Any]) -> None:
        child = self._children.get(int(message.get("id", 0)))
        if child is None:
            return
        if message["op"] == "started":
            child.started(int(message["pid"]))
        else:
            child.ended(int(message["wait_status"]))
            self._children.pop(int(message["id"]), None)
