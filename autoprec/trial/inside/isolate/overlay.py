"""Files a trial writes go to private layers: the user's directories are read, never changed.

Every path belongs to the longest matching prefix: the working directory, the script's directory and ``/`` are guarded;
the temporary directory, caches, devices and our own directories are free. A write to a guarded path lands in the top
layer, a read sees the layers from the top down and then the real file, a removal masks what lies below: what a trial
writes it can read back, list, rename and change into. This file decides *where* a path is; ``overlay_calls`` puts that
under ``open`` and ``os`` and so ``pathlib``, ``shutil``, ``tarfile`` and the rest of the standard library. Libraries
that open files in C are given the right path by ``savers``; what is left is refused by the kernel (``landlock``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from typing import Any

__all__ = ["Overlay", "free_prefixes"]

_CACHES = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "HF_DATASETS_CACHE",
)
real = {name: getattr(os, name) for name in ("lstat", "listdir", "readlink", "getcwd", "remove", "makedirs")}


def free_prefixes(extra: Iterable[str]) -> set[str]:
    """Return the directories a trial may write to: temporary files, caches, devices, installed packages, ours."""
    home = os.path.expanduser("~")
    free = {"/dev", "/proc", "/sys", "/run", tempfile.gettempdir(), *extra}
    free |= {os.path.join(home, name) for name in (".cache", ".triton", ".nv", ".config")}
    free |= {os.environ[name] for name in _CACHES if os.environ.get(name)}
    free |= {sys.prefix, sys.base_prefix, sysconfig.get_paths()["purelib"], site.getuserbase()}
    return {os.path.abspath(path) for path in free if path}


class Overlay:
    """Where every path of a trial really is.

    Args:
        layer: an empty directory of ours.
        guarded: directories of the user's (working directory, script directory).
        free: directories that may be written besides the usual ones.
        below: layers of the process that started this one; read after ``layer``.
    """

    def __init__(self, layer: str, guarded: Iterable[str], free: Iterable[str], below: Iterable[str] = ()) -> None:
        self.layers = [layer, *below]
        self._rules = {os.path.abspath(path): False for path in free_prefixes([*free, layer])}
        self._rules |= {path: True for path in ["/", *map(os.path.abspath, guarded)] if path not in self._rules}
        #: What was removed: the path, and how many layers there were; only that many and above are seen below it.
        self._masks: dict[str, int] = {}
        self.cwd: str | None = None  # the working directory as the script knows it, when it lies in a layer

    def push(self, layer: str) -> None:
        """Write into another directory from now on; what was written before is still seen."""
        self.layers.insert(0, layer)

    def allow(self, *paths: str) -> None:
        """Let further directories of ours be written."""
        self._rules |= {os.path.abspath(path): False for path in paths}

    # ---------------------------------------------------------------- paths
    def absolute(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path as the script means it, from the root; None for a descriptor."""
        if isinstance(path, int) or path is None:
            return None
        try:
            text = os.fsdecode(os.fspath(path))
        except TypeError:
            return None
        if not os.path.isabs(text):
            folder = real["readlink"](f"/proc/self/fd/{dir_fd}") if dir_fd is not None else self.cwd
            if folder is not None:
                text = os.path.join(self.logical(folder), text)
            else:
                text = os.path.join(self.logical(real["getcwd"]()), text)
        return os.path.normpath(text)

    def logical(self, path: str) -> str:
        """Return the user's path that a path inside a layer stands for; any other as it is."""
        for layer in self.layers:
            if path.startswith(layer + "/"):
                return path[len(layer) :]
        return path

    def guarded(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute path when it is a guarded one, else None."""
        absolute = self.absolute(path, dir_fd)
        if absolute is None:
            return None
        prefix = absolute
        while prefix not in self._rules:
            prefix = os.path.dirname(prefix)
        return absolute if self._rules[prefix] else None

    def places(self, absolute: str) -> list[str]:
        """Return where parts of a guarded path may be, from the top down; what was removed is left out."""
        lowest, path = 0, absolute
        while path != "/":
            lowest = max(lowest, self._masks.get(path, 0))
            path = os.path.dirname(path)
        count = len(self.layers)
        inside = [layer + absolute for depth, layer in enumerate(self.layers) if count - depth >= lowest]
        return inside if lowest else [*inside, absolute]

    def shown(self, absolute: str) -> str | None:
        """Return where a guarded path is really read from; None when it was removed in this trial."""
        places = self.places(absolute)
        for place in places:
            with contextlib.suppress(OSError):
                real["lstat"](place)
                return place
        return absolute if places[-1] == absolute else None

    def untouched(self, absolute: str) -> bool:
        """True for a directory that this trial has changed nothing in, however many files it has."""
        if any(mask == absolute or mask.startswith(absolute + "/") for mask in self._masks):
            return False
        for place in self.places(absolute):
            if place != absolute and os.path.lexists(place):
                return False
        return self.shown(absolute) == absolute

    def seen(self, absolute: str) -> str:
        """Return :meth:`shown`; raises FileNotFoundError for what was removed."""
        shown = self.shown(absolute)
        if shown is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        return shown

    def writable(self, absolute: str, *, keep: bool) -> str:
        """Return the path in the top layer to write to; with ``keep`` what is there now is copied first.

        Raises:
            FileNotFoundError: the directory does not exist, as the script would have seen it.
        """
        target = self.layers[0] + absolute
        current = self.shown(absolute)
        parent = self.shown(os.path.dirname(absolute))
        if parent is None or not os.path.isdir(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        real["makedirs"](os.path.dirname(target), exist_ok=True)
        if keep and current not in (None, target) and os.path.isfile(str(current)):
            shutil.copyfile(str(current), target)
        return target

    def hide(self, absolute: str) -> None:
        """Remove a path as far as this trial can see."""
        self.seen(absolute)
        inside = self.layers[0] + absolute
        if os.path.isdir(inside) and not os.path.islink(inside):
            shutil.rmtree(inside)
        elif os.path.lexists(inside):
            real["remove"](inside)
        self._masks[absolute] = len(self.layers)

    def listed(self, absolute: str) -> dict[str, str]:
        """Return the names in a guarded directory, each with where it really is."""
        names: dict[str, str] = {}
        for place in reversed(self.places(absolute)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                names |= {name: os.path.join(place, name) for name in real["listdir"](place)}
        return {name: shown for name in names if (shown := self.shown(os.path.join(absolute, name))) is not None}
