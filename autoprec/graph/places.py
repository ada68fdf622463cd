"""Which line of whose code is running: the innermost one that is neither PyTorch's, nor Python's, nor AutoPrec's."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from types import TracebackType

import torch

_HIDDEN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_PYTHON = os.path.dirname(os.__file__) + os.sep


@functools.cache
def _is_hidden(file: str) -> bool:
    return file.startswith((*_HIDDEN, "<")) or (file.startswith(_PYTHON) and not _is_installed(file))


@functools.cache
def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def is_library(file: str) -> bool:
    """Say whether a file is PyTorch's, Python's, AutoPrec's, or an installed library's, and no script."""
    return _is_hidden(file) or _is_installed(file)


def caller(*, own: bool = False) -> str:
    """Return ``file:line`` of the innermost frame of a script or of its libraries; empty where there is none.

    Args:
        own: rather the innermost frame of the script itself than one of an installed library.
    """
    frame, found = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_hidden(file):
            found = found or f"{file}:{frame.f_lineno}"
            if not own or not _is_installed(file):
                return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


def raised_at(trace: TracebackType | None) -> str:
    """Return ``file.py:line`` where an error was raised: in a script or its libraries, where one of them is on the way.

    A policy that a script does not fit fails below the script's line, in PyTorch's code or ours.
    """
    frames = [] if trace is None else traceback.extract_tb(trace)
    known = [frame for frame in frames if not _is_hidden(frame.filename)] or frames
    return f"{os.path.basename(known[-1].filename)}:{known[-1].lineno}" if known else ""
