"""Process trees: find every descendant of a trial and end it; tie children to the life of their parent."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

#: Of linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: The file of a private folder that its owner keeps locked, and how long the owner may take to lock it.
_LOCK, _BEING_MADE_S = "lock", 60.0
#: The file of a private folder that lists the temporary directories which the script made, one a line.
MADE = "made"
#: States of processes that have ended.
_DEAD = (b"Z", b"X")


def call_libc(name: str, *values: Any) -> int:
    """Call a function of the C library, ``syscall`` among them, that tells a failure by a negative value.

    Raises:
        OSError: it failed; the number is libc's errno.
        AttributeError: this system's C library has none of that name.
    """
    arguments = [os.fsencode(value) if isinstance(value, str) else value for value in values]
    found = int(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return found


def die_with_parent(sent: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the thread that started this process ends (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        call_libc("prctl", _PR_SET_PDEATHSIG, sent, 0, 0, 0)


def adopt_orphans() -> set[int]:
    """Become the parent of every daemon that a descendant leaves behind (Linux), and return today's children.

    A process that leaves its session and clears its environment can be found in no other way.
    """
    with contextlib.suppress(OSError, AttributeError):
        call_libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return _children(os.getpid())


def end_orphans(known: Iterable[int], *, patience_s: float = 1.0) -> int:
    """Kill and reap all children of this process but ``known``, and what those leave behind; return how many."""
    kept, ended = set(known), set()
    end = time.monotonic() + patience_s
    while (orphans := _children(os.getpid()) - kept) and time.monotonic() < end:
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        ended |= orphans
    return len(ended)


def reaps_children() -> Any:
    """Let this process learn how its children end, whatever the script does with SIGCHLD; return the script's handler.

    Where that is SIG_IGN, or a handler that waits for any child, the ends of ours would be lost.
    """
    with contextlib.suppress(ValueError):  # not in the main thread
        return signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return None


def raise_open_files() -> None:
    """Let this process open as many files as the system allows it: a script may need nearly all that it was given."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _children(pid: int) -> set[int]:
    """Return the children of this process ``pid``, zombies included; where there are none that costs one call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    return {number for number, fields in all_processes() if int(fields[1]) == pid}


def prefer_as_oom_victim() -> None:
    """Ask the kernel to end this trial first when memory runs out, not its host or the user's driver."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("800")


def start_ticks(pid: int) -> str:
    """When a process started, in kernel ticks, so that a reused number is not taken for it; empty when it is gone."""
    fields = _stat(pid)
    return fields[19].decode() if fields and fields[0] not in _DEAD else ""


