"""A function that trains, written as a script: what a search runs when it is given a function.

A function that a new process can import is imported there. Any other (of a notebook, of the running script, a closure,
a ``partial``) is pickled by value with cloudpickle, with the globals that it uses, and loaded there. The script is an
ordinary one and stays: ``check``, ``run``, ``verify`` and ``search --resume`` take it as they take any.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from autoprec.errors import UsageError
from autoprec.support.files import write_atomic

_HEAD = '''\
"""{what}: written by autoprec.search."""

import sys

for folder in {folders!r}:
    if folder not in sys.path:
        sys.path.append(folder)

'''
_IMPORTED = """\
from {module} import {root}

{name}()
"""
_PICKLED = """\
import pickle
from pathlib import Path

# the caller's own function, by value, in a file that only its owner can read or write
with Path(__file__).with_suffix(".pkl").open("rb") as stream:
    train = pickle.load(stream)
train()
"""


def function_script(function: Callable[..., Any], folder: Path) -> Path:
    """Write a script that calls a function, and return its path: ``folder/<digest>/<name>.py``.

    Args:
        function: trains when it is called without arguments.
        folder: folder in which such scripts are kept; made when it is missing.

    Raises:
        UsageError: it is not a function, needs arguments, or holds what cannot be taken to another process.
    """
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__name__", "")
    _check(function, inner, name)
    stem = name if name.isidentifier() else "function"
    folders = [str(Path(entry).absolute()) for entry in sys.path if Path(entry or ".").is_dir()]
    module = _home(function)
    if module:
        what, body, data = f"Calls {name} of {module}", _IMPORTED, b""
    else:
        what, body, data = f"Calls the function {name}", _PICKLED, _pickled(function, name)
    root = getattr(function, "__qualname__", stem).partition(".")[0]
    text = _HEAD.format(what=what, folders=folders)
    text += body.format(module=module, root=root, name=getattr(function, "__qualname__", stem))
    place = folder / hashlib.sha256(text.encode() + data).hexdigest()[:8]
    if data:
        place.mkdir(parents=True, exist_ok=True)
        number = os.open(place / f"{stem}.pkl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(number, "wb") as stream:
            stream.write(data)
    return write_atomic(place / f"{stem}.py", text)


def _check(function: object, inner: object, name: str) -> None:
    """Refuse what cannot be called, or cannot be called without arguments."""
    kind = f"the class {name}" if isinstance(inner, type) else f"this {type(inner).__name__}"
    if isinstance(inner, type) or not callable(inner) or not hasattr(inner, "__name__"):
        raise UsageError(
            f"a search needs a script or a function that trains, not {kind}",
            fix="autoprec.search('train.py --lr 3e-4'), or autoprec.search(train) where train() trains the model",
        )
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner):
        raise UsageError(f"calling {name} trains nothing yet: it is a coroutine or a generator", fix="pass a function")
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of an extension module: calling it will tell
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        shown = ", ".join(f"{parameter}=..." for parameter in needed)
        raise UsageError(
            f"{name} cannot be called without arguments: it needs {', '.join(needed)}",
            fix=f"autoprec.search(functools.partial({name}, {shown}))",
        )


def _home(function: Any) -> str:
    """Return the module that a new process imports the function from, or an empty string."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "<>")
    if not module or module == "__main__" or "<" in path or not getattr(sys.modules.get(module), "__file__", None):
        return ""
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    return str(module) if found is function else ""


def _pickled(function: Callable[..., Any], name: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:  # whatever an object says that refuses to be pickled
        raise UsageError(
            f"{name} cannot be taken to another process: {error}",
            fix="make what it names inside the function, or put the function into a module that can be imported",
        ) from error
