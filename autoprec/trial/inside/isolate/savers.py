"""Libraries that open files by themselves: given the trial's own path, or, for uploads, nothing to do.

``torch.save``, safetensors, sqlite3 and the like hand a path to C, C++ or Rust, where the overlay does not reach. Each
is wrapped, now or right after its module is imported, so that the path it gets is the one in the trial's layer: what
was saved can be loaded again in the same trial. Uploads and event files of loggers do nothing. Nothing imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from autoprec.trial.inside.isolate.overlay import Overlay, real
from autoprec.trial.inside.patching import Wanted, after_import

#: What a trial does not do at all: uploads, and the event files of loggers.
SILENT: tuple[tuple[str, str], ...] = (
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter.add_event"),
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter.flush"),
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter.close"),
    ("tensorboardX.event_file_writer", "EventFileWriter.add_event"),
    ("tensorboardX.event_file_writer", "EventFileWriter.flush"),
    ("tensorboardX.event_file_writer", "EventFileWriter.close"),
    ("transformers.utils.hub", "PushToHubMixin.push_to_hub"),
    ("huggingface_hub", "upload_folder"),
    ("huggingface_hub", "upload_file"),
    ("huggingface_hub", "create_repo"),
)
#: ``module, attribute, position of the path, its keyword, mode``. Modes: ``r`` reads, ``w`` writes, ``a`` changes what
#: is there, ``d`` is a directory to write into.
PATHS: tuple[tuple[str, str, int, str, str], ...] = (
    ("torch", "save", 1, "f", "w"),
    ("torch", "load", 0, "f", "r"),
    ("torch", "from_file", 0, "filename", "a"),
    ("torch.jit", "save", 1, "f", "w"),
    ("torch.jit", "load", 0, "f", "r"),
    ("safetensors", "safe_open", 0, "filename", "r"),
    ("safetensors.torch", "save_file", 1, "filename", "w"),
    ("safetensors.torch", "load_file", 0, "filename", "r"),
    ("safetensors.numpy", "save_file", 1, "filename", "w"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase.save_pretrained", 1, "save_directory", "d"),
    ("sqlite3.dbapi2", "connect", 0, "database", "a"),
    ("sqlite3", "connect", 0, "database", "a"),
    ("h5py._hl.files", "File.__init__", 1, "name", "a"),
    ("pyarrow.parquet", "write_table", 1, "where", "w"),
    ("pyarrow.parquet", "read_table", 0, "source", "r"),
    ("soundfile", "write", 0, "file", "w"),
    ("soundfile", "read", 0, "file", "r"),
    ("cv2", "imwrite", 0, "filename", "w"),
    ("cv2", "imread", 0, "filename", "r"),
)
#: A trial may save this much; a checkpoint at every step would fill the disk, and nobody loads all of them again.
MAX_SAVED_BYTES = 8 << 30
#: What is left to the others that use the disk, whatever a trial would save.
MIN_FREE_BYTES = 2 << 30

#: How often something was asked for and not done, by name, in this process.
suppressed: dict[str, int] = {}
_saved = {"bytes": 0}


class _Charge:
    """Who is told the CPU seconds that saving took: it is not part of a training step."""

    to: Callable[[float], None] = staticmethod(lambda _seconds: None)


charge = _Charge()


def remarks() -> str:
    """Say what this trial did not do that the script asked for; empty when nothing was left out."""
    return ", ".join(f"{name} ({count} times)" for name, count in sorted(suppressed.items()))


def _count(label: str) -> None:
    suppressed[label] = suppressed.get(label, 0) + 1


def _nothing(original: Any, label: str) -> Callable[..., None]:
    @functools.wraps(original)
    def silent(*_args: Any, **_kwargs: Any) -> None:
        _count(label)

    return silent


def _with_path(original: Any, label: str, overlay: Overlay, at: int, keyword: str, mode: str) -> Callable[..., Any]:
    """Wrap a function so that the path among its arguments is where the overlay has it."""

    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        given = args[at] if len(args) > at else kwargs.get(keyword)
        found = overlay.locate(given) if isinstance(given, (str, bytes, os.PathLike)) else None
        if found is None or given in (":memory:", ""):
            return original(*args, **kwargs)
        absolute, guarded = found
        if not guarded:
            if label.startswith("sqlite3."):
                _make_own(absolute, overlay)
            kept = mode == "w" and any(absolute.startswith(f"{folder}/") for folder in overlay.mounted)
            return _save(original, label, absolute, args, kwargs) if kept else original(*args, **kwargs)
        if kwargs.get("uri") and str(given).startswith("file:"):
            place = _place_of_uri(overlay, str(given), mode)
        else:
            place = _place(overlay, absolute, mode)
        if len(args) > at:
            args = (*args[:at], place, *args[at + 1 :])
        else:
            kwargs[keyword] = place
        if mode != "w":
            return original(*args, **kwargs)
        return _save(original, label, str(place), args, kwargs)

    return redirected


#: Databases that are the trial's own.
_owned: set[str] = set()


def _make_own(path: str, overlay: Overlay) -> None:
    """Put a copy of the user's database in its place, where the kernel lays layers over each other.

    SQLite refuses to write a file whose inode is not the one it opened. The kernel's own copy of a file that is opened
    for writing has the user's inode, until the next layer lies above it: in every trial forked from there.
    """
    if path in _owned or not any(path.startswith(f"{folder}/") for folder in overlay.mounted):
        return
    _owned.add(path)
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            beside = f"{path}.autoprec"
            shutil.copy2(path, beside)
            os.replace(beside, path)


def _place(overlay: Overlay, absolute: str, mode: str) -> str:
    if mode == "r":
        return overlay.seen(absolute)
    if mode == "d":
        os.makedirs(absolute, exist_ok=True)
        return overlay.folder(absolute)
    return overlay.writable(absolute, keep=mode == "a")


def _place_of_uri(overlay: Overlay, uri: str, mode: str) -> str:
    """Return SQLite's ``file:PATH?mode=...`` with the path where the overlay has it."""
    path, mark, query = uri.removeprefix("file:").partition("?")
    path = unquote(path)
    absolute = overlay.guarded(path.removeprefix("//") if path.startswith("///") else path) if path else None
    if absolute is None or path == ":memory:" or "mode=memory" in query:
        return uri
    reads = "mode=ro" in query or "immutable=1" in query
    return f"file:{quote(_place(overlay, absolute, 'r' if reads else mode))}{mark}{query}"


