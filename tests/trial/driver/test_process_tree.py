"""A started process: bounded output, a whole tree ended."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from autoprec.support.redact import Redactor
from autoprec.trial.driver.process_tree import NewProcess, _whole_lines
from autoprec.trial.processes import marked_processes


def start(code: str, tmp_path: Path, log: Path | None = None) -> NewProcess:
    env = {**os.environ, "AUTOPREC_TEST": "m-started"}
    return NewProcess([sys.executable, "-S", "-c", code], env, tmp_path, "m-started", log)


def test_output_goes_to_a_bounded_log_and_the_tail(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "host.log"
    process = start("print('first')\nfor i in range(100000): print('x' * 100)\nprint('last')", tmp_path, log)
    assert process.wait(60) == 0
    process.settle()
    assert process.tail.endswith("last\n")
    assert len(process.tail) <= 32_768
    assert log.stat().st_size == 4 * 1024 * 1024
    assert log.read_text().startswith("first")
    process.end()


def test_end_reaches_descendants_that_ignore_sigterm(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)"
    )
    process = start(code, tmp_path)
    end = time.monotonic() + 30
    while "ready" not in process.tail and time.monotonic() < end:
        time.sleep(0.01)
    assert len(marked_processes("m-started")) == 2
    process.end(grace_s=0.1)
    assert process.poll() == -9
    assert marked_processes("m-started") == []


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NewProcess(["/no/such/program"], {}, tmp_path, "m", None)


def test_a_private_key_that_comes_in_several_reads_is_not_in_the_log() -> None:
    key = ["-----BEGIN PRIVATE KEY-----", "short1", "short2", "-----END PRIVATE KEY-----"]
    redact, pending, log = Redactor(), b"", b""
    for line in [*key, "loss 1.0"]:
        lines, pending = _whole_lines(pending + f"{line}\n".encode(), redact, final=False)
        log += lines
    assert b"short" not in log
    assert log.endswith(b"loss 1.0\n")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")
def test_what_a_killed_tree_shared_is_removed(tmp_path: Path) -> None:
    name = f"/dev/shm/autoprec_test_{os.getpid()}"
    code = (
        "import mmap, sys, time; file = open(sys.argv[1], 'w+b'); file.truncate(4096);"
        "kept = mmap.mmap(file.fileno(), 4096); print('mapped', flush=True); time.sleep(60)"
    )
    tree = NewProcess([sys.executable, "-c", code, name], os.environ, tmp_path, "", None)
    while "mapped" not in tree.tail:
        time.sleep(0.01)
    tree.end()
    assert not os.path.exists(name)
