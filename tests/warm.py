"""Scripts in forks of this process: PyTorch is imported once for all of them, where a new process takes 5 s for it.

Nothing else differs for a script: its own session, arguments, environment, folder and output, and only its own
objects. What real processes do (injection, launch modes, launchers) is tested with real ones.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, SimpleNamespace
from typing import NoReturn

import pytest

from autoprec.trial.driver.process_tree import NewProcess, ProcessTree
from autoprec.trial.inside.isolate import overlay_calls
from autoprec.trial.progress import Deadline
from tests import heap

__all__ = ["Ended", "Forked", "run_forked", "run_ranks", "warm_scripts"]

#: What any first optimizer imports, and what the hooks and a trial do: imported once here, not in every fork.
WARM = (
    "torch._dynamo",
    "torch.utils.cpp_extension",
    "autoprec.trial.inside.agent",
    "autoprec.trial.inside.fork_server",
    "autoprec.trial.inside.isolate.isolation",
    "autoprec.trial.inside.forked_duel",
    "autoprec.trial.inside.sensitivity.replay",
    "autoprec.applying.audit",
    "autoprec.applying.policy",
    "autoprec.backends.emulated",
    "autoprec.graph.fake",
    "autoprec.graph.trace",
    "autoprec.graph.saved",
    "autoprec.graph.analysis.rules",
    "autoprec.optim.audit",
    "autoprec.optim.optimizer",
)
#: What DDP, FSDP2 and tensor parallelism import, the compiler among it: each rank would for itself, in 3 s.
WARM_RANKS = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)


def warm_up(*more: str) -> None:
    """Import what every script would, and some ``more``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own deprecations
        for name in (*WARM, *more):
            importlib.import_module(name)


def keepers() -> list[dict[str, object]]:
    """Return what the overlay looks for in a fork; asked for before that."""
    return _keepers(len(sys.modules))


@functools.lru_cache(1)
def _keepers(_modules: int) -> list[dict[str, object]]:
    """Return the names of every module that holds a function of ``os`` or ``open``, as the overlay asks for them.

    In each fork the collector would go through all objects of the tests for that: half of what a script took. Found
    before a fork, since whoever looks at an object copies its page, and again where there are more modules.
    """
    functions = {id(value) for value in (*vars(os).values(), open) if isinstance(value, BuiltinFunctionType)}
    modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return [names for names in modules if any(id(value) in functions for value in list(names.values()))]


class ForkedScript(ProcessTree):
    """Runs ``python script.py args`` in a fork of this process, or in as many forks of it as there are ranks."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, mark: str, log: Path | None, ranks: int = 0
    ) -> None:
        reader, writer = os.pipe()
        if ranks:
            warm_up(*WARM_RANKS)
        known = keepers()
        self.pid = os.fork()
        if self.pid == 0:
            overlay_calls.referrers = lambda _functions: known  # type: ignore[assignment,return-value]
        if self.pid == 0 and ranks:
            started = {name: value for name, value in env.items() if name != "AUTOPREC_TRIAL"}
            _become(["torchrun"], started, cwd, writer, writer, lambda: _start_ranks(argv[1:], env, cwd, ranks))
        if self.pid == 0:
            _become(list(argv[1:]), env, cwd, writer, writer)
        os.close(writer)
        self._code: int | None = None
        super().__init__(reader, mark, log)

    def poll(self) -> int | None:
        if self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        end = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self._code


class ForkedRun:
    """Runs ``python script.py args`` for ``autoprec run``: with the output of this process, its signals as asked."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, preexec_fn: Callable[[], None] | None
    ) -> None:
        sys.stdout.flush()
        self.returncode = 0
        self.pid = os.fork()
        if self.pid == 0:
            if preexec_fn is not None:
                preexec_fn()
            _become(list(argv[1:]), env, cwd, 1, 2)

    def poll(self) -> int | None:
        if self.pid:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if not done:
                return None
            self.pid, self.returncode = 0, os.waitstatus_to_exitcode(status)
        return self.returncode


def _start(argv: Sequence[str], env: Mapping[str, str], cwd: Path, mark: str, log: Path | None) -> ProcessTree:
    """Start a process: a fork for a plain script or ``torchrun --nproc-per-node N script``, else a new one."""
    if argv[0].endswith("/torchrun"):
        return ForkedScript(argv[2:], env, cwd, mark, log, ranks=int(argv[2]))
    plain = len(argv) > 1 and argv[0] == sys.executable and argv[1].endswith(".py")
    return (ForkedScript if plain else NewProcess)(argv, env, cwd, mark, log)


@contextlib.contextmanager
def warm_scripts() -> Iterator[None]:
    """While this is open, the scripts that AutoPrec starts are forks of this process."""
    warm_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoprec.trial.driver.runner.NewProcess", _start)
        patch.setattr("autoprec.trial.driver.script.subprocess", SimpleNamespace(Popen=ForkedRun))
        yield


