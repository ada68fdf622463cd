"""What a trial writes is seen by it and by nobody else (installed in a fork: it cannot be undone)."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec.trial.inside.isolate.overlay import Overlay, make_caches, real
from autoprec.trial.inside.isolate.overlay_calls import install
from tests import heap


def in_fork(work: Callable[[], None]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        gc.disable()  # going over all that this process holds would copy it
        heap.known()  # modules of the tests keep functions that an overlay replaces
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def snapshot(folder: Path) -> dict[str, str]:
    return {str(p): p.read_text() if p.is_file() else "" for p in sorted(folder.rglob("*"))}


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("a")
    (folder / "log.txt").write_text("one\n")
    (tmp_path / "layer").mkdir()
    (tmp_path / "second").mkdir()
    return folder


def test_everything_python_can_do_to_files(user: Path, tmp_path: Path) -> None:
    before = snapshot(user)

    def work() -> None:
        os.chdir(user)
        overlay = Overlay(str(tmp_path / "layer"), [str(user)], [])
        install(overlay)
        with open("log.txt", "a") as stream:
            stream.write("two\n")
        assert Path("log.txt").read_text() == "one\ntwo\n"
        os.makedirs("out/deep")
        assert sorted(os.listdir(".")) == ["data", "log.txt", "out"]
        assert os.path.isdir("out/deep")
        Path("out/x").write_text("x")
        os.rename("out/x", "out/deep/y")
        assert not os.path.exists("out/x")
        assert Path("out/deep/y").read_text() == "x"
        os.replace("data/a.txt", "data/b.txt")
        assert os.listdir("data") == ["b.txt"]
        with pytest.raises(FileNotFoundError):
            open("data/a.txt")  # noqa: SIM115
        with pytest.raises(FileNotFoundError):
            open("no/such/dir/file", "w")  # noqa: SIM115
        with pytest.raises(FileExistsError):
            open("log.txt", "x")  # noqa: SIM115
        with pytest.raises(FileExistsError):
            os.mkdir("out")
        os.remove("log.txt")
        assert not os.path.exists("log.txt")
        Path("log.txt").write_text("new")
        assert Path("log.txt").read_text() == "new"
        shutil.rmtree("data")
        assert not os.path.exists("data")
        descriptor = os.open("raw", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"raw")
        os.close(descriptor)
        assert os.stat("raw").st_size == 3
        os.chmod("raw", 0o600)
        overlay.push(str(tmp_path / "second"))  # a further layer sees the first and does not change it
        with open("raw", "a") as stream:
            stream.write("!")
        assert Path("raw").read_text() == "raw!"

    assert in_fork(work)
    assert snapshot(user) == before
    assert (tmp_path / "layer").joinpath(*(user / "raw").parts[1:]).read_text() == "raw"


def test_caches_devices_and_our_own_directories_are_free(user: Path, tmp_path: Path) -> None:
    overlay = Overlay(str(tmp_path / "layer"), [str(user)], [str(tmp_path / "ours")])
    assert overlay.guarded(user / "x") == str(user / "x")
    assert overlay.guarded("/etc/x") == "/etc/x"
    for free in ("/dev/null", tmp_path / "ours" / "log", tmp_path / "elsewhere-in-tmp", 3):
        assert overlay.guarded(free) is None
    assert overlay.guarded(Path.home() / ".cache" / "x") is None
    assert overlay.guarded(user / ".." / "user" / "x") == str(user / "x")
    overlay.allow(str(user / "logs"))
    assert overlay.guarded(user / "logs" / "x") is None


def test_a_directory_follows_a_rule_that_came_later(user: Path, tmp_path: Path) -> None:
    """What was found of a directory before is not kept beyond that."""
    overlay = Overlay(str(tmp_path / "layer"), [str(user)], [])
    inside = str(user / "data" / "deep" / "x")
    for _ in range(2):
        assert overlay.guarded(inside) == inside
    overlay.allow(str(user / "data"))
    assert overlay.guarded(inside) is None
    beside = str(tmp_path / "free" / "deep" / "x")
    assert overlay.guarded(beside) is None
    overlay.guard([str(tmp_path / "free" / "deep")])
    assert overlay.guarded(beside) == beside
    assert overlay.guarded(str(tmp_path / "free" / "x")) is None


def test_links_are_found_in_every_layer_that_has_their_directory(user: Path, tmp_path: Path) -> None:
    """A layer without a directory is not asked below it; behind `..` and behind a link it is asked again."""
    upper, lower = tmp_path / "second", tmp_path / "layer"
    overlay = Overlay(str(upper), [str(user)], [], below=[str(lower)])

    def link(layer: Path, path: Path, to: str) -> None:
        place = layer / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(to)

    link(lower, user / "data" / "low", "a.txt")
    link(upper, user / "made" / "up", "../data/low")
    link(upper, user / "made" / "whole", str(user / "data"))
    a = str(user / "data" / "a.txt")
    assert overlay.guarded(user / "data" / "low") == a
    assert overlay.guarded(user / "made" / "up") == a
    assert overlay.guarded(user / "made" / "whole" / "low") == a
    assert overlay.guarded(user / "data" / "none" / ".." / "low") == a
    assert overlay.guarded(user / "none" / "none" / ".." / ".." / "made" / "up") == a
    assert overlay.guarded(user / "data" / "none" / "low") == str(user / "data" / "none" / "low")


def test_a_path_is_followed_with_one_question_of_a_layer_that_has_none_of_it(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import of PyTorch asks for ten thousand files, by every directory above them."""
    overlay, asked, plain = Overlay(str(tmp_path / "layer"), [str(user)], []), list[str](), real["readlink"]
    monkeypatch.setitem(real, "readlink", lambda path: asked.append(path) or plain(path))
    overlay.guarded("/usr/lib/python/torch/x.py")
    layer = str(tmp_path / "layer")
    assert [path for path in asked if path.startswith(layer)] == [layer + "/usr"]


