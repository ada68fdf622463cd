"""A fork of the script that is asked one thing: it goes on in the script's training step, answers once, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import NoReturn

from autoprec.support.plain import Document
from autoprec.trial.inside.isolate.entropy import fork
from autoprec.trial.inside.isolate.isolation import add_layer_of_probe
from autoprec.trial.processes import die_with_parent
from autoprec.trial.progress import Deadline


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a trial has no answer to what it was asked."""

    why: str


def fork_to_answer() -> tuple[int, int]:
    """Fork; return (child's process id, descriptor to read its answer), in the child (0, descriptor to write it)."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid:
        os.close(writer)
        return pid, reader
    die_with_parent()
    os.close(reader)
    add_layer_of_probe()
    return 0, writer


def answer(writer: int, document: Document) -> NoReturn:
    """In the child: answer, and end the process at once."""
    with contextlib.suppress(OSError):
        os.write(writer, json.dumps(document).encode() + b"\n")
    os._exit(0)


def await_answer(pid: int, reader: int, limit_s: float) -> Document | str:
    """Wait until a child has answered and ended; returns the answer, or why there is none.

    Args:
        limit_s: seconds of the child's own time after which it is ended.
    """
    data, timed_out = b"", False
    deadline = Deadline(limit_s, pid)
    while True:
        if not deadline.awaits(reader):
            os.kill(pid, signal.SIGKILL)
            timed_out = True
            break
        chunk = os.read(reader, 65536)
        if not chunk:
            break
        data += chunk
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if data.endswith(b"\n"):
        return dict(json.loads(data))
    return "the deadline passed" if timed_out else f"it ended with status {status}"