def _save(original: Any, label: str, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    disk = real["statvfs"](os.path.dirname(place))
    free = disk.f_bavail * disk.f_frsize
    if _saved["bytes"] > MAX_SAVED_BYTES or free < MIN_FREE_BYTES:
        return _count(label)
    began = time.process_time()
    try:
        return original(*args, **kwargs)
    except Exception as error:
        # A layer under a policy has a class made for it, which cannot be pickled by name: that is our doing.
        # (By the error's name: nothing of AutoPrec imports pickle.)
        if label != "torch.save" or type(error).__name__ not in ("PicklingError", "AttributeError", "TypeError"):
            raise
        with contextlib.suppress(OSError):
            os.remove(place)
        return _count(label)
    finally:
        charge.to(time.process_time() - began)
        with contextlib.suppress(OSError):
            _saved["bytes"] += os.path.getsize(place)


def _wrap(module: Any, path: str, make: Callable[[Any], Any]) -> None:
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part, None)
    original = getattr(owner, name, None)
    if callable(original):
        with contextlib.suppress(TypeError):  # a type of an extension module cannot be changed
            setattr(owner, name, make(original))


def install(overlay: Overlay) -> None:
    """Wrap every function of :data:`SILENT` and :data:`PATHS`, now or when its module is imported."""
    wanted: Wanted = {}
    for module, attribute in SILENT:
        silence = functools.partial(_nothing, label=f"{module}.{attribute}")
        wanted.setdefault(module, []).append(functools.partial(_wrap, path=attribute, make=silence))
    for module, attribute, at, keyword, mode in PATHS:
        label = f"{module}.{attribute}"
        redirect = functools.partial(_with_path, label=label, overlay=overlay, at=at, keyword=keyword, mode=mode)
        wanted.setdefault(module, []).append(functools.partial(_wrap, path=attribute, make=redirect))
    after_import(wanted)
