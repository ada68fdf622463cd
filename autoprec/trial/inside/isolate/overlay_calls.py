"""The overlay under ``open`` and ``os``: each function asks where its path is, and goes on as it always did."""

from __future__ import annotations

import builtins
import contextlib
import errno
import glob
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

from autoprec.support.living import referrers
from autoprec.trial.inside.isolate.overlay import Overlay, kind, real, remove_tree
from autoprec.trial.inside.patching import wrapped

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = getattr(os, "O_TMPFILE", 0)
_READING = ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr")
_CHANGING = ("chmod", "utime", "truncate", "chown", "lchown", "setxattr", "removexattr", "fchmod", "fchown")
#: They mean a link itself, not what it leads to.
_LINKS = ("lstat", "readlink", "lchown")


def install(overlay: Overlay) -> None:
    """Put the overlay under every call of Python that takes a path; for the life of the process.

    A module that has kept a function under a name of its own (``tarfile.bltn_open``, ``from os import remove``) is
    found by looking through all that are loaded.
    """
    calls = _Calls(overlay)
    # By path, not by descriptor: one descriptor shows one of the places that a directory of the overlay has.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    changed: dict[int, tuple[Any, Any]] = {}

    def replace(owner: Any, name: str, replacement: Any) -> None:
        original = getattr(owner, name)
        changed[id(original)] = (original, replacement)
        setattr(owner, name, replacement)

    opener = calls.open
    replace(builtins, "open", opener)
    io.open = opener
    replace(os, "open", calls.os_open)
    for group, wrapper in (
        (_READING, calls.read),
        (_CHANGING, calls.change),
        (("remove", "unlink", "rmdir"), calls.remove),
        (("mkdir", "mkfifo", "mknod"), calls.make),
    ):
        for name in group:
            replace(os, name, wrapped(getattr(os, name), wrapper))
    for name in ("rename", "replace"):
        replace(os, name, calls.rename)
    for name in ("symlink", "link", "listdir", "scandir", "chdir", "fchdir", "getcwd", "getcwdb"):
        replace(os, name, getattr(calls, name))
    globber: Any = getattr(glob, "_StringGlobber", None)  # pathlib's since Python 3.13: a class with os.scandir in it
    if globber is not None:
        globber.scandir = calls.scandir
    # In a fork, looking at every name of every module would copy 60 MB of them: the collector only reads.
    keepers = {id(keeper) for keeper in referrers(original for original, _ in changed.values())}
    for module in list(sys.modules.values()):
        names: Any = getattr(module, "__dict__", None)
        if id(names) not in keepers or module in (os, builtins, io):
            continue
        if str(names.get("__name__", "")).startswith(("autoprec.", "posix", "_io", "_frozen")):
            continue
        for name in [name for name, value in list(names.items()) if id(value) in changed]:
            names[name] = changed[id(names[name])][1]


def _refuse(code: int, path: Any) -> OSError:
    return OSError(code, os.strerror(code), path)


