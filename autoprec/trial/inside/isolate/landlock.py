"""The kernel's own guard (Linux 5.13 and later): what this process and its children may write, whoever opens the file.

The overlay reaches Python, and the libraries that ``savers`` knows. A shell, ``cp``, or a C library nobody thought of
goes past it; with Landlock such a write fails with "Permission denied" instead of changing a file of the user's. The
three system calls are described in ``man 7 landlock``; no rights are needed, and no process can take the restriction
off.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable

from autoprec.trial.processes import call_libc

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
#: LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH (linux/landlock.h), PR_SET_NO_NEW_PRIVS (linux/prctl.h).
_VERSION_FLAG, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
#: LANDLOCK_ACCESS_FS_*: write_file, remove_dir, remove_file, make_char ... make_sym (all of ABI 1 that writes).
_ABI_1 = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # ABI 2: rename to another directory; ABI 3: truncate
_FILE_RIGHTS = 1 << 1 | _TRUNCATE  # what a rule for a file, not a directory, may say


class _Attributes(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def available() -> int:
    """Return the version of Landlock that this kernel offers; 0 where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        return call_libc("syscall", _CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG)
    return 0


def restrict_writes(allowed: Iterable[str]) -> bool:
    """Let this thread, and whatever it starts, write only beneath ``allowed``; True when the kernel does that.

    Call it before there are other threads: they would not be restricted.
    """
    version = available()
    if not version:
        return False
    rights = _ABI_1 | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = _Attributes(rights)
    with contextlib.suppress(OSError):
        rules = call_libc("syscall", _CREATE, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0)
        try:
            for path in allowed:
                with contextlib.suppress(OSError):  # a path that is not there needs no rule
                    _allow(rules, path, rights)
            call_libc("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            call_libc("syscall", _RESTRICT_SELF, rules, 0)
            return True
        finally:
            os.close(rules)
    return False


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        granted = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
        call_libc("syscall", _ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(_PathBeneath(granted, descriptor)), 0)
    finally:
        os.close(descriptor)
