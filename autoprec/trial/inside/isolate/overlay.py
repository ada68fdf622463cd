"""Files a trial writes go to private layers: the user's directories are read, never changed.

A path is followed first: links are resolved as the trial sees them, those it made itself included, so that
``latest/metrics.csv`` is the file it stands for, under whatever name. Every path belongs to the longest matching
prefix: the working directory, the script's directory and ``/`` are guarded; the temporary directory, caches, devices
and our own directories are free, unless they are one of those. A write to a guarded path lands in the top layer, a read
sees the layers from the top down and then the real file, a removal masks what lies below: what a trial writes it can
read back, list, rename and change into. This file decides *where* a path is; ``overlay_calls`` puts that under ``open``
and ``os`` and so ``pathlib``, ``shutil``, ``tarfile`` and the rest of the standard library. Libraries that open files
in C are given the right path by ``savers``; what is left is refused by the kernel (``landlock``).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import stat
import tempfile
from collections.abc import Iterable
from typing import Any

#: Caches of tools: the variable that names one; the directory in the home directory that is used without it; and the
#: module without which nothing uses that.
_CACHES = (
    ("XDG_CACHE_HOME", ".cache", ""),
    ("HF_HOME", "", ""),
    ("HF_DATASETS_CACHE", "", ""),
    ("TORCH_HOME", "", ""),
    ("TORCH_EXTENSIONS_DIR", "", ""),
    ("TORCHINDUCTOR_CACHE_DIR", "", ""),
    ("TRITON_CACHE_DIR", ".triton", "triton"),
    ("CUDA_CACHE_PATH", ".nv", "triton"),
    ("DG_JIT_CACHE_DIR", ".deep_gemm", "deep_gemm"),
)
#: Links that may follow one another in a path, as for the kernel.
_MOST_LINKS = 40
#: Directories of which is remembered whether they are guarded.
_MOST_KNOWN = 50_000
#: The system's own calls, by which layers are reached; those of ``os`` are replaced (see ``overlay_calls``).
_NAMES = "stat lstat listdir readlink getcwd remove rmdir mkdir open symlink utime chmod rename statvfs mkfifo"
real = {name: getattr(os, name) for name in _NAMES.split()}


def free_prefixes(guarded: Iterable[str]) -> set[str]:
    """Return the directories a trial may write to: temporary files, devices, and the caches of tools.

    A directory that is the user's wins, whatever else it is said to be: a ``guarded`` one (a job on a cluster has its
    working directory in ``TMPDIR``, ``HF_HOME`` or ``XDG_CACHE_HOME``), the home directory, the root.
    """
    free = {"/dev", "/proc", "/sys", f"/run/user/{os.getuid()}", tempfile.gettempdir(), *_caches()}
    kept = _both(["/", os.path.expanduser("~"), *guarded])
    return {path for path in map(os.path.abspath, free) if not _both([path]) & kept}


def _caches() -> dict[str, bool]:
    """Return the directories of :data:`_CACHES`, each with whether something here uses it.

    Triton builds its launcher of CUDA in its own cache before Inductor names another, so that both are needed.
    """
    found: dict[str, bool] = {}
    for name, folder, module in _CACHES:
        if path := os.environ.get(name):
            found[path] = True
        if folder:
            base = folder == ".triton" and os.environ.get("TRITON_HOME")
            path = os.path.join(base or os.path.expanduser("~"), folder)
            found[path] = not module or importlib.util.find_spec(module) is not None
    return found


def make_caches() -> None:
    """Make the caches that are used here: the kernel lets nothing be written in a directory that was not there."""
    for path, used in _caches().items():
        if used:
            with contextlib.suppress(OSError):
                os.makedirs(path, exist_ok=True)


def _both(paths: Iterable[str]) -> set[str]:
    """Return paths as they are written and as they are when their links are followed."""
    return {form for path in paths for form in (os.path.abspath(path), os.path.realpath(path))}


def _parts(path: str) -> list[str]:
    """Return the names of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def kind(place: str) -> int:
    """Return the type bits of what is really at a place, links not followed; 0 where nothing is."""
    try:
        return stat.S_IFMT(real["lstat"](place).st_mode)
    except OSError:
        return 0


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
        guarded = [os.path.expanduser("~"), *guarded]
        self._rules = dict.fromkeys(_both([*free_prefixes(guarded), *free, layer]), False)
        self._rules |= dict.fromkeys({"/", *_both(guarded)} - set(self._rules), True)
        self._known: dict[str, bool] = {}  # directories without a rule of their own: whether what is in them is guarded
        #: What was removed: the path, and how many layers there were; only that many and above are seen below it.
        self._masks: dict[str, int] = {}
        #: Directories over which the kernel itself lays a copy: free here, and yet the trial's own (``namespace``).
        self.mounted: tuple[str, ...] = ()
        self.cwd: str | None = None  # the working directory as the script knows it, when it lies in a layer

    def push(self, layer: str) -> None:
        """Write into another directory from now on; what was written before is still seen."""
        self.layers.insert(0, layer)

    def allow(self, *paths: str) -> None:
        """Let further directories of ours be written."""
        self._rules |= dict.fromkeys(_both(paths), False)
        self._known = {}

    def guard(self, paths: Iterable[str]) -> None:
        """From now on change nothing at these paths either, although what lies beside them is free."""
        self._rules |= dict.fromkeys(_both(paths) - {path for path, kept in self._rules.items() if not kept}, True)
        self._known = {}

    # ---------------------------------------------------------------- paths
    def absolute(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path as the script means it, from the root, links not followed; None for what is not a path."""
        if isinstance(path, int) or path is None:
            return None
        try:
            text = os.fsdecode(os.fspath(path))
        except TypeError:
            return None
        if not text:  # for the system nothing is there, where for us it would be the working directory
            return None
        if not text.startswith("/"):
            folder = self.of_descriptor(dir_fd) if dir_fd is not None else self.cwd or real["getcwd"]()
            text = f"{self.logical(folder)}/{text}"
        return text

    def of_descriptor(self, descriptor: int) -> str:
        """Return the path behind an open descriptor, as the script knows it; what is not a file has a name like one."""
        return self.logical(real["readlink"](f"/proc/self/fd/{descriptor}"))

    def logical(self, path: str) -> str:
        """Return the user's path that a path inside a layer stands for; any other as it is."""
        for layer in self.layers:
            if path.startswith(layer + "/"):
                return path[len(layer) :]
        return "/" if path in self.layers else path

    def resolve(self, text: str, *, follow: bool = True) -> str:
        """Return a path from the root without links, as this trial sees them; ``follow`` means its last name too.

        Raises:
            OSError: a circle of links (ELOOP).
        """
        done, todo, links = "", _parts(self.logical(text)), 0
        absent: set[str] = set()  # layers without the directory `done`, which have nothing below it either
        follow = follow or text.endswith("/")
        while todo:
            name = todo.pop()
            if name == "..":
                done = os.path.dirname(done).rstrip("/")
                absent.clear()
                continue
            path = f"{done}/{name}"
            link = self._link(path, absent) if todo or follow else None
            if link is None:
                done = path
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
            if link.startswith("/"):
                done = ""
            absent.clear()
            todo += _parts(self.logical(link))
        return done or "/"

    def _link(self, path: str, absent: set[str]) -> str | None:
        """Return what a link says; None for anything else, and for those of /proc that lead to what has no path.

        Args:
            path: from the root, without links above its last name.
            absent: layers that are not asked, "" for the real files; those where nothing is at the path are added.
        """
        for layer in self._layers(path) if self._is_guarded(path) else [""]:
            if layer in absent:
                continue
            try:
                link = os.fsdecode(real["readlink"](layer + path))
            except OSError as error:
                if error.errno == errno.EINVAL:  # it is there, and is not a link
                    return None
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    absent.add(layer)
                continue
            return None if path.startswith("/proc/") and not kind(os.path.join("/proc/self", link)) else link
        return None

    def _is_guarded(self, path: str) -> bool:
        known = self._known  # another thread may change the rules: then it is another dictionary
        if (found := self._rules.get(path)) is not None:
            return found
        folder = path.rpartition("/")[0] or "/"
        if (found := known.get(folder)) is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            found = known[folder] = self._is_guarded(folder)
        return found

    def locate(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> tuple[str, bool] | None:
        """Return a path with its links followed, and whether it is guarded; None for a descriptor.

        Args:
            path: text, bytes, a path or a descriptor, as ``open`` takes it.
            dir_fd: descriptor of the directory that a relative path is of.
            follow: whether a link at its end is followed.
        """
        absolute = self.absolute(path, dir_fd)
        if absolute is None:
            return None
        resolved = self.resolve(absolute, follow=follow)
        return resolved, self._is_guarded(resolved)

    def guarded(self, path: Any, *, follow: bool = True) -> str | None:
        """Return the path of :meth:`locate` when it is a guarded one, else None."""
        found = self.locate(path, follow=follow)
        return found[0] if found is not None and found[1] else None

    def places(self, absolute: str) -> list[str]:
        """Return where parts of a guarded path may be, from the top down; what was removed is left out."""
        return [layer + absolute for layer in self._layers(absolute)]

    def _layers(self, absolute: str) -> list[str]:
        """Return the layers that a guarded path may be in, from the top down, "" for the real files."""
        lowest, path = 0, absolute
        while self._masks and path != "/":
            lowest = max(lowest, self._masks.get(path, 0))
            path = os.path.dirname(path)
        count = len(self.layers)
        inside = [layer for depth, layer in enumerate(self.layers) if count - depth >= lowest]
        return inside if lowest else [*inside, ""]

    def shown(self, absolute: str) -> str | None:
        """Return where a guarded path is really read from; None when it was removed in this trial."""
        places = self.places(absolute)
        for place in places:
            if kind(place):
                return place
        return absolute if places and places[-1] == absolute else None

    def kind(self, absolute: str) -> int:
        """Return the type bits of a guarded path as this trial sees it, 0 where nothing is."""
        shown = self.shown(absolute)
        return kind(shown) if shown is not None else 0

    def untouched(self, absolute: str) -> bool:
        """True for a directory that this trial has changed nothing in, however many files it has."""
        if any(mask == absolute or mask.startswith(absolute + "/") for mask in self._masks):
            return False
        return not any(place != absolute and kind(place) for place in self.places(absolute))

    def seen(self, absolute: str) -> str:
        """Return :meth:`shown`; raises FileNotFoundError for what was removed."""
        shown = self.shown(absolute)
        if shown is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute)
        return shown

    # ---------------------------------------------------------------- changes
    def folder(self, absolute: str) -> str:
        """Return the directory in the top layer that stands for one that the trial sees, making it if need be.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none, as the script would have seen it.
        """
        found = self.kind(absolute)
        if not stat.S_ISDIR(found):
            code = errno.ENOTDIR if found else errno.ENOENT
            raise OSError(code, os.strerror(code), absolute)
        place = self.layers[0]
        for part in absolute.split("/")[1:]:
            place = f"{place}/{part}" if part else place
            with contextlib.suppress(FileExistsError):
                real["mkdir"](place)
        return place

    def writable(self, absolute: str, *, keep: bool) -> str:
        """Return the path in the top layer to write to; with ``keep`` what is there now is copied first.

        Raises:
            FileNotFoundError, NotADirectoryError: as the script would have seen it.
        """
        current = self.shown(absolute)
        target = os.path.join(self.folder(os.path.dirname(absolute)), os.path.basename(absolute))
        if keep and current is not None and current != target and stat.S_ISREG(kind(current)):
            copy_file(current, target)
        return target

    def hide(self, absolute: str) -> None:
        """Remove a path as far as this trial can see."""
        self.seen(absolute)
        remove_tree(self.layers[0] + absolute)
        self._masks[absolute] = len(self.layers)

    def listed(self, absolute: str) -> dict[str, str]:
        """Return the names in a guarded directory, each with where it really is."""
        names: dict[str, str] = {}
        for place in reversed(self.places(absolute)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                names |= {name: os.path.join(place, name) for name in real["listdir"](place)}
        return {name: shown for name in names if (shown := self.shown(os.path.join(absolute, name))) is not None}

    def copy(self, source: str, guarded: bool, target: str) -> None:
        """Copy what is at a path, as this trial sees it, to a place where nothing is.

        Args:
            source: absolute path.
            guarded: whether this trial may see something else there.
            target: absolute path.
        """
        place = self.seen(source) if guarded else source
        found = kind(place)
        if stat.S_ISLNK(found):
            real["symlink"](real["readlink"](place), target)
        elif stat.S_ISDIR(found):
            real["mkdir"](target)
            names = self.listed(source) if guarded else real["listdir"](source)
            for name in names:
                self.copy(f"{source}/{name}", guarded, f"{target}/{name}")
            copy_mode(place, target)
        elif stat.S_ISFIFO(found):
            real["mkfifo"](target)
        else:
            copy_file(place, target)


# -------------------------------------------------------------------- real files
def copy_mode(source: str, target: str) -> None:
    """Give a file the permissions and times of another."""
    found = real["stat"](source)
    with contextlib.suppress(OSError):
        real["chmod"](target, stat.S_IMODE(found.st_mode))
        real["utime"](target, ns=(found.st_atime_ns, found.st_mtime_ns))


def copy_file(source: str, target: str) -> None:
    """Copy a regular file; nothing at the target is followed or overwritten."""
    with contextlib.ExitStack() as stack:
        reader = real["open"](source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        stack.callback(os.close, reader)
        writer = real["open"](target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, writer)
        while chunk := os.read(reader, 1 << 22):
            os.write(writer, chunk)
    copy_mode(source, target)


def remove_tree(place: str) -> None:
    """Remove a file or a directory of ours, with what is in it; nothing there is fine."""
    found = kind(place)
    if stat.S_ISDIR(found):
        with contextlib.suppress(OSError):
            real["chmod"](place, 0o700)
        for name in real["listdir"](place):
            remove_tree(f"{place}/{name}")
        real["rmdir"](place)
    elif found:
        real["remove"](place)
