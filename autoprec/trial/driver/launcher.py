"""The launcher: starts every process of one script command, and holds what its runners share.

That is a mark in the environment, by which all processes of the command are found and ended, and the connection to the
zygote (see :mod:`autoprec.trial.inside.zygote`), from which a process is forked in a tenth of the time Python and torch
need to start.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.forks import ForkedProcess, Forks
from autoprec.trial.messages import listen, receive_messages
from autoprec.trial.processes import private_folder, remove_folder, remove_made, sweep

_launchers: dict[ScriptCommand, Launcher] = {}
_guard = threading.Lock()


class Launcher:
    """Shared by all runners of one command in this process; the last one to leave ends every process that is left."""

    def __init__(self, command: ScriptCommand) -> None:
        self.mark = f"autoprec-{uuid.uuid4().hex}"
        self._command = command
        self._runners = 0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        #: the private directory in which every process of the command may write
        self.folder, self._held = private_folder()
        self._zygote: Forks | None = None
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
        remove_made(self.folder)
        remove_folder(self.folder)
        os.close(self._held)

    def new_folder(self) -> Path:
        """Make the private directory of one more runner.

        All lie in one: what a process may write is settled when it starts, and those it forks may belong to others.
        """
        path = self.folder / f"runner-{next(self._numbers)}"
        path.mkdir()
        return path

    def new_mark(self) -> str:
        """Return a mark of its own for one more runner."""
        return f"{self.mark}.{next(self._numbers)}."

    @property
    def ready(self) -> bool:
        """True when there is a zygote to fork from."""
        return self._zygote is not None and self._zygote.alive and not self._spoiled

    def fork_no_more(self) -> None:
        """Stop forking the zygote, as its forks die before they train: further processes are started anew."""
        self._spoiled = True

    def fork(
        self, config: Document, environment: Mapping[str, str], mark: str, log: Path | None
    ) -> ForkedProcess | None:
        """Start a process from the zygote; None when there is none (any more).

        Args:
            config: the trial's configuration.
            environment: variables that it has beside the server's.
            mark: the mark by which its processes are found.
            log: file for what it prints; None leaves the server's.
        """
        zygote = self._zygote
        return None if zygote is None else zygote.fork(config, environment, mark, log)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._replace(Forks(connection, receive_messages(connection)))

    def _replace(self, zygote: Forks | None) -> None:
        """A later copy supersedes an earlier one."""
        with self._lock:
            before, self._zygote = self._zygote, zygote
        if before is not None:
            before.end()
