"""What a fork shares with its parent although memory is copied: open files, and memory that was mapped to be shared.

Parent and child share every *open file description* (``man 2 fork``): where one has read, the other goes on. A trial
that is a fork therefore opens each regular file again, at the same position (:func:`reopen`); one that it writes is its
copy in the trial's own layer. Some things cannot be had twice: the other end of a pipe or a connection, memory mapped
``MAP_SHARED`` for writing, a file that is open for reading and writing (whose content is state, and which a library
such as SQLite knows by its inode). A process that has one of those must not be forked (:func:`shared_state`).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import stat
import sys
import termios
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from autoprec.trial.inside.isolate.overlay import Overlay, real

#: Mapped writable and shared in processes that share nothing a training could notice: the semaphores of locks (tqdm
#: makes two), the register of LLVM's and Intel's OpenMP, libffi's code, devices.
_HARMLESS = ("/dev/shm/sem.", "/dev/shm/__KMP_REGISTERED_LIB_", "/memfd:libffi", "/dev/nvidia", "/dev/dri", "/dev/kfd")
_TCP_ESTABLISHED = 1


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that is open.

    Attributes:
        number: the descriptor.
        path: the path as the script knows it; empty where that is not the file any more (it was removed, or replaced).
        same_as: a lower descriptor that is a duplicate (``dup``): both move together; -1 where there is none.
        identity: device and inode of the file.
    """

    number: int
    flags: int
    path: str
    inheritable: bool
    same_as: int
    identity: tuple[int, int]

    @property
    def written(self) -> bool:
        """Whether the file was opened for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


def _descriptors() -> Iterator[tuple[int, os.stat_result, int]]:
    """Yield number, status and flags of what is open, besides standard input and output."""
    for number in sorted(int(name) for name in real["listdir"]("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one by which they are listed
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_NOFOLLOW
            if number > 2 and not flags & os.O_PATH:
                yield number, os.fstat(number), flags


# -------------------------------------------------------------------- regular files
def open_files(overlay: Overlay) -> list[OpenFile]:
    """Return the regular files that this process has open."""
    files: list[OpenFile] = []
    known: dict[tuple[int, int, int], list[int]] = {}
    for number, found, flags in _descriptors():
        if not stat.S_ISREG(found.st_mode):
            continue
        path = overlay.of_descriptor(number)
        place = _place(overlay, path)
        alike = known.setdefault((found.st_dev, found.st_ino, flags), [])
        same = next((other for other in alike if _moves_with(number, other)), -1)
        alike.append(number)
        mine = place is not None and _is_at(place, found)
        shown, inheritable = path if mine else "", os.get_inheritable(number)
        files.append(OpenFile(number, flags, shown, inheritable, same, (found.st_dev, found.st_ino)))
    return files


def _place(overlay: Overlay, path: str) -> str | None:
    """Return where a path, without links, really is."""
    return overlay.shown(path) if overlay.guarded(path, follow=False) is not None else path


def _is_at(place: str, found: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(real["stat"](place), found)
    return False


def _moves_with(number: int, other: int) -> bool:
    """Say whether two descriptors of one file are duplicates: moving one moves the other."""
    position = os.lseek(number, 0, os.SEEK_CUR)
    if os.lseek(other, 0, os.SEEK_CUR) != position:
        return False
    os.lseek(number, position + 1, os.SEEK_SET)
    moved = os.lseek(other, 0, os.SEEK_CUR) == position + 1
    os.lseek(number, position, os.SEEK_SET)
    return moved


def reopen(files: Iterable[OpenFile], overlay: Overlay) -> None:
    """Give this process, a fork with a new layer, descriptions of its own for the files that its parent had open.

    Call it before the parent, or another fork, moves a position. A file that is written becomes this layer's copy. One
    that was closed since it was listed, as the garbage collector does at any time, is left alone.
    """
    files = list(_still_open(files))
    for file in sorted(files, key=lambda file: not file.written):  # then a reader of the same file opens the copy
        if file.same_as >= 0:
            continue
        descriptor = _opened(file, overlay)
        if descriptor is None:
            continue
        if descriptor != file.number:  # it is where the file was closed just now
            os.lseek(descriptor, os.lseek(file.number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(descriptor, file.number, file.inheritable)
        os.close(descriptor)
    for file in files:
        if file.same_as >= 0:
            os.dup2(file.same_as, file.number, file.inheritable)


def _still_open(files: Iterable[OpenFile]) -> Iterator[OpenFile]:
    """Yield what is still open; the first duplicate that is stands for one that is not."""
    first: dict[int, int] = {}
    for file in files:
        try:
            found = os.fstat(file.number)
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == file.identity:
            same = first.setdefault(file.same_as if file.same_as >= 0 else file.number, file.number)
            yield replace(file, same_as=same if same != file.number else -1)


def _opened(file: OpenFile, overlay: Overlay) -> int | None:
    places = [f"/proc/self/fd/{file.number}"]
    if file.path:
        with contextlib.suppress(OSError):
            if file.written and overlay.guarded(file.path, follow=False) is not None:
                places.insert(0, overlay.writable(file.path, keep=True))
            elif (place := _place(overlay, file.path)) is not None:
                places.insert(0, place)
    for place in places:
        with contextlib.suppress(OSError):
            return int(real["open"](place, file.flags | os.O_CLOEXEC))
    return None


# -------------------------------------------------------------------- what cannot be had twice
def shared_state() -> str:
    """Return what forks of this process would share that training may depend on; empty when there is nothing."""
    for name in _shared_mappings():
        return f"memory that is shared for writing ({name})"
    pipes: dict[int, list[tuple[int, int]]] = {}
    for number, found, flags in _descriptors():
        name = os.path.basename(real["readlink"](f"/proc/self/fd/{number}"))
        if stat.S_ISREG(found.st_mode):
            if flags & os.O_ACCMODE == os.O_RDWR:
                return f"a file that is open for reading and writing ({name})"
            if not _opens_again(number, flags):
                return f"an open file that cannot be opened again ({name})"
        elif stat.S_ISFIFO(found.st_mode):
            pipes.setdefault(found.st_ino, []).append((number, flags & os.O_ACCMODE))
        elif stat.S_ISSOCK(found.st_mode) and (peer := _connected(number)):
            return f"an open connection ({peer})"
    own = _helpers()
    for ends in pipes.values():
        if not own.intersection(number for number, _ in ends) and (why := _shared_pipe(ends)):
            return why
    return ""


def _opens_again(number: int, flags: int) -> bool:
    with contextlib.suppress(OSError):
        os.close(real["open"](f"/proc/self/fd/{number}", flags | os.O_CLOEXEC))
        return True
    return False


def _connected(number: int) -> str:
    """Return the name of the other end of a connected stream; empty for one that has ended or that is in this process.

    Listening sockets and datagrams are left out: forks that share one do not tear each other's data.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.type != socket.SOCK_STREAM:
            return ""
        peer = one.getpeername()
        if one.family == socket.AF_UNIX:
            credentials = array.array("i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return "" if credentials[0] == os.getpid() else "a local socket"
        established = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED
        return f"{peer[0]}:{peer[1]}" if established else ""
    return ""


def _shared_pipe(ends: list[tuple[int, int]]) -> str:
    """Return what forks would share by a pipe; empty with both ends here and no data (``asyncio`` wakes itself by one).

    What waits in a pipe of one process would be read by one fork, and be missing in the others. Libraries keep some as
    well: libuv (uvloop, a ``TCPStore``) locks its signals by a byte in a pipe.
    """
    if {way for _, way in ends} != {os.O_RDONLY, os.O_WRONLY}:
        return "a pipe to another process"
    waiting = array.array("i", [0])
    fcntl.ioctl(next(number for number, way in ends if way == os.O_RDONLY), termios.FIONREAD, waiting)
    return "a pipe with data in it, which one fork would take from the others" if waiting[0] else ""


def _helpers() -> set[int]:
    """Return the pipes to processes that belong to Python and torch, and have no part in training.

    They are the trackers of ``multiprocessing``, and the compile workers of Inductor.
    """
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    found = {getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None)}
    for pool in getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ()):
        ends = (getattr(pool, "read_pipe", None), getattr(pool, "write_pipe", None))
        found |= {end.fileno() for end in ends if end is not None and not end.closed}
    return {number for number in found if number is not None}


def _shared_mappings() -> Iterator[str]:
    """Yield the names of the memory that is mapped ``MAP_SHARED`` and writable."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, rights, _, _, _, *name = line.split(maxsplit=5)
        path = name[0] if name else ""
        if "w" in rights and rights.endswith("s") and not path.startswith(_HARMLESS):
            yield os.path.basename(path) or "anonymous"
