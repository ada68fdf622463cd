"""What a training command is made of: the script, what it imports from its own folder, and configuration it names.

A study is continued only while these say what they said, for its reference was measured with them. A Python file is
compared by its syntax tree, so that a comment or another line break makes no other script.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from autoprec.trial.command import ScriptCommand

_CONFIGURATION = frozenset((".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg"))
#: Files of a script that are digested, and bytes of each: more are an installed library, or data.
_MOST_FILES, _MOST_BYTES = 1000, 4 << 20


def source_digests(command: ScriptCommand) -> dict[str, str]:
    """Return a digest of every file of a command, by its name relative to the working directory.

    Found are the script (or module), modules and packages that it imports from beside itself, theirs in turn, and
    existing files among the arguments that look like configuration. What is imported by a computed name is not found.
    """
    start = _start(command)
    folder = start.parent if start is not None and command.kind != "module" else command.cwd.absolute()
    sources = imported_sources(start, folder) if start is not None else {}
    found = {path: ast.dump(tree).encode() if tree is not None else text for path, (text, tree) in sources.items()}
    for path in _named(command):
        if path not in found and (text := _read(path)) is not None:
            found[path] = text
    cwd = command.cwd.absolute()
    return {shown_from(cwd, path): hashlib.sha256(data).hexdigest()[:16] for path, data in sorted(found.items())}


def imported_sources(script: Path, folder: Path) -> dict[Path, tuple[bytes, ast.Module | None]]:
    """Return a script and what it imports from a folder, theirs in turn: text, and tree (None where it has none)."""
    found: dict[Path, tuple[bytes, ast.Module | None]] = {}
    waiting = [script]
    while waiting and len(found) < _MOST_FILES:
        path = waiting.pop(0)
        if path not in found and (text := _read(path)) is not None:
            found[path] = text, (tree := _parsed(text))
            waiting += [] if tree is None else _imported(tree, path, folder)
    return found


def _start(command: ScriptCommand) -> Path | None:
    cwd = command.cwd.absolute()
    if command.kind == "module":
        return next(_files(cwd, command.target.split("."), main=True), None)
    words = [command.target] if command.kind == "script" else command.args
    scripts = (cwd / word for word in words if command.kind == "script" or word.endswith(".py"))
    return next((path for path in scripts if path.is_file()), None)


def _files(folder: Path, parts: list[str], *, main: bool = False) -> Iterator[Path]:
    """Yield the files that importing ``a.b.c`` from a folder runs; with ``main`` only the one that ``-m`` runs."""
    if main:
        base = folder.joinpath(*parts)
        candidates = [base.with_name(base.name + ".py"), base / "__main__.py"]
    else:
        bases = [folder.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
        candidates = [path for base in bases for path in (base.with_name(base.name + ".py"), base / "__init__.py")]
    yield from (path for path in candidates if path.is_file())


def _imported(tree: ast.AST, path: Path, folder: Path) -> list[Path]:
    out: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                out += _files(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                out += _files(base, [*parts, alias.name])
    return out


def _named(command: ScriptCommand) -> Iterator[Path]:
    for word in command.args:
        path = command.cwd.absolute() / re.sub(r"^-[-\w]*=", "", word)
        if path.suffix in _CONFIGURATION and len(word) < 1000 and path.is_file():
            yield path


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
    except OSError:
        return None
    return text if len(text) <= _MOST_BYTES else None


def _parsed(text: bytes) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def shown_from(folder: Path, path: Path) -> str:
    """Return a path relative to a folder where it lies below it, else as it is."""
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()
