"""Random programs of file operations, run as a trial is: whatever they do, the user's files are as they were.

The suite runs a few, drawn from fixed seeds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shelve
import shutil
import sqlite3
import stat
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["OPERATIONS", "build", "run_program", "snapshot"]

_FILES = ("a.txt", "data/b.bin", "data/deep/c.csv", "runs/exp1/metrics.csv", "log.txt", "read-only", "../other/x.txt")
_FOLDERS = (".", "data", "data/deep", "runs", "runs/exp1", "latest", "../other", "linked", "new", "new/er")
_NAMES = (
    *_FILES, "fresh", "new/fresh", "latest/metrics.csv", "linked/x.txt", "hard", "a.link", "latest", "runs.db", "new",
)  # fmt: skip


def build(base: Path) -> tuple[Path, Path]:
    """Make the user's two directories below ``base``, with links between and inside them, and return them."""
    user, other = base / "user", base / "other"
    for folder in (user / "data" / "deep", user / "runs" / "exp1", other):
        folder.mkdir(parents=True)
    for name in _FILES:
        (user / name).write_text(f"{name}\n" * 20)
    (user / "read-only").chmod(0o444)
    os.link(user / "a.txt", user / "hard")
    (user / "a.link").symlink_to("a.txt")
    (user / "latest").symlink_to("runs/exp1")
    (user / "linked").symlink_to(other)
    (user / "broken").symlink_to("nowhere")
    with contextlib.closing(sqlite3.connect(user / "runs.db")) as database:
        database.execute("create table runs (loss real)")
        database.commit()
    return user, other


def snapshot(*folders: Path) -> dict[str, tuple[object, ...]]:
    """Return everything that can be told of the files below some folders."""
    found: dict[str, tuple[object, ...]] = {}
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            known = path.lstat()
            if stat.S_ISLNK(known.st_mode):
                content: object = os.readlink(path)
            else:
                content = path.read_bytes() if stat.S_ISREG(known.st_mode) else None
            rest = (
                known.st_mode,
                known.st_ino,
                known.st_nlink,
                known.st_mtime_ns,
                tuple(os.listxattr(path, follow_symlinks=False)),
            )
            found[str(path)] = (content, *rest)
    return found


