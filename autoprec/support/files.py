"""Files: atomic writes, advisory locks, and bounded, data-only reading of YAML and JSON.

Promise: loading a document never imports or runs code, never follows YAML aliases, never reads more than
``MAX_BYTES``, and never nests deeper than ``MAX_DEPTH``; every write is temp file + fsync + rename + directory fsync.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from autoprec.errors import MOST_NAMES, AutoPrecError, FileError, NoSpaceError, StudyError, nearest
from autoprec.support.safe_yaml import MAX_DEPTH, parse_yaml

#: No document that a person writes is as long; those that may be (a recorded step) say their own limit.
MAX_BYTES = 4 * 1024 * 1024
#: What SQLite and other readers of JSON take as an integer.
MAX_INTEGER = 2**63
#: What a file may hold instead of a mapping, for people.
_PLAIN_WORDS = {list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sqlite_url(path: Path) -> str:
    """Return the SQLAlchemy URL of a database file, whatever its folder is called.

    Only what has a meaning in a URL (or in a template, which Optuna takes it for) is quoted.
    """
    return f"sqlite:///{re.sub('[?%#{}]', lambda found: f'%{ord(found[0]):02X}', str(path.resolve()))}"


def finite(value: Any) -> Any:
    """Return a copy that strict JSON can hold: NaN and infinities become None, tuples lists, keys text."""
    return json.loads(json.dumps(value), parse_constant=lambda _constant: None)


def cache_folder() -> Path:
    """Return where what was built for this machine is kept (``$XDG_CACHE_HOME/autoprec``)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # stays as it is where neither HOME nor the list of users knows this one
    here = Path(tempfile.gettempdir()) if home == "~" else Path(home) / ".cache"
    return (Path(base) if base and Path(base).is_absolute() else here) / "autoprec"


def resource_error(error: BaseException, where: str) -> AutoPrecError | None:
    """Return the error of a full disk, a quota, a limit of file sizes or of open files; None where it is another."""
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return AutoPrecError("too many open files", where=where, fix="raise the limit: `ulimit -n 4096`")
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "free some space, or raise the limit (`ulimit -f unlimited`); what was written before is intact"
        return NoSpaceError("no space left on the device", where=where, fix=fix)
    return None


@contextlib.contextmanager
def _space_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (known := resource_error(error, str(path))) is not None:
            raise known from error
        why = error.strerror or type(error).__name__
        raise FileError(f"cannot write: {why}", where=str(path), fix="choose a writable path") from error


def _written_to(path: Path) -> Path | None:
    """Return the regular file behind a path, existing or to be made; None for a device, a FIFO or an open descriptor.

    Raises:
        FileError: the path is a directory, or a circle of links.
    """
    try:
        found = path.stat()  # follows links
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(found.st_mode):
        raise FileError("this is a directory, not a file", where=str(path), fix="name a file, e.g. policy.yaml")
    last = Path(os.path.abspath(path))
    while last.is_symlink():
        last = Path(os.path.realpath(last.parent), os.readlink(last))
    if not stat.S_ISREG(found.st_mode) or os.path.realpath(last.parent).startswith("/proc/"):
        return None  # /dev/null, a FIFO, or /dev/stdout, whatever that leads to
    return Path(os.path.realpath(path))


def write_atomic(path: Path | str, text: str) -> Path:
    """Write a text file so that a reader, or a crash at any moment, sees the old file or the new one, never a part.

    A link is followed; a file that is there keeps its permissions, a new one gets those of the umask; what is not a
    regular file (``/dev/stdout``, a FIFO) is written to as it is.

    Raises:
        NoSpaceError: the device is full; the old file is intact.
        FileError: the directory cannot be written.
    """
    path = Path(path)
    with _space_errors(path):
        target = _written_to(path)
        if target is None:
            with path.open("w", encoding="utf-8") as stream:
                stream.write(text)
            return path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    return path


