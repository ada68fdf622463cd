"""What a fork shares with its parent although memory is copied: open files, and memory that was mapped to be shared.

Parent and child share every *open file description* (``man 2 fork``): where one has read, the other goes on. So do they
share the other end of a pipe or a connection, and memory mapped ``MAP_SHARED`` for writing. A process that has one of
those open must not be forked (:func:`shared_state`): its trials are processes of their own, in which the script opens
its files itself.
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
from collections.abc import Iterator
from pathlib import Path

from autoprec.trial.inside.isolate.overlay import real

#: Mapped writable and shared in processes that share nothing a training could notice: the semaphores of locks (tqdm
#: makes two), the register of LLVM's and Intel's OpenMP, libffi's code, devices.
_HARMLESS = ("/dev/shm/sem.", "/dev/shm/__KMP_REGISTERED_LIB_", "/memfd:libffi", "/dev/nvidia", "/dev/dri", "/dev/kfd")
_TCP_ESTABLISHED = 1


def _descriptors() -> Iterator[tuple[int, os.stat_result, int]]:
    """Yield number, status and flags of what is open, besides standard input and output."""
    for number in sorted(int(name) for name in real["listdir"]("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one by which they are listed
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_NOFOLLOW
            if number > 2 and not flags & os.O_PATH:
                yield number, os.fstat(number), flags


def shared_state() -> str:
    """Return what forks of this process would share that training may depend on; empty when there is nothing."""
    mappings = list(_mappings())
    for rights, path in mappings:
        if "w" in rights and rights.endswith("s") and not path.startswith(_HARMLESS):
            return f"memory that is shared for writing ({os.path.basename(path) or 'anonymous'})"
    mapped = {path for _, path in mappings}  # by a descriptor of its own, whose position means nothing
    pipes: dict[int, list[tuple[int, int]]] = {}
    for number, found, flags in _descriptors():
        path = real["readlink"](f"/proc/self/fd/{number}")
        if stat.S_ISREG(found.st_mode) and (flags & os.O_ACCMODE != os.O_RDONLY or path not in mapped):
            return f"an open file ({os.path.basename(path)})"
        if stat.S_ISFIFO(found.st_mode):
            pipes.setdefault(found.st_ino, []).append((number, flags & os.O_ACCMODE))
        elif stat.S_ISSOCK(found.st_mode) and (peer := _connected(number)):
            return f"an open connection ({peer})"
    own = _helpers()
    if any(not _is_own_pipe(ends) and not own.intersection(number for number, _ in ends) for ends in pipes.values()):
        return "a pipe to another process"
    return ""


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


def _is_own_pipe(ends: list[tuple[int, int]]) -> bool:
    """Say whether both ends of a pipe are in this process and nothing waits in it (``asyncio`` wakes itself by one)."""
    if {way for _, way in ends} != {os.O_RDONLY, os.O_WRONLY}:
        return False
    waiting = array.array("i", [0])
    fcntl.ioctl(next(number for number, way in ends if way == os.O_RDONLY), termios.FIONREAD, waiting)
    return not waiting[0]


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


def _mappings() -> Iterator[tuple[str, str]]:
    """Yield the rights (``rw-s``) and the file, or an empty string, of every piece of memory that is mapped."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, rights, _, _, _, *path = line.split(maxsplit=5)
        yield rights, path[0] if path else ""
