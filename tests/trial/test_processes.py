"""Finding and ending process trees."""

from __future__ import annotations

import os
import subprocess
import time

from autoprec.trial.processes import born, marked_processes, sweep


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"], env={**os.environ, "AUTOPREC_TEST": mark}, start_new_session=True)


def test_a_mark_is_a_prefix_and_exact_with_a_nul() -> None:
    one, ten = sleeper("m-test.1"), sleeper("m-test.10")
    try:
        time.sleep(0.1)
        assert set(marked_processes("m-test.1")) == {one.pid, ten.pid}
        assert marked_processes("m-test.1\0") == [one.pid]
        assert marked_processes("no-such-mark", [ten.pid]) == [ten.pid]
        assert sweep("m-test.") == []
    finally:
        assert one.wait(5) == ten.wait(5) == -9


def test_born_tells_processes_apart() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    mine, its = born(os.getpid()), born(process.pid)
    assert mine
    assert its
    process.kill()
    process.wait()
    assert born(process.pid) == ""
    assert born(os.getpid()) == mine
