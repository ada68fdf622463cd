"""Files a trial writes go to a private copy: the user's directories are read, never changed.

Every path belongs to the longest matching prefix: the working directory, the script's directory and ``/`` are
guarded; the temporary directory, caches, devices and our own directories are free. A write to a guarded path lands in
the overlay, a read sees the overlay first, a removal only hides. Python-level calls are reached (``open``, ``os.*``,
and so ``pathlib`` and ``shutil``); what a C library opens by itself is not.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Overlay"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CACHES = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "HF_DATASETS_CACHE",
)
_real_open = io.open
_real = {name: getattr(os, name) for name in ("open", "stat", "lstat", "access", "listdir", "scandir", "mkdir")}


def _free_prefixes(extra: Iterable[str]) -> set[str]:
    home = os.path.expanduser("~")
    free = {"/dev", "/proc", "/sys", "/run", tempfile.gettempdir(), *extra}
    free |= {os.path.join(home, name) for name in (".cache", ".triton", ".nv", ".config")}
    free |= {os.environ[name] for name in _CACHES if os.environ.get(name)}
    free |= {sys.prefix, sys.base_prefix, sysconfig.get_paths()["purelib"], site.getuserbase()}
    return {os.path.abspath(path) for path in free if path}


class Overlay:
    """Redirects writes below guarded directories into ``layers[0]``; later layers are only read.

    Args:
        layer: an empty directory of ours.
        guarded: directories of the user's (working directory, script directory).
        free: directories that may be written besides the usual ones.
    """

    def __init__(self, layer: str, guarded: Iterable[str], free: Iterable[str]) -> None:
        self.layers = [layer]
        self._rules = {os.path.abspath(path): False for path in _free_prefixes([*free, layer])}
        self._rules |= {path: True for path in ["/", *map(os.path.abspath, guarded)] if path not in self._rules}
        self._hidden: set[str] = set()

    def push(self, layer: str) -> None:
        """Write into another directory from now on; what was written before is still seen."""
        self.layers.insert(0, layer)

    def allow(self, *paths: str) -> None:
        """Let further directories of ours be written."""
        self._rules |= {os.path.abspath(path): False for path in paths}

    # ---------------------------------------------------------------- paths
    def guarded(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute path when it is a guarded one, else None."""
        if isinstance(path, int) or path is None:
            return None
        try:
            text = os.fsdecode(os.fspath(path))
        except TypeError:
            return None
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        absolute = os.path.abspath(text)
        prefix = absolute
        while prefix not in self._rules:
            prefix = os.path.dirname(prefix)
        return absolute if self._rules[prefix] else None

    def shown(self, absolute: str) -> str | None:
        """Return where a guarded path is really read from; None when it was removed in this trial."""
        for layer in self.layers:
            inside = layer + absolute
            with contextlib.suppress(OSError):
                _real["lstat"](inside)
                return inside
        return None if self._is_hidden(absolute) else absolute

    def _is_hidden(self, absolute: str) -> bool:
        while absolute != "/":
            if absolute in self._hidden:
                return True
            absolute = os.path.dirname(absolute)
        return False

    def writable(self, absolute: str, *, keep: bool) -> str:
        """Return the overlay path to write to; with ``keep`` what is there now is copied first.

        Raises:
            FileNotFoundError: the directory does not exist, as the script would have seen it.
        """
        target = self.layers[0] + absolute
        current = self.shown(absolute)
        parent = self.shown(os.path.dirname(absolute))
        if parent is None or not os.path.isdir(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if keep and current not in (None, target) and os.path.isfile(str(current)):
            shutil.copyfile(str(current), target)
        return target

    def hide(self, absolute: str) -> None:
        """Remove a path as far as this trial can see."""
        current = self.shown(absolute)
        if current is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        inside = self.layers[0] + absolute
        if current == inside:
            if os.path.isdir(inside) and not os.path.islink(inside):
                shutil.rmtree(inside)
            else:
                _REMOVE(inside)
        self._hidden.add(absolute)

    # ---------------------------------------------------------------- installation
    def install(self) -> None:
        """Put the overlay under ``open`` and ``os``; for the life of the process."""
        builtins.open = io.open = self._open
        os.open = self._os_open
        for name in ("stat", "lstat", "access", "listdir", "scandir"):
            setattr(os, name, self._reading(name))
        os.mkdir = self._mkdir
        os.remove = os.unlink = self._hiding(os.remove)
        os.rmdir = self._hiding(os.rmdir)
        os.rename = self._renaming(os.rename)
        os.replace = self._renaming(os.replace)
        for name in ("chmod", "utime", "truncate", "chown"):
            setattr(os, name, self._changing(getattr(os, name)))
        for name in ("symlink", "link"):
            setattr(os, name, self._linking(getattr(os, name)))

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        absolute = self.guarded(file)
        if absolute is not None:
            if any(letter in mode for letter in "wax+"):
                if "x" in mode and self.shown(absolute) is not None and os.path.exists(str(self.shown(absolute))):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), absolute)
                file = self.writable(absolute, keep="w" not in mode)
                self._hidden.discard(absolute)
            else:
                file = self._seen(absolute)
        return _real_open(file, mode, *args, **kwargs)

    def _seen(self, absolute: str) -> str:
        shown = self.shown(absolute)
        if shown is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        return shown

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        absolute = self.guarded(path, dir_fd)
        if absolute is None:
            return int(_real["open"](path, flags, mode, dir_fd=dir_fd))
        if flags & _WRITING:
            target = self.writable(absolute, keep=not flags & os.O_TRUNC)
            self._hidden.discard(absolute)
            return int(_real["open"](target, flags, mode))
        return int(_real["open"](self._seen(absolute), flags, mode))

    def _reading(self, name: str) -> Callable[..., Any]:
        original = _real[name]

        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            absolute = self.guarded(path, kwargs.get("dir_fd"))
            if absolute is None:
                return original(path, *args, **kwargs)
            shown = self.shown(absolute)
            if shown == absolute and name != "listdir":
                return original(path, *args, **kwargs)
            kwargs.pop("dir_fd", None)
            if name == "access" and shown is None:
                return False
            if name == "listdir":
                return self._listed(absolute)
            return original(self._seen(absolute), *args, **kwargs)

        return read

    def _listed(self, absolute: str) -> list[str]:
        names: dict[str, None] = {}
        places = [layer + absolute for layer in self.layers] + ([] if self._is_hidden(absolute) else [absolute])
        found = [place for place in places if os.path.isdir(place)]
        if not found:
            return list(_real["listdir"](self._seen(absolute)))
        for place in found:
            names |= dict.fromkeys(_real["listdir"](place))
        return [name for name in names if self.shown(os.path.join(absolute, name)) is not None]

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        absolute = self.guarded(path, dir_fd)
        if absolute is None:
            _real["mkdir"](path, mode, dir_fd=dir_fd)
            return
        shown = self.shown(absolute)
        if shown is not None and os.path.lexists(shown):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), absolute)
        target = self.writable(absolute, keep=False)
        _real["mkdir"](target, mode)
        self._hidden.discard(absolute)

    def _hiding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            absolute = self.guarded(path, dir_fd)
            if absolute is None:
                original(path, dir_fd=dir_fd)
                return
            shown = self.shown(absolute)
            if shown is None or not os.path.lexists(shown):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
            self.hide(absolute)

        return remove

    def _renaming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def rename(src: Any, dst: Any, **kwargs: Any) -> None:
            source, target = self.guarded(src), self.guarded(dst)
            if source is None and target is None:
                original(src, dst, **kwargs)
                return
            shown = self._seen(source) if source is not None else os.fspath(src)
            place = self.writable(target, keep=False) if target is not None else os.fspath(dst)
            if os.path.isdir(shown):
                shutil.copytree(shown, place, dirs_exist_ok=True)
            else:
                shutil.copyfile(shown, place)
            if target is not None:
                self._hidden.discard(target)
            if source is not None:
                self.hide(source)
            else:
                _REMOVE(shown)

        return rename

    def _changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *args: Any, **kwargs: Any) -> None:
            absolute = self.guarded(path, kwargs.get("dir_fd"))
            if absolute is None:
                original(path, *args, **kwargs)
            elif self.shown(absolute) == self.layers[0] + absolute:
                kwargs.pop("dir_fd", None)
                original(self.layers[0] + absolute, *args, **kwargs)

        return change

    def _linking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            absolute = self.guarded(dst)
            original(src, dst if absolute is None else self.writable(absolute, keep=False), *args, **kwargs)

        return link


_REMOVE = os.remove
