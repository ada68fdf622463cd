"""Every error AutoPrec raises on purpose, in one tree.

::

    AutoPrecError                      exit 1
    ├── UsageError                     exit 2   the command line or a Python call is wrong
    │   ├── FileError                  exit 2   a file is missing, unreadable, malformed, or not writable
    │   │   ├── PolicyError            exit 2   a policy file or object is not valid
    │   │   └── SpaceError             exit 2   a search-space file is not valid
    │   ├── UnknownNameError           exit 2   an unknown name; carries the nearest valid one
    │   └── MissingDependencyError     exit 2   an optional package is needed; carries the pip line
    ├── PolicyMismatchError            exit 1   a policy does not fit the model it is applied to
    ├── UnsupportedError               exit 1   a backend cannot run what the policy asks, with the reason
    ├── AuditError                     exit 1   executed differs from requested
    ├── NothingAcceptableError         exit 3   no trial could be measured, or none is acceptable
    ├── ScriptError                    exit 4   the script failed before its first training step, or as it is written
    ├── StudyError                     exit 5   the study is locked or damaged
    ├── NoSpaceError                   exit 6   the disk is full
    └── SearchInterruptedError         exit 130 or 143   Ctrl-C or SIGTERM ended a search

Each says what went wrong, where, and how to fix it: ``str(error)`` is what a person reads. What a program reads is its
``code``: a word that stays the same when the sentence is reworded.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable

#: What stands between an error and its fix in its text.
FIX = "\n  fix: "
#: Bounds of the search for near misses: names in a file may be of any length and number.
LONGEST_NAME, MOST_NAMES = 200, 2000


#: Why nothing in a TorchScript model can be tuned, and what to do about it.
IN_TORCHSCRIPT = "a TorchScript model runs compiled code, in which no layer can be given another precision"
BEFORE_TORCHSCRIPT = "the model as it was before torch.jit.script or torch.jit.trace"


def nearest(name: str, valid: Iterable[str], limit: int = 1) -> list[str]:
    """Return up to ``limit`` valid names that look most like ``name``, best first.

    Args:
        name: what was typed.
        valid: what might have been meant.
        limit: most names to return.
    """
    if len(name) > LONGEST_NAME:  # not a typing error, and comparing takes time that grows with the square
        return []
    options = sorted(option for option in set(valid) if len(option) <= LONGEST_NAME)
    if len(options) > MOST_NAMES:
        options = sorted(heapq.nsmallest(MOST_NAMES, options, key=lambda option: abs(len(option) - len(name))))
    lowered = {option.lower(): option for option in options}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=limit, cutoff=0.5)
    return [lowered[key] for key in found]


class AutoPrecError(Exception):
    """Base of the tree: ``what`` happened, ``where``, how to ``fix`` it, and a ``code`` for programs.

    >>> import autoprec
    >>> try:
    ...     autoprec.load("missing.yaml")
    ... except autoprec.AutoPrecError as error:
    ...     print(error.code, error.where, error.what)
    policy missing.yaml no such file
    """

    exit_code = 1
    #: What kind of error this is; one raise may be more specific (``code=`` of the constructor).
    code = "failed"

    def __init__(self, what: str, *, where: str = "", fix: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix
        if code:
            self.code = code

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}{FIX}{self.fix}" if self.fix else head


class AutoPrecWarning(UserWarning):
    """A policy runs otherwise than it says; a trial's audit notes it."""


class UsageError(AutoPrecError):
    """The command line or a Python call is wrong."""

    code = "usage"
    exit_code = 2


class FileError(UsageError):
    """A file is missing, unreadable, malformed, or cannot be written."""

    code = "file"


class PolicyError(FileError):
    """A policy file or object is not valid."""

    code = "policy"


class SpaceError(FileError):
    """A search-space file is not valid."""

    code = "space"


class UnknownNameError(UsageError):
    """An unknown name; the message carries the nearest valid names."""

    code = "unknown-name"

    def __init__(self, kind: str, name: str, valid: Iterable[str], *, where: str = "") -> None:
        options = sorted(set(valid))
        close = nearest(name, options, limit=1)
        listed = ", ".join(options[:20]) + (", ..." if len(options) > 20 else "")
        fix = f"did you mean '{close[0]}'? " if close else ""
        super().__init__(f"unknown {kind} '{name}'", where=where, fix=f"{fix}valid: {listed}")
        self.kind, self.name, self.close = kind, name, close


class MissingDependencyError(UsageError):
    """An optional package is needed here and is not installed, or is too old."""

    code = "missing-package"


class PolicyMismatchError(AutoPrecError):
    """A policy does not fit the model it is applied to."""

    code = "mismatch"


class UnsupportedError(AutoPrecError):
    """A backend cannot run what the policy asks for; the message carries the reason."""

    code = "unsupported"


class AuditError(AutoPrecError):
    """What ran is not what was asked for."""

    code = "audit"


class NothingAcceptableError(AutoPrecError):
    """No trial could be measured, or nothing acceptable was found."""

    code = "nothing-acceptable"
    exit_code = 3


class ScriptError(AutoPrecError):
    """The script failed before its first training step, or as it is written, without a policy."""

    code = "script"
    exit_code = 4


class StudyError(AutoPrecError):
    """The study is locked by another process, damaged, or does not match this call."""

    code = "study"
    exit_code = 5


class NoSpaceError(AutoPrecError):
    """The disk is full."""

    code = "no-space"
    exit_code = 6


class SearchInterruptedError(AutoPrecError):
    """Ctrl-C (130) or SIGTERM (143) ended a search; everything finished is kept, and ``fix`` continues it."""

    code = "interrupted"
    exit_code = 130

    def __init__(self, what: str, *, fix: str, exit_code: int) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = exit_code
