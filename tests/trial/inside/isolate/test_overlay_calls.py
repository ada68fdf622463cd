"""What a trial writes it can read back, through whatever part of the standard library; the user's files stay."""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import os
import shutil
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autoprec.trial.inside.isolate import overlay_calls, savers
from autoprec.trial.inside.isolate.overlay import Overlay
from autoprec.trial.inside.isolate.overlay_calls import install
from tests.warm import keepers

from .test_overlay import in_fork, snapshot


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("a")
    (folder / "log.txt").write_text("one\n")
    (tmp_path / "layer").mkdir()
    return folder


def begin(user: Path, tmp_path: Path) -> Overlay:
    os.chdir(user)
    overlay = Overlay(str(tmp_path / "layer"), [str(user)], [])
    savers.install(overlay)
    install(overlay)
    return overlay


def archives() -> None:
    Path("packed").mkdir()
    Path("packed/x.txt").write_text("x")
    with tarfile.open("p.tar.gz", "w:gz") as archive:
        archive.add("packed")
    shutil.rmtree("packed")
    with tarfile.open("p.tar.gz") as archive:
        archive.extractall("out", filter="data")
    assert Path("out/packed/x.txt").read_text() == "x"
    with zipfile.ZipFile("p.zip", "w") as packed:
        packed.write("out/packed/x.txt", "y.txt")
    shutil.unpack_archive("p.zip", "unzipped")
    assert os.listdir("unzipped") == ["y.txt"]
    for module, name in ((bz2, "f.bz2"), (gzip, "f.gz")):
        with module.open(name, "wb") as stream:
            stream.write(b"data")
        with module.open(name, "rb") as stream:
            assert stream.read() == b"data"


def change_directory() -> None:
    home = os.getcwd()
    os.makedirs("outputs/2026/run")
    os.chdir("outputs/2026/run")
    assert os.getcwd() == os.path.join(home, "outputs/2026/run") == str(Path.cwd()) == os.path.abspath(".")
    Path("config.yaml").write_text("lr: 1")
    os.makedirs("checkpoint-5/unet_ema")
    assert sorted(os.listdir()) == ["checkpoint-5", "config.yaml"]
    assert Path("../../../data/a.txt").read_text() == "a"
    assert Path(home, "outputs", "2026", "run", "config.yaml").read_text() == "lr: 1"
    os.chdir("..")
    assert os.listdir(".") == ["run"]
    os.chdir(home)
    assert Path("outputs/2026/run/config.yaml").exists()


def merged_directories() -> None:
    Path("data/b.txt").write_text("b")
    assert sorted(glob.glob("data/*.txt")) == ["data/a.txt", "data/b.txt"]
    assert sorted(e.name for e in os.scandir("data")) == ["a.txt", "b.txt"]
    assert [sorted(files) for _, _, files in os.walk("data")] == [["a.txt", "b.txt"]]
    os.rename("data", "moved")
    assert sorted(os.listdir("moved")) == ["a.txt", "b.txt"]
    assert not os.path.exists("data")
    shutil.copytree("moved", "copied")
    shutil.rmtree("moved")
    assert not os.path.exists("moved")
    os.makedirs("moved")
    assert os.listdir("moved") == []
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("copied")
    with pytest.raises(IsADirectoryError):
        os.remove("copied")
    with pytest.raises(FileNotFoundError):
        open("nothing-here", "r+")  # noqa: SIM115


def small_calls() -> None:
    assert not os.path.exists("")
    assert not os.path.isdir("")
    shutil.copy2("log.txt", "log2.txt")
    os.truncate("log.txt", 1)
    assert Path("log.txt").read_text() == "o"
    os.symlink("log2.txt", "link")
    assert Path("link").read_text() == "one\n"
    assert os.readlink("link")
    os.link("log2.txt", "hard")
    Path("hard").write_text("changed")
    os.chmod("data/a.txt", 0o777)  # the user's own: left as it is
    with pytest.raises(FileNotFoundError):
        os.chmod("nothing-here", 0o600)
    with os.fdopen(os.open("data/a.txt", os.O_RDWR), "r+") as stream:
        stream.write("b")
    assert Path("data/a.txt").read_text() == "b"


