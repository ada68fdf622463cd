"""Processes that a server forks: asked for, followed to their end, and lost with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoprec.trial.driver.forks import ForkedProcess, Forks
from autoprec.trial.inside.fork_server import serve_forks, settle
from autoprec.trial.messages import receive_messages


def test_a_process_whose_parent_says_nothing_is_seen_to_be_gone() -> None:
    reader, writer = os.pipe()
    forked = ForkedProcess(reader, "autoprec-test", None)
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    forked.set_pid(gone.pid)
    assert forked.wait(0.5) is None  # it lives
    gone.kill()
    gone.wait()
    began = time.monotonic()
    assert forked.wait(20.0) == -signal.SIGKILL
    assert time.monotonic() - began < 5
    os.close(writer)


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["default", "SIGCHLD ignored"])
def forks(request: pytest.FixtureRequest) -> Iterator[Forks]:
    """The connection to a server; also where the script ignores SIGCHLD, by which ends are forgotten."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        signal.signal(signal.SIGCHLD, request.param)
        settle()
        config = serve_forks(theirs, "m-server")
        os.write(1, f"hello from {os.environ['NUMBER']}\n".encode())
        if signal.getsignal(signal.SIGCHLD) is not request.param:
            os._exit(9)
        if config["code"] is None:
            time.sleep(1000)
        Path(config["result"]).write_text("done")
        os._exit(config["code"])
    theirs.close()
    connected = Forks(ours, receive_messages(ours))
    yield connected
    connected.end()
    assert os.waitpid(pid, 0)[1] == 0


def test_requests_are_forked_answered_and_ended(forks: Forks, tmp_path: Path) -> None:
    padding = "x" * 300_000  # a request that comes in several pieces
    made = []
    for number, code in enumerate((0, 3, None)):
        config = {"code": code, "result": str(tmp_path / str(number)), "padding": padding}
        one = forks.fork(config, {"NUMBER": str(number)}, f"m-server-{number}", None)
        assert one is not None
        made.append(one)
    assert [one.wait(30) for one in made[:2]] == [0, 3]
    assert made[2].wait(0.1) is None
    made[2].end()
    assert made[2].poll() == -signal.SIGKILL
    for number, one in enumerate(made):
        one.settle()
        assert one.tail == f"hello from {number}\n"
        assert not one.lost
    assert (tmp_path / "0").read_text() == "done"
    assert forks.alive


def test_what_runs_is_lost_with_its_server_and_nothing_more_is_forked(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve_forks(theirs)
        time.sleep(1000)
        os._exit(0)
    theirs.close()
    forks = Forks(ours, receive_messages(ours))
    running = forks.fork({}, {}, "m-lost", None)
    assert running is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert running.wait(10) == -signal.SIGKILL
    assert running.lost
    assert forks.fork({}, {}, "m-lost", None) is None
    running.end()
