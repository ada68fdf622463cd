"""Keep a trial from changing anything of the user's, from the first line of the script on.

Where the kernel lets us, it lays a copy over the user's directories for the trial and whatever it starts
(``namespace``). Elsewhere, and for the rest of the disk, there are three nets, each for what the one before lets
through: an overlay under Python's own calls, wrapped savers for libraries that open files in C, and the kernel's
Landlock, which refuses what shells and everything else would write. Standard library only: it starts with the
interpreter, before the script and before torch.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autoprec.trial.environment import MLFLOW_STORE
from autoprec.trial.inside.isolate import landlock, namespace, overlay_calls, savers
from autoprec.trial.inside.isolate.overlay import Overlay, free_prefixes, kind, make_caches, real
from autoprec.trial.inside.isolate.sharing import open_files, reopen
from autoprec.trial.inside.patching import wrapped
from autoprec.trial.processes import MADE

#: The layers of this process, top first, for the processes that it starts: they must see what it wrote.
_LAYERS_VARIABLE = "AUTOPREC_TRIAL_LAYERS"
#: The directories that the kernel lays a copy over, for the processes that this one starts; empty where it cannot.
_MOUNTED_VARIABLE = "AUTOPREC_TRIAL_MOUNTED"
_state: dict[str, Any] = {"overlay": None, "mounts": None, "programs": set(), "temporary": set(), "made": set()}
#: Names in the temporary directory that several processes share on purpose.
_KEPT = ("autoprec-", "torchinductor_", "sem.", "__KMP_")
#: Programs whose work is to write files.
_WRITERS = re.compile(r"(?:(?:ba)?sh|rm|mv|cp|mkdir|rmdir|ln|touch|tee|sed|tar|(?:un|g)?zip|rsync|dd|wget|curl)$")


def isolate(config: dict[str, Any]) -> Overlay:
    """Isolate this process, once, and return the overlay.

    ``config`` names our ``private`` directory and the launcher's ``folder`` around it, the ``run_dir`` of the logs, the
    script's ``cwd`` and its path.
    """
    if _state["overlay"] is not None:
        return _state["overlay"]  # type: ignore[no-any-return]
    cwd = str(config["cwd"])
    guarded = [cwd]
    if config.get("script"):
        guarded.append(os.path.dirname(os.path.abspath(os.path.join(cwd, str(config["script"])))))
    folder = str(config.get("folder") or config["private"])
    ours = [folder, str(config["private"]), str(config["run_dir"])]
    layer = os.path.join(str(config["private"]), f"overlay-{os.getpid()}")
    below = [path for path in os.environ.get(_LAYERS_VARIABLE, "").split(os.pathsep) if path and os.path.isdir(path)]
    if below:
        layer, *below = below
    os.makedirs(layer, exist_ok=True)
    make_caches()
    temporary, kept = os.path.abspath(tempfile.gettempdir()), [*guarded, os.path.expanduser("~")]
    free = temporary in free_prefixes(guarded)
    inside = not free or any(path.startswith(temporary + os.sep) for path in kept)
    cache = _compiler_cache() if inside and free else ""
    if mounted := _mounted(guarded, ours, layer):
        overlay = Overlay(layer, [], [*mounted, *ours], below)
        overlay.mounted = mounted
    else:
        crowded, beside = _split(free_prefixes(guarded), kept)
        if inside:
            _own_temporary_directory(folder, cache)
        overlay = Overlay(layer, [*crowded, *guarded], [*beside, *ours], below)
        writable = [*(free_prefixes(guarded) - set(crowded)), *beside, *ours]
        if sys.platform == "linux":
            landlock.restrict_writes(writable)
    # all trials give their runs the same ids
    overlay.guard([os.path.join(str(config["private"]), MLFLOW_STORE)])
    if not mounted:
        _watch_programs()
    _note_temporary_directories(os.path.join(folder, MADE))
    _state["overlay"], _state["temporary"] = overlay, _temporary_files()
    os.environ[_LAYERS_VARIABLE] = os.pathsep.join(overlay.layers)
    savers.install(overlay)
    overlay_calls.install(overlay)
    return overlay


def programs() -> list[str]:
    """Return the programs that the script has started and that could not work on a copy of the user's files."""
    return sorted(_state["programs"])


def _watch_programs() -> None:
    """Note what the script starts that usually writes files; it is refused that, and the user shall know beforehand."""

    def start(original: Any, process: Any, args: Any, *rest: Any, **named: Any) -> None:
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)[:1]
        name = os.path.basename(os.fsdecode(words[0]).split(" ")[0]) if words else ""
        if named.get("shell") or _WRITERS.match(name):
            _state["programs"].add(name)
        original(process, args, *rest, **named)

    def system(original: Any, command: Any) -> Any:
        _state["programs"].add(os.path.basename(os.fsdecode(command).split(" ")[0]))
        return original(command)

    subprocess.Popen.__init__ = wrapped(subprocess.Popen.__init__, start)  # type: ignore[method-assign]
    os.system = wrapped(os.system, system)