@contextlib.contextmanager
def _named(path: Any) -> Iterator[None]:
    """Whatever fails inside has the name that the script gave, not the place where the overlay keeps it."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


class _Entry(os.PathLike[str]):
    """One entry of a directory that lies in several places; what ``os.DirEntry`` offers."""

    def __init__(self, name: str, path: str, absolute: str) -> None:
        self.name, self.path, self._absolute = name, path, absolute

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        return os.lstat(self._absolute).st_ino

    def _is(self, test: Callable[[int], bool], follow: bool) -> bool:
        try:
            return test(self.stat(follow_symlinks=follow).st_mode)
        except OSError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._absolute, follow_symlinks=follow_symlinks)


class _Entries:
    """The iterator and context manager that ``os.scandir`` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries: Iterator[_Entry] = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class _Calls:
    """The replacements. What is not guarded goes on to the original, by the path that its links lead to."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self._open, self._os_open = io.open, os.open
        names = ("listdir", "scandir", "chdir", "fchdir", "getcwd", "rename", "symlink", "link", "stat")
        self._real = {name: getattr(os, name) for name in names}

    # ---------------------------------------------------------------- open
    def open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """``open``: the file is opened by :meth:`os_open`, and has the name the script gave it."""
        if opener is None and not isinstance(file, int):
            opener = self._opener
        return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def _opener(self, path: Any, flags: int) -> int:
        return self.os_open(path, flags, 0o666)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        overlay = self._overlay
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        with _named(path):
            found = overlay.locate(path, dir_fd, follow=not (exclusive or flags & os.O_NOFOLLOW))
            if found is None:
                return self._os_open(path, flags, mode, dir_fd=dir_fd)
            absolute, guarded = found
            if not guarded:
                return self._os_open(absolute, flags, mode)
            if _TMPFILE and flags & _TMPFILE == _TMPFILE:
                return self._os_open(overlay.folder(absolute), flags, mode)
            if not flags & _WRITING:
                return self._os_open(overlay.seen(absolute), flags, mode)
            there = overlay.kind(absolute)
            if there and exclusive:
                raise _refuse(errno.EEXIST, path)
            if not there and not flags & os.O_CREAT:
                raise self._nothing(absolute, path)
            if stat.S_ISDIR(there):
                raise _refuse(errno.EISDIR, path)
            if there:  # it is only made anew in the layer
                flags, mode = flags | os.O_CREAT, stat.S_IMODE(real["stat"](overlay.seen(absolute)).st_mode)
            place = overlay.writable(absolute, keep=not flags & os.O_TRUNC)
            return self._os_open(place, flags | os.O_NOFOLLOW, mode)

    def _nothing(self, absolute: str, path: Any) -> OSError:
        """Return what the system says of a path where nothing is: it may go on behind a file."""
        above = os.path.dirname(absolute)
        while above != "/" and not self._overlay.kind(above):
            above = os.path.dirname(above)
        return _refuse(errno.ENOENT if stat.S_ISDIR(self._overlay.kind(above)) else errno.ENOTDIR, path)

    # ---------------------------------------------------------------- what is there
    def read(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        follow = kwargs.get("follow_symlinks", True) and name not in _LINKS
        with _named(path):
            found = self._overlay.locate(path, kwargs.get("dir_fd"), follow=follow)
            if found is None:
                return original(path, *args, **kwargs)
            kwargs.pop("dir_fd", None)
            if name == "access" and found[1] and self._overlay.shown(found[0]) is None:
                return False
            place = self._overlay.seen(found[0]) if found[1] else found[0]
            told = original(place, *args, **kwargs)
        return os.fsencode(told) if name == "readlink" and isinstance(path, bytes) else told

    def _directory(self, path: Any) -> tuple[str, bool]:
        """Return where a directory is, given by its path or by a descriptor, and whether it must be put together."""
        overlay = self._overlay
        text = overlay.of_descriptor(path) if isinstance(path, int) else path
        with _named(path):
            found = overlay.locate("." if text is None else text)
            if found is None:
                return path, False
            absolute, guarded = found
            if not guarded or overlay.untouched(absolute):
                return absolute, False
            if not stat.S_ISDIR(overlay.kind(absolute)):
                return overlay.seen(absolute), False
            return absolute, True

    def listdir(self, path: Any = ".") -> list[Any]:
        place, merged = self._directory(path)
        names = list(self._overlay.listed(place)) if merged else self._real["listdir"](place)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        place, merged = self._directory(path)
        if isinstance(path, bytes):
            return self._real["scandir"](os.fsencode(place))
        if not merged and self._as_written(path, place):
            return self._real["scandir"](path)
        names = self._overlay.listed(place) if merged else self._real["listdir"](place)
        shown = "." if path is None else "" if isinstance(path, int) else os.fspath(path)
        return _Entries([_Entry(name, os.path.join(shown, name), f"{place}/{name}") for name in names])

    def _as_written(self, path: Any, place: str) -> bool:
        """True when the system finds the same directory under the script's spelling: a large one is read quickly."""
        try:
            return os.path.samestat(real["stat"]("." if path is None else path), real["stat"](place))
        except OSError:
            return False

    def chdir(self, path: Any) -> None:
        overlay = self._overlay
        with _named(path):
            found = overlay.locate(overlay.of_descriptor(path) if isinstance(path, int) else path)
            if found is None:
                self._real["chdir"](path)
                return
            absolute, guarded = found
            place = overlay.seen(absolute) if guarded else absolute
            self._real["chdir"](place)
        overlay.cwd = None if place == absolute else absolute

    def fchdir(self, fd: int) -> None:
        self.chdir(fd)

    def getcwd(self) -> str:
        return self._overlay.cwd or self._overlay.logical(str(self._real["getcwd"]()))

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    # ---------------------------------------------------------------- changes
    def make(
        self, original: Callable[..., Any], path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any
    ) -> None:
        """``mkdir``, ``mkfifo`` and ``mknod``."""
        with _named(path):
            original(self._new(path, dir_fd), *args, **kwargs)

    def remove(self, original: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> None:
        folder = original.__name__ == "rmdir"
        found = self._overlay.locate(path, dir_fd, follow=False)
        if folder and found is not None and found[0] in self._overlay.mounted and not real["listdir"](found[0]):
            self._overlay.guard([found[0]])  # the kernel removes no directory over which it has laid a copy
            self._overlay.hide(found[0])
            return
        if found is None or not found[1]:
            original(path if found is None else found[0])
            return
        there = self._overlay.kind(found[0])
        if not there:
            raise self._nothing(found[0], path)
        if folder and not stat.S_ISDIR(there):
            raise _refuse(errno.ENOTDIR, path)
        if folder and self._overlay.listed(found[0]):
            raise _refuse(errno.ENOTEMPTY, path)
        if stat.S_ISDIR(there) and not folder:
            raise _refuse(errno.EISDIR, path)
        self._overlay.hide(found[0])

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        overlay = self._overlay
        found = overlay.locate(src, src_dir_fd, follow=False)
        onto = overlay.locate(dst, dst_dir_fd, follow=False)
        if found is None or onto is None or not (found[1] or onto[1]):
            self._rename_free(found[0] if found else src, onto[0] if onto else dst)
            return
        (source, guarded), (target, kept) = found, onto
        there = overlay.kind(source) if guarded else kind(source)
        before = overlay.kind(target) if kept else kind(target)
        if not there:
            raise self._nothing(source, src)
        if source == target:
            return
        if stat.S_ISDIR(there) and target.startswith(source + "/"):
            raise _refuse(errno.EINVAL, src)
        if before and stat.S_ISDIR(before) != stat.S_ISDIR(there):
            raise _refuse(errno.EISDIR if stat.S_ISDIR(before) else errno.ENOTDIR, dst)
        if stat.S_ISDIR(before) and (overlay.listed(target) if kept else self._real["listdir"](target)):
            raise _refuse(errno.ENOTEMPTY, dst)
        place = overlay.writable(target, keep=False) if kept else target  # its directory must be there, too
        if before and kept:
            overlay.hide(target)
        elif before:
            remove_tree(target)
        overlay.copy(source, guarded, place)
        if guarded:
            overlay.hide(source)
        else:
            remove_tree(source)

    def _rename_free(self, source: str, target: str) -> None:
        """Rename; a directory of which a part lies in the user's, below the kernel's copy, has to be copied."""
        try:
            self._real["rename"](source, target)
        except OSError as error:
            inside = [any(path.startswith(f"{top}/") for top in self._overlay.mounted) for path in (source, target)]
            if error.errno != errno.EXDEV or not all(inside) or not stat.S_ISDIR(kind(source)):
                raise
            if kind(target):
                os.rmdir(target)
            self._overlay.copy(source, False, target)
            remove_tree(source)

    def change(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        name = original.__name__
        overlay = self._overlay
        if isinstance(path, int):
            if not self._of_the_user(path):
                original(path, *args, **kwargs)
            return
        follow = kwargs.get("follow_symlinks", True) and name not in _LINKS
        found = overlay.locate(path, kwargs.pop("dir_fd", None), follow=follow)
        with _named(path):
            if found is None or not found[1]:
                original(path if found is None else found[0], *args, **kwargs)
                return
            absolute = found[0]
            top = overlay.layers[0] + absolute
            shown = overlay.seen(absolute)
            if name == "truncate" and shown != top:
                shown = overlay.writable(absolute, keep=True)
            if shown == top:
                original(top, *args, **kwargs)
            else:
                os.lstat(absolute)  # the user's own file: it must exist, and stays as it is

    def _of_the_user(self, descriptor: int) -> bool:
        """True for a descriptor of a file of the user's: it was opened to be read, and its mode can be changed."""
        path = real["readlink"](f"/proc/self/fd/{descriptor}")
        return self._overlay.logical(path) == path and self._overlay.guarded(path) is not None

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        """A link says what the script wrote: where it leads is found out when it is followed."""
        place = self._new(dst, dir_fd)
        self._real["symlink"](os.fspath(src), place, target_is_directory)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """A second name for a file of the user's would let it be written: it becomes a copy."""
        overlay = self._overlay
        found = overlay.locate(src, src_dir_fd, follow=False)
        place = self._new(dst, dst_dir_fd)
        if found is None or not found[1]:
            self._real["link"](found[0] if found else src, place, follow_symlinks=follow_symlinks)
            return
        if stat.S_ISDIR(overlay.kind(found[0])):
            raise _refuse(errno.EPERM, src)
        overlay.copy(found[0], True, place)

    def _new(self, path: Any, dir_fd: int | None) -> Any:
        """Return where something new is made at a path; what is not a path as it is: the system refuses it."""
        found = self._overlay.locate(path, dir_fd, follow=False)
        if found is None or not found[1]:
            return path if found is None else found[0]
        if self._overlay.kind(found[0]):
            raise _refuse(errno.EEXIST, path)
        return self._overlay.writable(found[0], keep=False)
