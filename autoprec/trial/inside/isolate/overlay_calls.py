"""The overlay under ``open`` and ``os``: each function asks where its path is, and goes on as it always did."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from autoprec.trial.inside.isolate.overlay import Overlay

__all__ = ["install"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr")
_CHANGING = ("chmod", "utime", "truncate", "chown", "lchown", "setxattr", "removexattr")


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
    for name in _READING:
        replace(os, name, calls.reading(name, getattr(os, name)))
    for name in _CHANGING:
        replace(os, name, calls.changing(name, getattr(os, name)))
    for name in ("remove", "unlink", "rmdir"):
        replace(os, name, calls.removing(getattr(os, name), folder=name == "rmdir"))
    for name in ("rename", "replace"):
        replace(os, name, calls.renaming(getattr(os, name)))
    for name in ("symlink", "link"):
        replace(os, name, calls.linking(getattr(os, name)))
    for name in ("listdir", "scandir", "mkdir", "chdir", "getcwd", "getcwdb"):
        replace(os, name, getattr(calls, name))
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or module in (os, builtins, io):
            continue
        if str(names.get("__name__", "")).startswith(("autoprec.", "posix", "_io", "_frozen")):
            continue
        for name, value in list(names.items()):
            original, replacement = changed.get(id(value), (None, None))
            if original is not None and value is original:
                names[name] = replacement


class _Entry(os.PathLike[str]):
    """One entry of a directory that lies in several places; what ``os.DirEntry`` offers."""

    def __init__(self, name: str, path: str, place: str) -> None:
        self.name, self.path, self._place = name, path, place

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        return os.lstat(self._place).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._place) and (follow_symlinks or not os.path.islink(self._place))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._place) and (follow_symlinks or not os.path.islink(self._place))

    def is_symlink(self) -> bool:
        return os.path.islink(self._place)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._place) if follow_symlinks else os.lstat(self._place)


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
    """The replacements. A path that is not guarded goes on to the original."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self._open, self._os_open = io.open, os.open
        self._real = {name: getattr(os, name) for name in ("listdir", "scandir", "mkdir", "chdir", "getcwd", "getcwdb")}
        self._move = os.rename

    def _free(self, path: Any) -> Any:
        """A free path, independent of a working directory that really lies in a layer."""
        overlay = self._overlay
        if overlay.cwd is None or isinstance(path, int) or path is None or os.path.isabs(os.fspath(path)):
            return path
        return overlay.absolute(path)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        overlay, absolute = self._overlay, self._overlay.guarded(file)
        if absolute is None:
            return self._open(self._free(file), mode, *args, **kwargs)
        if not any(letter in mode for letter in "wax+"):
            return self._open(overlay.seen(absolute), mode, *args, **kwargs)
        shown = overlay.shown(absolute)
        exists = shown is not None and os.path.exists(shown)
        if "x" in mode and exists:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), absolute)
        if "r" in mode and not exists:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        return self._open(overlay.writable(absolute, keep="w" not in mode), mode, *args, **kwargs)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        overlay, absolute = self._overlay, self._overlay.guarded(path, dir_fd)
        if absolute is None:
            return self._os_open(path if dir_fd is not None else self._free(path), flags, mode, dir_fd=dir_fd)
        if not flags & _WRITING:
            return self._os_open(overlay.seen(absolute), flags, mode)
        shown = overlay.shown(absolute)
        exists = shown is not None and os.path.lexists(shown)
        if exists and flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), absolute)
        if not exists and not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        return self._os_open(overlay.writable(absolute, keep=not flags & os.O_TRUNC), flags, mode)

    def reading(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            absolute = self._overlay.guarded(path, kwargs.get("dir_fd"))
            if absolute is None:
                return original(path if kwargs.get("dir_fd") is not None else self._free(path), *args, **kwargs)
            shown = self._overlay.shown(absolute)
            if name == "access" and shown is None:
                return False
            kwargs.pop("dir_fd", None)
            return original(self._overlay.seen(absolute), *args, **kwargs)

        return read

    def listdir(self, path: Any = ".") -> list[Any]:
        absolute = self._overlay.guarded(path)
        if absolute is None or self._overlay.untouched(absolute) or not os.path.isdir(path):
            return list(self._real["listdir"](self._free(path) if absolute is None else self._overlay.seen(absolute)))
        names = list(self._overlay.listed(absolute))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        absolute = self._overlay.guarded(path)
        if absolute is None or self._overlay.untouched(absolute):
            return self._real["scandir"](self._free(path))
        if isinstance(path, bytes) or not os.path.isdir(path):
            return self._real["scandir"](self._overlay.seen(absolute))
        found = self._overlay.listed(absolute).items()
        return _Entries([_Entry(name, os.path.join(os.fspath(path), name), place) for name, place in found])

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        absolute = self._overlay.guarded(path, dir_fd)
        if absolute is None:
            self._real["mkdir"](path if dir_fd is not None else self._free(path), mode, dir_fd=dir_fd)
            return
        shown = self._overlay.shown(absolute)
        if shown is not None and os.path.lexists(shown):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), absolute)
        self._real["mkdir"](self._overlay.writable(absolute, keep=False), mode)

    def chdir(self, path: Any) -> None:
        absolute = self._overlay.guarded(path)
        if absolute is None:
            self._real["chdir"](self._free(path))
            self._overlay.cwd = None
            return
        shown = self._overlay.seen(absolute)
        self._real["chdir"](shown)
        self._overlay.cwd = None if shown == absolute else absolute

    def getcwd(self) -> str:
        return self._overlay.cwd or self._overlay.logical(str(self._real["getcwd"]()))

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    def removing(self, original: Callable[..., Any], *, folder: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            absolute = self._overlay.guarded(path, dir_fd)
            if absolute is None:
                original(path if dir_fd is not None else self._free(path), dir_fd=dir_fd)
                return
            shown = self._overlay.shown(absolute)
            if shown is None or not os.path.lexists(shown):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
            real_folder = os.path.isdir(shown) and not os.path.islink(shown)
            if folder and not real_folder:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), absolute)
            if folder and self._overlay.listed(absolute):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), absolute)
            if real_folder and not folder:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), absolute)
            self._overlay.hide(absolute)

        return remove

    def renaming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def rename(src: Any, dst: Any, **kwargs: Any) -> None:
            overlay = self._overlay
            source = overlay.guarded(src, kwargs.get("src_dir_fd"))
            target = overlay.guarded(dst, kwargs.get("dst_dir_fd"))
            if source is None and target is None:
                original(src if kwargs else self._free(src), dst if kwargs else self._free(dst), **kwargs)
                return
            shown = overlay.seen(source) if source is not None else self._free(src)
            os.lstat(shown)  # what is not there cannot be renamed
            if target is not None and os.path.isdir(dst) and os.path.isdir(shown) and overlay.listed(target):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), dst)
            if target is not None and overlay.shown(target) is not None and os.path.lexists(dst):
                overlay.hide(target)
            place = overlay.writable(target, keep=False) if target is not None else self._free(dst)
            if os.path.isdir(shown) and not os.path.islink(shown):
                shutil.copytree(source or shown, place, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(shown, place, follow_symlinks=False)
            if source is not None:
                overlay.hide(source)
            elif os.path.isdir(shown):
                shutil.rmtree(shown)
            else:
                os.remove(shown)

        return rename

    def changing(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def change(path: Any, *args: Any, **kwargs: Any) -> None:
            overlay, absolute = self._overlay, self._overlay.guarded(path, kwargs.get("dir_fd"))
            if absolute is None:
                original(path if kwargs.get("dir_fd") is not None else self._free(path), *args, **kwargs)
                return
            kwargs.pop("dir_fd", None)
            top = overlay.layers[0] + absolute
            if name == "truncate" and overlay.seen(absolute) != top:
                overlay.writable(absolute, keep=True)
            if os.path.lexists(top):
                original(top, *args, **kwargs)
            else:
                os.lstat(overlay.seen(absolute))  # the user's own file: it must exist, and stays as it is

        return change

    def linking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hard = original is os.link

        @functools.wraps(original)
        def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            overlay, absolute = self._overlay, self._overlay.guarded(dst, kwargs.get("dir_fd"))
            if absolute is None:
                original(self._free(src) if hard else src, dst, *args, **kwargs)
                return
            kwargs.pop("dir_fd", None)
            shown = overlay.shown(absolute)
            if shown is not None and os.path.lexists(shown):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), absolute)
            place = overlay.writable(absolute, keep=False)
            if hard:  # a second name for the user's own file would let it be written
                shutil.copy2(src, place)
                return
            # A link in a layer must lead where the script means, whether that lies in a layer or not.
            meant = overlay.guarded(os.path.join(os.path.dirname(absolute), os.fsdecode(os.fspath(src))))
            original(src if meant is None else (overlay.shown(meant) or src), place, *args, **kwargs)

        return link
