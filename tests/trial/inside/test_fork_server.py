"""The fork server, driven by hand over a socket pair."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.inside.fork_server import serve_forks, settle


@pytest.mark.parametrize("of_script", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_requests_are_forked_answered_and_ended(tmp_path: Path, of_script: signal.Handlers) -> None:
    """Also where the script ignores SIGCHLD, by which the kernel forgets how children ended."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        signal.signal(signal.SIGCHLD, of_script)
        settle()
        request = serve_forks(theirs, "m-server")
        os.write(1, f"hello from {request.id}\n".encode())
        if signal.getsignal(signal.SIGCHLD) is not of_script:
            os._exit(9)
        if request.spec["do"] == "sleep":
            time.sleep(1000)
        Path(request.result).write_text("done")
        os._exit(request.spec["code"])
    theirs.close()

    def ask(number: int, spec: dict[str, Any], timeout_s: float) -> None:
        document = {"op": "run", "id": number, "spec": spec, "result": str(tmp_path / str(number)), "asked": 0.0}
        ours.sendall(json.dumps(document | {"timeout_s": timeout_s}).encode() + b"\n")

    ask(1, {"do": "exit", "code": 0}, 30)
    ask(2, {"do": "exit", "code": 3}, 30)
    ask(3, {"do": "sleep", "code": 0}, 0.3)
    answers: dict[int, dict[str, Any]] = {}
    data = b""
    ours.settimeout(30)
    while len(answers) < 3:
        data += ours.recv(65536)
        *lines, data = data.split(b"\n")
        answers |= {json.loads(line)["id"]: json.loads(line) for line in lines}
    assert os.waitstatus_to_exitcode(answers[1]["wait_status"]) == 0
    assert os.waitstatus_to_exitcode(answers[2]["wait_status"]) == 3
    assert answers[3]["timed_out"]
    assert [answers[i]["tail"] for i in (1, 2, 3)] == [f"hello from {i}\n" for i in (1, 2, 3)]
    assert (tmp_path / "1").read_text() == "done"
    ours.close()  # the driver is gone: so is the server
    assert os.waitpid(pid, 0)[1] == 0