def _note_temporary_directories(file: str) -> None:
    """List the temporary directories that the script makes; the driver removes them, for the script is killed."""

    def noted(make: Any, *args: Any, **named: Any) -> Any:
        path = make(*args, **named)
        if os.path.dirname(os.fsdecode(path)) == os.path.abspath(tempfile.gettempdir()):
            with contextlib.suppress(OSError):
                listed = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.write(listed, os.fsencode(path) + b"\n")
                os.close(listed)
        return path

    tempfile.mkdtemp = wrapped(tempfile.mkdtemp, noted)


def _mounted(guarded: list[str], ours: list[str], layer: str) -> tuple[str, ...]:
    """Return the directories over which the kernel lays a copy for this process; empty where it cannot."""
    if _MOUNTED_VARIABLE in os.environ:  # the process that started this one has settled it
        return tuple(path for path in os.environ[_MOUNTED_VARIABLE].split(os.pathsep) if path)
    mounts = namespace.enter(guarded, [*free_prefixes(guarded), *ours], _mounts_of(layer))
    _state["mounts"] = mounts
    mounted = mounts.guarded if mounts is not None else ()
    os.environ[_MOUNTED_VARIABLE] = os.pathsep.join(mounted)
    return mounted


def _mounts_of(layer: str) -> str:
    """Return where the layers of mounts lie, beside what the overlay in Python keeps."""
    return os.path.join(layer, ".mounts")


def before_forks() -> None:
    """Note what this process has made among the temporary files, before its forks put theirs beside it."""
    _state["made"] = _temporary_files() - _state["temporary"] if _state["overlay"] is not None else set()


def add_layer(overlay: Overlay, folder: Path) -> None:
    """From now on this process writes into a layer of its own (a fork must not write into its parent's).

    What its parent had made among the temporary files (:func:`before_forks`) is read from there and not changed
    either: a trial that fails leaves the script's ``with TemporaryDirectory()``, which removes the directory.
    """
    files, made = open_files(overlay), set(_state["made"])
    folder.mkdir()
    if _state["mounts"] is not None:
        os.mkdir(_mounts_of(str(folder)))
        folders = {path for path in made if kind(path) == stat.S_IFDIR}
        _state["mounts"].push(_mounts_of(str(folder)), sorted(folders.difference(overlay.mounted)))
        overlay.mounted = _state["mounts"].guarded
        made -= folders
    overlay.guard(made)
    overlay.push(str(folder))
    os.environ[_LAYERS_VARIABLE] = os.pathsep.join(overlay.layers)
    reopen(files, overlay)


def add_layer_of_probe() -> None:
    """In a fork of a trial: what :func:`add_layer` does, where this process is isolated at all."""
    overlay: Overlay | None = _state["overlay"]
    if overlay is not None:
        add_layer(overlay, Path(f"{overlay.layers[0]}-{os.getpid()}"))


def _temporary_files() -> set[str]:
    """Return what is in the temporary directories now, without what AutoPrec and the compiler keep there."""
    found: set[str] = set()
    for folder in {tempfile.gettempdir(), "/tmp", "/dev/shm"}:
        with contextlib.suppress(OSError):
            found |= {os.path.join(folder, name) for name in real["listdir"](folder) if not name.startswith(_KEPT)}
    return found


def _compiler_cache() -> str:
    """Return the directory in which torch.compile keeps what it has compiled by default; empty where there is none."""
    try:
        name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        path = os.path.join(tempfile.gettempdir(), name)
        os.makedirs(path, exist_ok=True)
    except (OSError, KeyError):
        return ""
    return path


def _own_temporary_directory(folder: str, cache: str) -> None:
    """The user works inside the temporary directory: trials get one of their own, and share the compiler's cache."""
    own = os.path.join(folder, "tmp")
    os.makedirs(own, exist_ok=True)
    if cache:
        with contextlib.suppress(FileExistsError):
            os.symlink(cache, os.path.join(own, os.path.basename(cache)))
    tempfile.tempdir = os.environ["TMPDIR"] = own


def _split(free: Iterable[str], guarded: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the free directories that hold a guarded one, and what lies beside the guarded ones in them.

    A user may work in ``/tmp/project``: then ``/tmp`` is guarded too, and each other entry that is in it now is free.
    """
    crowded: list[str] = []
    beside: list[str] = []
    chains = [os.path.abspath(path) for path in guarded]
    todo = sorted(path for path in free if any(chain.startswith(path + os.sep) for chain in chains))
    while todo:
        path = todo.pop()
        crowded.append(path)
        try:
            entries = [os.path.join(path, name) for name in os.listdir(path)]
        except OSError:
            continue
        for entry in entries:
            if entry in chains:
                continue
            if any(chain.startswith(entry + os.sep) for chain in chains):
                todo.append(entry)
            else:
                beside.append(entry)
    return crowded, beside
