"""The kernel's copy of the user's directories: for children and libraries in C as for Python (in a fork)."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.inside.isolate import namespace, overlay_calls
from autoprec.trial.inside.isolate.namespace import enter
from autoprec.trial.inside.isolate.overlay import Overlay
from autoprec.trial.processes import remove_folder

from .test_overlay import in_fork, snapshot


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "cache").mkdir()
    (folder / "data" / "a.txt").write_text("a")
    (folder / "log.txt").write_text("one\n")
    (tmp_path / "ours").mkdir()
    return folder


def shell(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


def allowed() -> bool:
    """Whether this machine lets us: tried in a fork, on a directory of no importance."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"autoprec-may-mount-{os.getpid()}")
    (folder / "user").mkdir(parents=True)

    def work() -> None:
        assert enter([str(folder / "user")], ["/dev", "/proc", str(folder.parent)], str(folder / "ours")) is not None

    try:
        return in_fork(work)
    finally:
        remove_folder(folder)


needs_mounts = pytest.mark.skipif(not allowed(), reason="no mount namespace here: Landlock holds children back")


@needs_mounts
def test_children_work_on_a_copy_and_each_fork_on_its_own(user: Path, tmp_path: Path) -> None:
    before = snapshot(user)
    ours = tmp_path / "ours"

    def work() -> None:
        os.chdir(user)
        mounts = enter(
            [str(user), str(user / "data")], ["/dev", "/proc", str(ours), str(user / "cache")], str(ours / "a")
        )
        assert mounts is not None
        assert mounts.guarded == (str(user),)
        assert sorted(os.listdir(ours)) == ["a"]
        shell("rm -rf data; mkdir data; echo two >> log.txt; echo kept > cache/x; chmod 600 log.txt")
        assert Path("log.txt").read_text() == "one\ntwo\n"
        assert os.listdir("data") == []
        assert os.getcwd() == str(user)
        shell(f"echo x > {tmp_path}/beside; rm -rf {ours}/a/lower-0/*")
        assert not (tmp_path / "beside").exists(), "elsewhere is read-only"

        def trial() -> None:
            (ours / "b").mkdir()
            mounts.push(str(ours / "b"))
            assert shell("cat log.txt; echo three >> log.txt; cat log.txt") == "one\ntwo\n" + "one\ntwo\nthree\n"
            shell("touch data/new")

        assert in_fork(trial)
        assert Path("log.txt").read_text() == "one\ntwo\n"
        assert os.listdir("data") == []

    assert in_fork(work)
    assert (user / "cache" / "x").read_text() == "kept\n", "a cache inside the directory stays the user's own"
    (user / "cache" / "x").unlink()
    assert snapshot(user) == before
    remove_folder(ours)
    assert not ours.exists()


@needs_mounts
@pytest.mark.parametrize("anew", [False, True], ids=["removed", "made anew"])
def test_a_temporary_directory_that_another_process_removed_is_left_out(anew: bool, user: Path, tmp_path: Path) -> None:
    ours, temporary = tmp_path / "ours", tmp_path / "another"
    temporary.mkdir()
    removed, asked = os.pipe(), os.pipe()

    def work() -> None:
        mounts = enter([str(user)], ["/dev", "/proc", str(tmp_path)], str(ours / "a"))
        assert mounts is not None

        def probe() -> None:
            (ours / "b").mkdir()
            mounts.push(str(ours / "b"), [str(temporary), str(tmp_path / "gone before")])
            (temporary / "written").touch()
            os.write(asked[1], b"x")
            assert os.read(removed[0], 1) == b"x"

            def trial() -> None:
                (ours / "c").mkdir()
                mounts.push(str(ours / "c"))
                assert shell(f"echo two >> {user}/log.txt; cat {user}/log.txt") == "one\ntwo\n"

            assert in_fork(trial)

        assert in_fork(probe)

    def remove() -> None:
        os.read(asked[0], 1)
        temporary.rmdir()
        if anew:
            temporary.mkdir()
        os.write(removed[1], b"x")

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        assert in_fork(work)
    finally:
        os.write(asked[1], b"x")
        remover.join()


@needs_mounts
@pytest.mark.parametrize("others", [0, 1, 3])
@pytest.mark.parametrize("stage", ["bound", "laid over"])
def test_one_that_is_removed_between_a_look_and_a_mount_is_left_out(
    stage: str, others: int, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, gone = tmp_path / "ours", tmp_path / "gone"
    further = [tmp_path / f"other-{number}" for number in range(others)]
    for folder in (gone, *further):
        folder.mkdir()
    call = namespace.call_libc

    def removing(name: str, *values: Any) -> int:
        if name == "mount" and values[stage == "laid over"] == str(gone) and gone.exists():
            gone.rmdir()
        return call(name, *values)

    def work() -> None:
        mounts = enter([str(user)], ["/dev", "/proc", str(tmp_path)], str(ours / "a"))
        assert mounts is not None

        def trial() -> None:
            (ours / "b").mkdir()
            monkeypatch.setattr(namespace, "call_libc", removing)
            mounts.push(str(ours / "b"), [str(gone), *map(str, further)])
            for folder in further:
                (folder / "written").touch()
            assert shell(f"echo two >> {user}/log.txt; cat {user}/log.txt") == "one\ntwo\n"

        assert in_fork(trial)

    assert in_fork(work)
    assert not gone.exists()
    assert (user / "log.txt").read_text() == "one\n"
    assert not any((folder / "written").exists() for folder in further)


@needs_mounts
def test_a_directory_of_the_users_can_be_renamed(user: Path, tmp_path: Path) -> None:
    """overlayfs refuses that for one that lies below (EXDEV); in a shell ``mv`` copies it."""
    before = snapshot(user)
    ours = str(tmp_path / "ours")

    def work() -> None:
        os.chdir(user)
        mounts = enter([str(user)], ["/dev", "/proc", ours], f"{ours}/a")
        assert mounts is not None
        overlay = Overlay(f"{ours}/layer", [], [str(user), ours])
        overlay.mounted = mounts.guarded
        overlay_calls.install(overlay)
        os.rename("data", "moved")
        assert Path("moved/a.txt").read_text() == "a"
        assert not os.path.exists("data")
        shutil.move("moved", "back")
        assert sorted(os.listdir("back")) == ["a.txt", "deep"]

    assert in_fork(work)
    assert snapshot(user) == before


def test_where_it_cannot_be_nothing_is_changed(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = str(tmp_path / "ours")
    assert enter([str(user)], ["/dev", str(user)], ours) is None  # a cache is not copied
    assert enter([str(tmp_path)], ["/dev"], ours) is None  # our own folder would be below it
    monkeypatch.setattr(namespace, "_works", lambda _mounts: False)
    assert enter([str(user)], ["/dev"], f"{ours}/a") is None
    assert os.listdir(ours) == []
