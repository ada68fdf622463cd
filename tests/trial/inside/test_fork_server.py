"""The fork server's own part; how it is asked and answers is in tests/trial/driver/test_forks.py."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from autoprec.trial.inside.fork_server import serve_forks


def test_an_idle_server_does_what_it_was_given_once_and_ends_with_its_driver(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    done = tmp_path / "done"
    pid = os.fork()
    if pid == 0:
        ours.close()

        def idle() -> None:
            with done.open("a") as stream:
                stream.write("once\n")
            theirs.send(b"{}\n")

        serve_forks(theirs, when_idle=idle)
        os._exit(7)
    theirs.close()
    ours.settimeout(30)
    assert ours.recv(3) == b"{}\n"
    ours.close()  # the driver is gone: so is the server
    assert os.waitpid(pid, 0)[1] == 0
    assert done.read_text() == "once\n"