def links_are_followed() -> None:
    os.symlink(os.path.abspath("data"), "latest")
    with open("latest/a.txt", "w") as stream:
        assert stream.name == "latest/a.txt"
        stream.write("through the link")
    assert Path("data/a.txt").read_text() == Path("latest/a.txt").read_text() == "through the link"
    assert os.readlink("latest") == os.path.realpath("latest") == os.path.abspath("data")
    os.symlink("latest/b.txt", "chain")
    Path("chain").write_text("made")
    assert sorted(os.listdir("data")) == ["a.txt", "b.txt"]
    os.remove("chain")
    assert Path("data/b.txt").read_text() == "made"
    os.replace("latest", "data.link")
    assert os.path.islink("data.link")
    os.replace("log.txt", "log.txt")  # onto itself: nothing happens
    assert Path("log.txt").read_text() == "one\n"
    os.symlink("b", "a")
    os.symlink("a", "b")
    with pytest.raises(OSError, match="symbolic links"):
        open("a", "w")  # noqa: SIM115
    with pytest.raises(FileExistsError):
        os.symlink("x", "data.link")


def by_descriptor() -> None:
    folder = os.open("data", os.O_RDONLY)
    handle = os.open("a.txt", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)
    os.write(handle, b"changed")
    os.close(handle)
    assert Path("data/a.txt").read_text() == "changed"
    with open("log.txt") as stream:
        os.fchmod(stream.fileno(), 0o600)  # the user's own: left as it is
        with open(f"/proc/self/fd/{stream.fileno()}", "a") as again:
            again.write("two\n")
    assert Path("log.txt").read_text() == "one\ntwo\n"
    os.fchdir(folder)
    assert os.path.basename(os.getcwd()) == "data"
    Path("here").touch()
    os.chdir("..")
    assert os.path.exists("data/here")
    with open(f"/dev/fd/{folder}/a.txt") as stream:
        assert stream.read() == "changed"
    reader, writer = os.pipe()
    with open(f"/dev/fd/{writer}", "w") as stream:
        stream.write("x")
    assert os.read(reader, 2) == b"x"


def databases_by_uri() -> None:
    with contextlib.closing(sqlite3.connect("file:data/runs.db?mode=rwc", uri=True)) as database:
        database.execute("create table t (x)")
    assert os.path.exists("data/runs.db")
    with contextlib.closing(sqlite3.connect("file:data/runs.db?mode=ro", uri=True)) as database:
        assert database.execute("select count(*) from t").fetchone() == (0,)


@pytest.mark.parametrize(
    "work",
    [
        archives, change_directory, merged_directories, small_calls, links_are_followed, by_descriptor,
        databases_by_uri,
    ],
)  # fmt: skip
def test_what_is_written_is_read_back(work: object, user: Path, tmp_path: Path) -> None:
    before = snapshot(user)
    mode = (user / "data" / "a.txt").stat().st_mode

    def run() -> None:
        begin(user, tmp_path)
        assert callable(work)
        work()

    assert in_fork(run)
    assert snapshot(user) == before
    assert (user / "data" / "a.txt").stat().st_mode == mode


NAMES = st.sampled_from(["a", "b", "data/a.txt", "data/b", "new", "new/a", "new/b", "log.txt"])
STEPS = st.lists(st.tuples(st.sampled_from(["write", "append", "remove", "mkdir", "rename", "rmtree"]), NAMES, NAMES))


def apply(kind: str, name: str, other: str) -> str:
    """Do one thing to files and say what came of it, so that two runs can be compared."""
    try:
        if kind == "write":
            Path(name).write_text(name)
        elif kind == "append":
            with open(name, "a") as stream:
                stream.write("+")
        elif kind == "remove":
            os.remove(name)
        elif kind == "mkdir":
            os.makedirs(name)
        elif kind == "rename":
            os.replace(name, other)
        else:
            shutil.rmtree(name)
    except OSError as error:
        return type(error).__name__
    return "done"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
@example(steps=[("write", "new", "a"), ("remove", "new/a", "a"), ("rename", "new/a", "b")])  # through a file
def test_an_overlay_behaves_like_the_directory(steps: list[tuple[str, str, str]], tmp_path_factory: object) -> None:
    """The same operations on a real directory and under the overlay: the same errors, and the same files at the end."""
    base = tmp_path_factory.mktemp("case")  # type: ignore[attr-defined]
    user, twin = base / "user", base / "twin"
    for folder in (user, twin):
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "a.txt").write_text("a")
        (folder / "log.txt").write_text("one")
    (base / "layer").mkdir()
    before, known = snapshot(user), keepers()
    home = os.getcwd()
    os.chdir(twin)
    try:
        expected = [apply(*step) for step in steps if step[1] != step[2]]
        wanted = {p[len(str(twin)) :]: text for p, text in snapshot(twin).items()}
    finally:
        os.chdir(home)

    def run() -> None:
        overlay_calls.referrers = lambda _functions: known  # type: ignore[assignment,return-value]  # as in any fork
        begin(user, base)
        assert [apply(*step) for step in steps if step[1] != step[2]] == expected
        assert {p[len(str(user)) :]: text for p, text in snapshot(user).items()} == wanted

    assert in_fork(run)
    assert snapshot(user) == before
