"""Compile ``int8.c`` and ``product.c`` for this machine, once, and load them.

The library is kept in the user's cache folder, by the source, the compiler and the CPU's instructions: compiling takes
half a second, loading it a millisecond. Without a C compiler torch's own operators do the same, with the same results.
``torch.compile`` of these casts would do without a source file, but takes seconds in each process, and makes passes of
its own for magnitudes along columns.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from autoprec.precision.hardware import cpu_flags
from autoprec.support.files import cache_folder

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("int8.c", "product.c"))
# no -ffast-math: results are torch's, bit for bit
_OPTIONS = ("-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
#: Seconds after which a compiler of two short files hangs.
_TIMEOUT_S = 60.0


class Rule(ctypes.Structure):
    """How the scales of an operand are chosen: the largest code, the least magnitude, and powers of two only."""

    _fields_ = [("limit", ctypes.c_float), ("epsilon", ctypes.c_float), ("power_of_2", ctypes.c_int32)]


_POINTER, _SIZE, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_MATRIX = (_POINTER, _SIZE, _SIZE, _SIZE)
#: Arguments of the library's functions, in the order of their declarations in C.
_ARGUMENTS = {
    "whole": (*_MATRIX, Rule, _POINTER, _POINTER, _THREADS),
    "lines": (*_MATRIX, Rule, Rule, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _THREADS),
    "rescale": (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, ctypes.c_float, _THREADS),
    "narrow": (_POINTER, _SIZE, _POINTER, _THREADS),
    "product": (*(_POINTER, _SIZE, _SIZE) * 2, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _THREADS),
}


def compiler() -> str:
    """Return the C compiler: ``$CC``, else the first of cc, gcc and clang that is installed, else nothing."""
    wanted = os.environ.get("CC", "").strip()
    return next((found for name in (wanted, "cc", "gcc", "clang") if name and (found := shutil.which(name))), "")


def _options() -> list[tuple[str, ...]]:
    """Return the options to try, best first: with threads, and without where the compiler has no OpenMP."""
    limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper().startswith(("AVX2", "AVX_"))
    machine = "-march=x86-64-v3" if limited else "-mcpu=native" if os.uname().machine == "aarch64" else "-march=native"
    return [(*_OPTIONS, machine, "-fopenmp"), (*_OPTIONS, machine), _OPTIONS]


def _folder() -> Path | None:
    """Return a folder in which this user alone and its group write, or None: what lies in it is run."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    return folder if status.st_uid == os.getuid() and not status.st_mode & 0o002 else None


def _compile(with_what: str, file: Path) -> bool:
    for options in _options():
        handle, made = tempfile.mkstemp(suffix=".so", dir=file.parent)
        os.close(handle)
        try:
            command = [with_what, *options, "-o", made, *map(str, _SOURCES), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
            os.replace(made, file)  # whole, however many processes compile at once
            return True
        except (OSError, subprocess.SubprocessError):
            Path(made).unlink(missing_ok=True)
    return False


def _load(file: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(file))
        for name, arguments in _ARGUMENTS.items():
            for full in [f"{name}_fp32", f"{name}_bf16"] if name in ("whole", "lines") else [name]:
                if name == "product" and not hasattr(library, name):
                    continue  # a CPU without AVX2
                function = getattr(library, full)
                function.argtypes, function.restype = arguments, None
    except (OSError, AttributeError):
        return None
    return library


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None where they cannot be had: no compiler, or no folder to keep them in."""
    found = compiler() if sys.platform in ("linux", "darwin") else ""
    folder = _folder() if found else None
    if folder is None:
        return None
    sources = [source.read_text(encoding="utf-8") for source in _SOURCES]
    key = "|".join([*sources, found, *cpu_flags(), *(" ".join(o) for o in _options())])
    file = folder / f"int8-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if file.is_file() and (loaded := _load(file)) is not None:
        return loaded
    return _load(file) if _compile(found, file) else None
