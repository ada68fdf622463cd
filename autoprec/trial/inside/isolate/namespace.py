"""A mount namespace with overlayfs (Linux, root or unprivileged user namespaces): a trial's files for whoever writes.

The overlay in Python reaches Python. Here the kernel lays a directory of ours over the user's (``man 8 mount``,
overlayfs): a shell, ``cp`` or a library in C that writes ``out/x`` writes the copy, reads it back, and removes what it
likes; the user's directory is the lower layer and is never written. Everything else but temporary files and caches is
mounted read-only. All that belongs to the process and those it starts, and is gone with the last of them.

Each fork that is a trial of its own gets a namespace of its own, with one more layer on top: what the process it was
forked from had written is below it and stays as it was. Whether all this works here is tried in a fork first, in which
nothing can be lost; where it does not (most containers, Ubuntu's default for programs without a profile), the caller
goes on with Landlock, which refuses such writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from autoprec.trial.inside.isolate.overlay import remove_tree
from autoprec.trial.processes import call_libc

#: CLONE_* (linux/sched.h), MS_* and MNT_DETACH (sys/mount.h), mount_setattr's number and flags (linux/mount.h), and
#: CAP_SYS_ADMIN (linux/capability.h).
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_BIND, _REC, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2  # MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH
_MOUNT_SETATTR, _AT_FDCWD, _RDONLY = 442, -100, 1  # MOUNT_ATTR_RDONLY
_CAP_SYS_ADMIN = 21  # its bit in /proc/self/status


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def _bind(source: str, target: str) -> None:
    call_libc("mount", source, target, None, ctypes.c_ulong(_BIND | _REC), None)


def _read_only(place: str, *, on: bool = True) -> None:
    wanted = _Attributes(set=_RDONLY) if on else _Attributes(clear=_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    call_libc("syscall", _MOUNT_SETATTR, _AT_FDCWD, place, 0, ctypes.byref(wanted), size)


def _mountpoints() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    places = [line.split(" ")[4] for line in lines]
    return [re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place) for place in places]


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _is_admin() -> bool:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return bool(int(text.partition("CapEff:")[2].split()[0], 16) >> _CAP_SYS_ADMIN & 1)


@contextlib.contextmanager
def _unless_gone(path: str) -> Iterator[None]:
    """Leave out a directory that another process removes just now; raises OSError where it is still there."""
    try:
        yield
    except OSError:
        if os.path.isdir(path):
            raise


class Mounts:
    """The user's directories that this process has laid layers over, and those layers.

    Args:
        guarded: directories of the user's, none in another.
        writable: what stays as it is: temporary files, caches, our own directories.
        folder: an empty directory of ours.
    """

    def __init__(self, guarded: Sequence[str], writable: Sequence[str], folder: str) -> None:
        self.guarded = tuple(guarded)
        self._lower = {path: f"{folder}/lower-{number}" for number, path in enumerate(guarded)}
        self._writable = [path for path in dict.fromkeys(map(os.path.realpath, writable)) if os.path.exists(path)]
        self._folder, self._layers = folder, [(folder, len(self.guarded))]  # each with how many it lies over
        self._gone: set[str] = set()  # temporary directories of other processes that were removed, or made anew

    def lay(self) -> None:
        """Enter a mount namespace of our own, and lay the first layer; raises OSError."""
        cwd = os.getcwd()
        flags, user, group = _NEWNS, os.getuid(), os.getgid()
        if not _is_admin():
            flags |= _NEWUSER
        call_libc("unshare", flags)
        if flags & _NEWUSER:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        self._options = ",userxattr" if flags & _NEWUSER else ""
        call_libc("mount", None, "/", None, ctypes.c_ulong(_REC | _PRIVATE), None)
        for path, lower in self._lower.items():
            os.mkdir(lower)
            _bind(path, lower)
        kept = [path for path in self._writable if not _below(path, self.guarded)]
        for path in kept:
            _bind(path, path)
        for place in _mountpoints():
            if not _below(place, kept):
                _read_only(place)
        for lower in self._lower.values():  # it lies among temporary files, and a script may clear those
            _read_only(lower)
        self._overlay()
        os.chdir(cwd)

    def push(self, folder: str, further: Iterable[str] = ()) -> None:
        """In a fork: from now on write into another layer, and guard these further directories; raises OSError."""
        cwd = os.getcwd()
        call_libc("unshare", _NEWNS)
        os.chdir("/")
        for path in self.guarded:
            self._take_off(path)
        for path in filter(os.path.isdir, further):
            lower = f"{folder}/lower-{len(self._lower)}"
            os.makedirs(lower, exist_ok=True)
            with _unless_gone(path):
                _bind(path, lower)
                _read_only(lower)
                self._lower[path] = lower
        self.guarded = tuple(self._lower)
        self._layers.insert(0, (folder, len(self.guarded)))
        self._overlay()
        os.chdir(cwd)

    def _take_off(self, path: str) -> None:
        """Take the layers off a directory: one that another process removed took them along."""
        if path in self._gone or not os.path.isdir(path):
            self._gone.add(path)
            return
        try:
            call_libc("umount2", path, _DETACH)
        except OSError as error:
            if os.path.isdir(path) and error.errno != errno.EINVAL:  # EINVAL: made anew, so nothing lies over it
                raise
            self._gone.add(path)

    def _overlay(self) -> None:
        for number, (path, lower) in enumerate(self._lower.items()):
            if path in self._gone or not os.path.isdir(path):
                continue
            upper, work = f"{self._layers[0][0]}/upper-{number}", f"{self._layers[0][0]}/work-{number}"
            os.mkdir(upper)
            os.mkdir(work)
            found = os.stat(lower)
            os.chmod(upper, found.st_mode & 0o7777)
            uppers = [f"{layer}/upper-{number}" for layer, size in self._layers[1:] if number < size]
            below = [*filter(os.path.isdir, uppers), lower]
            options = f"lowerdir={':'.join(below)},upperdir={upper},workdir={work}{self._options}"
            with _unless_gone(path):
                call_libc("mount", "overlay", path, "overlay", ctypes.c_ulong(0), options)
                for kept in self._writable:
                    if _below(kept, [path]) and kept != path:  # a cache or a study inside the user's directory
                        _bind(f"{lower}{kept[len(path) :]}", kept)
                        _read_only(kept, on=False)


def _touch(folders: Iterable[str]) -> None:
    for folder in folders:
        with open(os.path.join(folder, ".autoprec-probe"), "a") as stream:
            stream.write("x")


def _works(mounts: Mounts) -> bool:
    """Try everything in a fork: also that a file can be copied up, and a layer be put on a layer."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mounts.lay()
            second = f"{mounts._folder}/second"
            os.mkdir(second)
            _touch(mounts.guarded)
            mounts.push(second)
            _touch(mounts.guarded)
            code = 0
        except BaseException:  # whatever it is: not here
            code = 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def enter(guarded: Iterable[str], writable: Sequence[str], folder: str) -> Mounts | None:
    """Lay a layer over the user's directories for this process and those it starts; None where that cannot be.

    Call it before there are other threads.

    Args:
        guarded: directories of the user's that are laid over.
        writable: directories that stay as they are.
        folder: the folder that takes what is written.
    """
    if sys.platform != "linux":
        return None
    paths = sorted({os.path.realpath(path) for path in guarded})
    top = [path for path in paths if not _below(path, [other for other in paths if other != path])]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        free = {os.path.realpath(path) for path in writable}
        if any(path == "/" or path in free or _below(folder, [path]) for path in top):
            return None
        if any(_below(place, top) for place in _mountpoints()) or len(os.listdir("/proc/self/task")) > 1:
            return None  # another disk below the directory would not be seen in it
        probe = f"{folder}-probe"
        os.mkdir(probe)
        try:
            if not _works(Mounts(top, writable, probe)):
                return None
        finally:
            remove_tree(probe)
        os.makedirs(folder, exist_ok=True)
        mounts = Mounts(top, writable, folder)
        mounts.lay()
        return mounts
    return None
