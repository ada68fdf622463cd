"""Finding and ending process trees."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from autoprec.trial.processes import born, marked_processes, private_folder, sweep


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


def test_folders_of_processes_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f"autoprec-p{gone.pid}-abc" / "overlay").mkdir(parents=True)
    (tmp_path / "autoprec-other").mkdir()
    mine = private_folder()
    again = private_folder()
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "autoprec-other", mine, again])


def test_born_tells_processes_apart() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    mine, its = born(os.getpid()), born(process.pid)
    assert mine
    assert its
    process.kill()
    process.wait()
    assert born(process.pid) == ""
    assert born(os.getpid()) == mine