class _Program:
    """The operations; each takes what it needs from the generator."""

    def __init__(self, rng: random.Random, user: Path) -> None:
        self._rng, self._user = rng, user

    def name(self) -> str:
        chosen = self._rng.choice(_NAMES)
        form = self._rng.random()
        if form < 0.3:
            return str(self._user / chosen)
        return chosen if form < 0.8 else f"data/../{chosen}"

    def folder(self) -> str:
        chosen = self._rng.choice(_FOLDERS)
        return str(self._user / chosen) if self._rng.random() < 0.4 else chosen

    # ---------------------------------------------------------------- one file
    def write(self) -> None:
        with open(self.name(), self._rng.choice(["w", "a", "x", "r+", "wb", "ab", "w+"])) as stream:
            stream.write("x" if "b" not in stream.mode else b"x")  # type: ignore[arg-type]

    def write_path(self) -> None:
        Path(self.name()).write_text("changed")

    def touch(self) -> None:
        Path(self.name()).touch()

    def descriptor(self) -> None:
        flags = self._rng.choice(
            [os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC, os.O_APPEND | os.O_RDWR]
        )
        handle = os.open(self.name(), flags)
        os.write(handle, b"raw")
        os.close(handle)

    def relative_descriptor(self) -> None:
        folder = os.open(self.folder(), os.O_RDONLY)
        try:
            handle = os.open(
                self._rng.choice(["b.bin", "x.txt", "metrics.csv", "n"]), os.O_RDWR | os.O_CREAT, dir_fd=folder
            )
            os.write(handle, b"raw")
            os.close(handle)
        finally:
            os.close(folder)

    def through_proc(self) -> None:
        with open(self.name()) as stream, open(f"/proc/self/fd/{stream.fileno()}", "w") as again:
            again.write("changed")

    def map(self) -> None:
        with open(self.name(), "r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
            memory[0:1] = b"!"

    def truncate(self) -> None:
        os.truncate(self.name(), 1)

    def change(self) -> None:
        name = self.name()
        self._rng.choice([
            lambda: os.chmod(name, 0o600), lambda: os.utime(name, (1, 1)), lambda: os.setxattr(name, "user.x", b"1"),
            lambda: os.chown(name, os.getuid(), os.getgid()), lambda: Path(name).chmod(0o777),
        ])()  # fmt: skip

    def change_open(self) -> None:
        with open(self.name()) as stream:
            number = stream.fileno()
            self._rng.choice([
                lambda: os.fchmod(number, 0o600), lambda: os.chmod(number, 0o600), lambda: os.utime(number, (1, 1)),
                lambda: os.setxattr(number, "user.x", b"1"), lambda: os.fchown(number, os.getuid(), -1),
            ])()  # fmt: skip

    # ---------------------------------------------------------------- names
    def remove(self) -> None:
        os.remove(self.name())

    def rename(self) -> None:
        self._rng.choice([os.rename, os.replace, shutil.move])(self.name(), self.name())

    def rename_folder(self) -> None:
        os.rename(self.folder(), self.folder())

    def link(self) -> None:
        os.link(self.name(), self.name())

    def link_and_write(self) -> None:
        os.link(self.name(), "made.link")
        Path("made.link").write_text("changed")

    def symlink(self) -> None:
        target = self._rng.choice([self.name(), self.folder(), os.path.abspath(self.name())])
        os.symlink(target, self._rng.choice(["latest", "made", "new/made", "data/made"]))

    def symlink_and_write(self) -> None:
        os.symlink(os.path.abspath("runs/exp1"), "made.latest")
        with open("made.latest/metrics.csv", "w") as stream:
            stream.write("changed")

    def fifo(self) -> None:
        os.mkfifo(f"{self.folder()}/made.fifo")  # a name that nothing opens: nobody is at its other end

    # ---------------------------------------------------------------- folders
    def make(self) -> None:
        self._rng.choice([os.mkdir, os.makedirs])(self.folder())

    def remove_folder(self) -> None:
        self._rng.choice([os.rmdir, shutil.rmtree, os.removedirs])(self.folder())

    def change_folder(self) -> None:
        os.chdir(self.folder())

    def change_folder_open(self) -> None:
        handle = os.open(self.folder(), os.O_RDONLY)
        os.fchdir(handle)
        os.close(handle)

    def back(self) -> None:
        os.chdir(self._user)

    def look(self) -> None:
        for folder, _, files in os.walk(self.folder()):
            for name in files:
                os.stat(os.path.join(folder, name))

    def copy(self) -> None:
        self._rng.choice([shutil.copy, shutil.copy2, shutil.copyfile])(self.name(), self.name())

    def copy_tree(self) -> None:
        shutil.copytree(
            self._rng.choice(["data", "runs", "../other", "latest"]),
            self.folder(),
            symlinks=self._rng.random() < 0.5,
            dirs_exist_ok=True,
        )

    # ---------------------------------------------------------------- libraries
    def tar(self) -> None:
        with tarfile.open("made.tar", "w") as archive:
            archive.add(self._rng.choice(["data", "runs", "linked", "latest", "a.link"]))
        with tarfile.open("made.tar") as archive:
            archive.extractall(self.folder(), filter="data")

    def zip(self) -> None:
        with zipfile.ZipFile("made.zip", "w") as archive:
            archive.write(self.name(), "b.bin")
        shutil.unpack_archive("made.zip", self.folder())

    def database(self) -> None:
        name = self._rng.choice(["runs.db", str(self._user / "runs.db"), "file:runs.db?mode=rwc"])
        with contextlib.closing(sqlite3.connect(name, uri=name.startswith("file:"))) as database:
            database.execute("create table if not exists runs (loss real)")
            database.execute("insert into runs values (1.0)")
            database.commit()

    def shelf(self) -> None:
        with shelve.open(self.name()) as kept:
            kept["x"] = 1

    def temporary(self) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self.folder(), delete=False) as stream:
            stream.write("x")
        os.replace(stream.name, self.name())

    def child(self) -> None:
        name, other, folder = self.name(), self.name(), self.folder()
        commands = (
            f"echo changed > '{name}'", f"rm -rf '{folder}'; mkdir '{folder}'", f"mv '{name}' '{other}'",
            f"rm -f '{name}'", f"cp '{name}' '{other}'", f"ln -sf '{name}' '{other}'", f"echo x >> '{name}'",
            f"mkdir -p '{folder}/sub'", f"tar cf made.tar '{name}' && tar xf made.tar -C '{folder}'",
            f"truncate -s 0 '{name}'", f"dd if=/dev/zero of='{name}' count=1",
        )  # fmt: skip
        subprocess.run(self._rng.choice(commands), shell=True, capture_output=True, check=False, timeout=20)


OPERATIONS = tuple(name for name in vars(_Program) if not name.startswith("_") and name not in ("name", "folder"))


def run_program(seed: int, user: Path, *, operations: int = 12, children: bool = True) -> None:
    """Run one random program in this process, which is held as a trial is; what fails in it is part of it."""
    rng = random.Random(seed)
    program = _Program(rng, user)
    with contextlib.suppress(OSError):
        os.chdir(user)
    for _ in range(operations):
        chosen = rng.choice([name for name in OPERATIONS if children or name != "child"])
        action: Callable[[], None] = getattr(program, chosen)
        with contextlib.suppress(Exception):
            action()