@pytest.mark.parametrize("name", ["TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "TORCH_HOME"])
def test_the_users_directories_win_over_every_free_one(
    name: str, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for theirs in (user, tmp_path / "home", Path("/")):
        monkeypatch.setenv(name, str(theirs))
        monkeypatch.setattr(tempfile, "tempdir", str(theirs) if name == "TMPDIR" else "/tmp")
        overlay = Overlay(str(tmp_path / "layer"), [str(user)], [])
        assert overlay.guarded(user / "x")
        assert overlay.guarded(tmp_path / "home" / "x")
        assert overlay.guarded("/x")
        assert not overlay.guarded(tmp_path / "home" / ".cache" / "x")


def test_settings_removable_disks_and_installed_programs_are_the_users(user: Path, tmp_path: Path) -> None:
    overlay = Overlay(str(tmp_path / "layer"), [str(user)], [])
    home = Path.home()
    for path in (home / ".config" / "x", home / ".local" / "share" / "x", "/run/media/disk/x", f"{sys.base_prefix}/x"):
        assert overlay.guarded(path), path
    assert not overlay.guarded(f"/run/user/{os.getuid()}/socket")


def test_a_removal_masks_every_layer_below_it(user: Path, tmp_path: Path) -> None:
    before = snapshot(user)

    def work() -> None:
        overlay = Overlay(str(tmp_path / "layer"), [str(user)], [])
        data, log = str(user / "data"), str(user / "log.txt")
        overlay.hide(data + "/a.txt")
        Path(overlay.writable(data + "/b.txt", keep=False)).write_text("b")
        assert set(overlay.listed(data)) == {"b.txt"}
        overlay.push(str(tmp_path / "second"))
        assert overlay.shown(data + "/b.txt") == str(tmp_path / "layer") + data + "/b.txt"
        overlay.hide(data + "/b.txt")  # lies in the layer below, which must not change
        assert overlay.shown(data + "/b.txt") is None
        overlay.hide(data)
        os.makedirs(overlay.layers[0] + data)
        assert overlay.listed(data) == {}  # a new directory, not the old one uncovered
        assert overlay.shown(log) == log
        assert overlay.logical(overlay.layers[1] + log) == log

    assert in_fork(work)
    assert snapshot(user) == before
    assert (tmp_path / "layer").joinpath(*(user / "data" / "b.txt").parts[1:]).read_text() == "b"


def test_caches_are_made_before_the_kernel_refuses_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    installed = {"triton"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new" / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))  # the script will say what is wrong
    make_caches()
    assert (tmp_path / "new" / "cache").is_dir()
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == [".cache", ".nv", ".triton"]
    installed.add("deep_gemm")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "compiler"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "gemm"))
    make_caches()
    overlay = Overlay(str(tmp_path / "layer"), [str(tmp_path)], [])
    for made in ("home/.deep_gemm", "compiler/.triton", "gemm"):
        assert (tmp_path / made).is_dir()
        assert not overlay.guarded(tmp_path / made / "x")
    assert overlay.guarded(tmp_path / "compiler" / "x")