def private_folder() -> tuple[Path, int]:
    """Make a temporary directory for this process, and remove those of processes that are gone (kill -9).

    Returns the directory and an open descriptor of its file ``lock``: no other process removes it while that is open.
    Numbers of processes do not tell: in another PID namespace (a container that shares ``/tmp``) they mean others.
    """
    base = Path(tempfile.gettempdir())
    for old in filter(_is_own_folder, base.glob("autoprec-p*-*")):
        with contextlib.suppress(OSError):
            _remove_unheld(old)
    folder = Path(tempfile.mkdtemp(prefix=f"autoprec-p{os.getpid()}-"))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Lend a :func:`private_folder`, which a later command of ours removes where this one is killed."""
    folder, lock = private_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)
        os.close(lock)


def remove_folder(path: Path) -> None:
    """Remove a directory of ours as far as possible; the kernel's overlay leaves folders that cannot be entered."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_dir():
        for folder, names, _ in os.walk(path):
            for place in (os.path.join(folder, name) for name in names):
                if not os.path.islink(place):
                    with contextlib.suppress(OSError):
                        os.chmod(place, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def remove_made(folder: Path) -> None:
    """Remove the temporary directories that a script has made in trials, which are killed before it removes them.

    The isolation lists their paths in a file of the private folder.
    """
    with contextlib.suppress(OSError):
        lines = (folder / MADE).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        for path in filter(_is_own_folder, map(Path, lines)):
            remove_folder(path)


def _is_own_folder(path: Path) -> bool:
    """Say whether a directory of this user's is there; a link of its name would lead to somebody's files."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _remove_unheld(folder: Path) -> None:
    """Remove a folder of :func:`private_folder` that no process holds; one without a lock may just be being made."""
    if not (folder / _LOCK).exists():
        owner = folder.name.split("-")[1][1:]  # of an earlier version, which locked nothing; else it is another's
        if time.time() - folder.lstat().st_mtime > _BEING_MADE_S and owner.isdigit() and not start_ticks(int(owner)):
            remove_folder(folder)
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_made(folder)
        remove_folder(folder)
    finally:
        os.close(lock)


def watch_driver(pid: int, since: str) -> threading.Event:
    """End this process group soon after the driver has ended, however it ended; set the event to stop watching."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            if start_ticks(pid) != since:
                end_group(os.getpgrp())
                os._exit(1)

    threading.Thread(target=watch, name="autoprec-watch", daemon=True).start()
    return stop


def end_group(leader: int, sig: int = signal.SIGKILL) -> None:
    """Signal a whole process group; a group that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sig)


def read_if_there(path: str) -> bytes:
    """Return what a file says; empty where it is gone, or, in /proc, not ours to read."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` (``man 5 proc``) from the third on: state, parent, group, session, ..."""
    fields = read_if_there(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields if len(fields) > 19 else []


def all_processes() -> Iterator[tuple[int, list[bytes]]]:
    """Yield every process of the machine with the fields of :func:`_stat`; nothing where there is no /proc."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (fields := _stat(name)):
                yield int(name), fields


def marked_processes(mark: str, sessions: Iterable[int] = ()) -> list[int]:
    """Return living processes that carry ``mark`` in their environment or belong to one of the sessions.

    A mark is a prefix of the marks derived from it; end it with a NUL to mean exactly that one.
    """
    wanted, chosen = mark.encode(), {int(s) for s in sessions}

    def is_meant(pid: int, fields: list[bytes]) -> bool:
        if pid == os.getpid() or fields[0] in _DEAD:
            return False
        return int(fields[3]) in chosen or (bool(wanted) and wanted in read_if_there(f"/proc/{pid}/environ") + b"\0")

    return [pid for pid, fields in all_processes() if is_meant(pid, fields)]


_SHARED = "/dev/shm/"


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that processes have mapped (Linux; empty elsewhere).

    Ranks that are killed cannot remove what they share (batches of DataLoader workers under the ``file_system``
    strategy, segments of NCCL): it stays until the machine is started anew.
    """
    found: set[str] = set()
    for pid in pids:
        for line in read_if_there(f"/proc/{pid}/maps").splitlines():
            path = line.split(maxsplit=5)[-1].decode("utf-8", "surrogateescape")
            if path.startswith(_SHARED) and not path.endswith(" (deleted)"):
                found.add(path)
    return found


def remove_shared_memory(paths: Iterable[str]) -> None:
    """Remove files of shared memory of this user that no living process has mapped."""
    left = set(paths)
    if left:
        left -= shared_memory_of(pid for pid, fields in all_processes() if fields[0] not in _DEAD)
    for path in left:
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.getuid():
                os.unlink(path)


def sweep(mark: str, sessions: Iterable[int] = (), *, patience_s: float = 5.0) -> list[int]:
    """Kill every marked process and wait until none is left; returns what could not be ended.

    Args:
        mark: mark in the environment of the processes.
        sessions: ids of sessions whose processes count as well.
        patience_s: seconds to wait at most.
    """
    chosen = list(sessions)
    end = time.monotonic() + patience_s
    left = marked_processes(mark, chosen)
    while left and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        left = marked_processes(mark, chosen)
    return left
