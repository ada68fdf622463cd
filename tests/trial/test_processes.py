"""Finding and ending process trees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autoprec.trial.processes import (
    marked_processes,
    private_folder,
    remove_shared_memory,
    shared_memory_of,
    start_ticks,
    sweep,
)


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
    for name, age in (("killed", 0.0), ("ancient", 1000.0), ("new", 0.0)):
        folder = tmp_path / f"autoprec-p{gone.pid}-{name}"
        (folder / "overlay").mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    (tmp_path / f"autoprec-p{gone.pid}-killed" / "lock").touch()
    others = [tmp_path / name for name in ("autoprec-other", "autoprec-policies-old")]
    for folder in others:
        folder.mkdir()
        os.utime(folder, (time.time() - 1000.0,) * 2)
    mine, one = private_folder()
    again, two = private_folder()
    kept = [*others, tmp_path / f"autoprec-p{gone.pid}-new", mine, again]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    os.close(one)
    os.close(two)


def test_a_folder_that_is_held_stays_though_no_process_has_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another PID namespace that shares the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder, held = private_folder()
    theirs = folder.rename(tmp_path / f"autoprec-p{gone.pid}-abc")
    _, other = private_folder()
    assert theirs.is_dir()
    os.close(held)
    _, third = private_folder()
    assert not theirs.exists()
    os.close(other)
    os.close(third)


def test_born_tells_processes_apart() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    mine, its = start_ticks(os.getpid()), start_ticks(process.pid)
    assert mine
    assert its
    process.kill()
    process.wait()
    assert start_ticks(process.pid) == ""
    assert start_ticks(os.getpid()) == mine


def test_a_daemon_without_a_mark_is_found_as_an_orphan() -> None:
    code = """
import os, subprocess, time
from autoprec.trial.processes import adopt_orphans, end_orphans
own = subprocess.Popen(["sleep", "1000"])
known = adopt_orphans()
assert known == {own.pid}, known
subprocess.run(["setsid", "--fork", "env", "-i", "sleep", "1000"], check=True)
deadline = time.monotonic() + 10
while not (count := end_orphans(known)) and time.monotonic() < deadline:
    time.sleep(0.01)
assert count == 1, count
assert own.poll() is None
assert end_orphans(()) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_link_in_the_temporary_directory_leads_nobody_to_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "tmp").mkdir()
    inside = tmp_path / "precious" / "inside"
    inside.mkdir(parents=True)
    inside.chmod(0o755)
    link = tmp_path / "tmp" / f"autoprec-p{gone.pid}-link"
    link.symlink_to(tmp_path / "precious")
    os.utime(link, (time.time() - 1000,) * 2, follow_symlinks=False)
    _, held = private_folder()
    os.close(held)
    assert link.is_symlink()
    assert inside.stat().st_mode & 0o777 == 0o755
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    theirs = tmp_path / "tmp" / f"autoprec-p{gone.pid}-theirs"
    theirs.mkdir()
    (theirs / "lock").touch()
    _, held = private_folder()
    os.close(held)
    assert theirs.is_dir()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")
def test_shared_memory_of_a_killed_process_is_removed_once_nobody_has_it_mapped() -> None:
    code = (
        "import mmap, sys, time; name = sys.argv[1]; file = open(name, 'w+b'); file.truncate(4096);"
        "kept = mmap.mmap(file.fileno(), 4096); print('mapped', flush=True); time.sleep(60)"
    )
    name = f"/dev/shm/torch_{os.getpid()}_autoprec_test"
    one, other = (
        subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "mapped\n"
        shared = shared_memory_of([one.pid])
        assert name in shared
        one.kill()
        one.wait()
        remove_shared_memory(shared)
        assert os.path.exists(name), "another process has it"
        other.kill()
        other.wait()
        remove_shared_memory(shared)
        assert not os.path.exists(name)
    finally:
        for process in (one, other):
            process.kill()
            process.communicate()
        Path(name).unlink(missing_ok=True)