class Forked:
    """A function in a fork, watched and signalled like a :class:`subprocess.Popen` with one pipe for its output."""

    def __init__(self, body: Callable[[], object], *words: str, cwd: Path) -> None:
        reader, writer = os.pipe()
        self.pid, self.returncode = os.fork(), 0
        if self.pid == 0:
            _become(["forked", *words], os.environ, cwd, writer, writer, body)
        os.close(writer)
        self._reader, self._read = reader, b""

    def readline(self, timeout_s: float = 60) -> str:
        """Return the next line of output; empty at its end.

        Raises:
            TimeoutError: none came in so many seconds of its own: on a busy machine it may take longer.
        """
        deadline = Deadline(timeout_s, self.pid)
        while b"\n" not in self._read and self._more(deadline):
            pass
        line, found, self._read = self._read.partition(b"\n")
        return (line + found).decode("utf-8", "replace")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout_s: float = 120) -> str:
        """Return the rest of the output when it has ended.

        Raises:
            TimeoutError: it has not in so many seconds of its own; the output is kept for the next call.
        """
        deadline = Deadline(timeout_s, self.pid)
        while self._more(deadline):
            pass
        os.close(self._reader)
        code = _end_of(self.pid)
        self.returncode = -signal.SIGKILL if code is None else code
        return self._read.decode("utf-8", "replace")

    def _more(self, deadline: Deadline) -> bool:
        if not deadline.awaits(self._reader):
            raise TimeoutError(self._read)
        chunk = os.read(self._reader, 65536)
        self._read += chunk
        return bool(chunk)


@dataclass(frozen=True)
class Ended:
    """A script that has ended: exit code, and what it (its first rank) wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(argv: Sequence[str | Path], cwd: Path) -> Ended:
    """Run ``python argv`` to its end."""
    return _run([_script(argv[0])], argv, cwd, {})


def _start_ranks(argv: Sequence[str], env: Mapping[str, str], cwd: Path, ranks: int) -> None:
    """Be a launcher: fork the ranks, and wait for them."""
    shared = {**env, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **_free_address()}
    for rank in range(ranks):
        if os.fork() == 0:
            _become(list(argv), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd, 1, 2)
    ended = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(ranks)]
    sys.exit(max(ended, key=abs))


def _free_address() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def run_ranks(body: str | Path | Callable[[int], object], *args: str | Path, cwd: Path, ranks: int = 2) -> Ended:
    """Run a script, or a function of the rank, in processes with the environment that ``torchrun`` gives them."""
    env = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **_free_address()}
    script = "" if callable(body) else body
    bodies = [functools.partial(body, rank) if callable(body) else _script(body) for rank in range(ranks)]
    return _run(bodies, [script, *args], cwd, env)


def _script(path: str | Path) -> Callable[[], object]:
    return lambda: runpy.run_path(str(path), run_name="__main__")


def _run(
    bodies: Sequence[Callable[[], object]], argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str]
) -> Ended:
    warm_up(*(WARM_RANKS if env else ()))
    words = list(map(str, argv))
    children: list[int] = []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "wb") as nowhere:
        for rank, body in enumerate(bodies):
            own = {**os.environ, "OMP_NUM_THREADS": "1", **env}
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)} if env else {}
            children.append(os.fork())
            if children[-1] == 0:
                _become(words, own, cwd, (nowhere if rank else out).fileno(), err.fileno(), body)
        ended = [_end_of(pid) for pid in children]
        if None in ended:
            raise TimeoutError(f"{words}: {ended}")
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return Ended(max((code for code in ended if code is not None), key=abs), *texts)


def _end_of(pid: int, timeout_s: float = 60) -> int | None:
    """Return the exit code of a child; None for one that took so many seconds of its own and was killed."""
    deadline = Deadline(timeout_s, pid)
    while not deadline.passed():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _become(
    argv: list[str], env: Mapping[str, str], cwd: Path, out: int, err: int, body: Callable[[], object] | None = None
) -> NoReturn:
    """In a child: become the process ``python argv``, and end."""
    code = 0
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, 4096)  # among them the pipe by which a thread of the parent waits for an exec of its own
        sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(file=sys.stderr)
        env = dict(env)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        warnings.resetwarnings()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        heap.known()
        gc.freeze()  # also of what tests have made: it is not the script's
        atexit._clear()
        concurrent.futures.thread._threads_queues.clear()  # type: ignore[attr-defined]  # this thread may be one of them
        sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        if body is None:
            heap.set_aside()
        if "AUTOPREC_TRIAL" in env:
            from autoprec.trial.inside import agent

            agent.install(env["AUTOPREC_TRIAL"])
        # Held to the end, as a module is: DDP's destructor waits for a thread of gloo that may be waiting for the GIL.
        held = (body or _script(argv[0]))()  # noqa: F841
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends: threads are waited for
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:  # whatever happens: this fork must never return into the test that made it
            os._exit(code)