def write_json(path: Path | str, value: Any, *, indent: int | None = 1) -> Path:
    """Write a JSON document atomically (NaN and infinity are refused).

    Args:
        path: of the file; folders above it are made.
        value: plain data.
        indent: spaces per level; None writes one line.
    """
    return write_atomic(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def checksum(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of plain data, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_checksum(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of plain data with its own checksum beside its other keys."""
    return {**document, "checksum": checksum(document)}


def without_checksum(document: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return the document that :func:`with_checksum` was given.

    Raises:
        FileError: it has no checksum, or another one: the contents are not those that were written.
    """
    rest = {key: value for key, value in document.items() if key != "checksum"}
    if document.get("checksum") != checksum(rest):
        raise FileError("is damaged: its checksum does not match its contents", where=where)
    return rest


def check_writable(path: Path | str) -> Path:
    """Find out now, not after an hour, whether ``path`` can be written; nothing is made or changed.

    Raises:
        FileError: it is a directory, or its directory does not exist or cannot be written.
    """
    path = Path(path)
    with _space_errors(path):
        target = _written_to(path)
        if target is not None:
            if not target.parent.exists():  # a mistyped path would otherwise become folders
                fix = f"name another with --output, or: mkdir -p {shlex.quote(str(target.parent))}"
                raise FileError("its folder does not exist", where=str(path), fix=fix, code="no-folder")
            handle, probe = tempfile.mkstemp(dir=target.parent, prefix=".autoprec-probe-")
            os.close(handle)
            os.unlink(probe)
    if path.exists() and not os.access(path, os.W_OK):
        raise FileError("this file exists and is read-only", where=str(path), fix="choose another path with --output")
    return path


def check_kind(path: Path | str, what: str, ours: Callable[[str], bool], *, option: str = "--output") -> Path:
    """Find out early whether ``path`` can be written, and that nothing but a file of the same kind would be replaced.

    An empty file may be replaced.

    Args:
        path: where something will be written.
        what: what that is, e.g. ``an audit``.
        ours: says of a file's text whether it is one; it may raise ValueError or FileError where it is not.
        option: which option names the path.

    Raises:
        FileError: it cannot be written, or holds something else, such as a training script.
    """
    path = check_writable(path)
    if not path.is_file() or not path.stat().st_size:
        return path
    with contextlib.suppress(FileError, ValueError, RecursionError):
        if ours(read_text(path)):
            return path
    raise FileError(
        f"this file exists and is not {what}: it is not replaced by one",
        where=str(path),
        fix=f"choose another path with {option}",
    )


def holds_keys(*keys: str) -> Callable[[str], bool]:
    """Return what says whether a text is a JSON object with these keys."""

    def holds(text: str) -> bool:
        document = json.loads(text)
        return isinstance(document, dict) and document.keys() >= set(keys)

    return holds


@contextlib.contextmanager
def file_lock(path: Path | str, *, what: str = "study") -> Iterator[None]:
    """Hold an exclusive ``flock`` for the duration; the kernel frees it when the holder dies, however it dies.

    Raises:
        StudyError: another process holds it; the message names it.
        FileError: the file cannot be made, or its file system has no locks.
    """
    path = Path(path)
    with _space_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 256, 0).decode("utf-8", "replace").strip() or "another process"
            raise StudyError(
                f"this {what} is in use by {holder}",
                where=str(path),
                fix="wait for it, stop it, or use another --study name",
            ) from error
        except OSError as error:  # a network file system that is mounted without locks
            raise FileError(
                f"cannot be locked: {error.strerror or error}",
                where=str(path),
                fix="this file system has no file locks: run in a folder of another one, such as a local disk",
            ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(handle)


def _check_plain(value: Any, where: str, depth: int = 0, *, may_be_infinite: bool = False) -> None:
    if depth > MAX_DEPTH:
        raise FileError(f"nested deeper than {MAX_DEPTH}", where=where)
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, where, depth + 1)
            _check_plain(item, where, depth + 1, may_be_infinite=may_be_infinite)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, where, depth + 1, may_be_infinite=may_be_infinite)
    elif isinstance(value, float) and not (may_be_infinite or math.isfinite(value)):
        raise FileError(f"{value} is not a finite number", where=where, fix="write a finite number")
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which JSON can spell and no file can hold
            raise FileError("holds text that is not Unicode", where=where, fix="correct the escape") from None
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= MAX_INTEGER:
        raise FileError("an integer does not fit into 64 bits", where=where, fix="write a smaller number")
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise FileError(f"a value of type {type(value).__name__} is not plain data", where=where)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key '{key}' appears twice")
        out[key] = value
    return out


def parse_document(
    text: str, *, where: str = "document", most_bytes: int = MAX_BYTES, may_be_infinite: bool = False
) -> dict[str, Any]:
    """Parse a YAML or JSON mapping as plain data.

    Args:
        text: of the file; a byte order mark is skipped.
        where: the file, for messages.
        most_bytes: of the text.
        may_be_infinite: numbers may be infinite or NaN, as other programs write them.

    Raises:
        FileError: too large, malformed, aliased, nested too deep, not a mapping, or holding a non-finite number.
    """
    if len(text) > most_bytes:
        raise FileError(f"larger than {most_bytes} bytes", where=where, fix="is it the right file?")
    text = text.removeprefix("\ufeff")
    try:
        if text.lstrip()[:1] in ("{", "["):
            value = json.loads(text, object_pairs_hook=_refuse_duplicates)
        else:
            value = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = _problem(error)
        raise FileError(f"cannot be read as YAML or JSON: {first}", where=where, fix="correct the file") from error
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds {_PLAIN_WORDS.get(type(value), 'a single value')}"
        raise FileError(f"{found}, not a mapping of keys", where=where, fix="is it the right file?")
    _check_plain(value, where, may_be_infinite=may_be_infinite)
    return value


def _problem(error: Exception) -> str:
    """Return what is wrong with a text, and in which line: the parser does not know the file's name."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return " ".join(str(error).split())[:300]
    parts = filter(None, (getattr(error, "context", ""), getattr(error, "problem", "")))
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(' '.join(parts).split())[:300]}"


def _look_alike(path: Path) -> str:
    """Return how to correct a path where no file is: the nearest name in its folder, of its own kind if there is one.

    An ending that all names share says nothing, so it is left out of the comparison.
    """
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        files = sorted(entry.name for entry in itertools.islice(entries, MOST_NAMES) if entry.is_file())
        for kind in (path.suffix, ""):
            stems = {Path(name).stem: name for name in files if name.endswith(kind)}
            if close := nearest(path.stem, stems):
                return f"did you mean '{path.with_name(stems[close[0]])}'?"
    return "check the path"


def keep_earlier(path: Path, known: Path) -> Path | None:
    """Copy a file aside (``policy.yaml.1``, ``.2``, ...) before it is overwritten, and return the copy.

    Args:
        known: a file with content that may be lost, our own earlier one: None is returned then, or where no file is.
    """
    if not path.is_file():
        return None
    earlier = path.read_bytes()
    if known.is_file() and known.read_bytes() == earlier:
        return None
    copy = next(p for n in itertools.count(1) if not (p := path.with_name(f"{path.name}.{n}")).exists())
    shutil.copy2(path, copy)
    return copy


def read_text(path: Path | str, *, most_bytes: int = MAX_BYTES) -> str:
    """Read a UTF-8 file of bounded size.

    Raises:
        FileError: missing, unreadable, larger than ``most_bytes``, or not UTF-8.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise FileError(f"larger than {most_bytes} bytes", where=str(path), fix="is it the right file?")
        return raw.decode("utf-8")
    except FileNotFoundError as error:
        raise FileError("no such file", where=str(path), fix=_look_alike(path)) from error
    except UnicodeDecodeError as error:
        raise FileError("is not UTF-8 text", where=str(path), fix="is it the right file?") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
        raise FileError(f"cannot be read: {why}", where=str(path), fix="check the path") from error


def read_document(path: Path | str, *, most_bytes: int = MAX_BYTES, may_be_infinite: bool = False) -> dict[str, Any]:
    """Read a YAML or JSON file as plain data; see :func:`read_text` and :func:`parse_document`.

    Args:
        path: of the file.
        most_bytes, may_be_infinite: see :func:`parse_document`.
    """
    text = read_text(path, most_bytes=most_bytes)
    return parse_document(text, where=str(path), most_bytes=most_bytes, may_be_infinite=may_be_infinite)
