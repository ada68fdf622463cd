"""The zygote: a copy of the script's process kept after its imports, forked instead of starting Python again.

The first process of a command leaves two copies behind: one right after torch was imported, and one at the script's
first seeding call, when usually everything is imported and nothing random has happened; the second replaces the first.
A fork of the copy is the script itself at that moment, so it goes on exactly as a plain process would, with another
configuration (another seed, another trial), and pays only for the script's own set-up. A copy that is not used imports
ahead for its forks meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from autoprec.support.plain import Document
from autoprec.trial.inside.fork_server import flush_streams, serve_forks
from autoprec.trial.inside.forking import can_use_cuda_after_fork, holds_in_fork
from autoprec.trial.inside.isolate.entropy import fork
from autoprec.trial.inside.isolate.isolation import before_forks
from autoprec.trial.inside.isolate.sharing import shared_state
from autoprec.trial.messages import connect, send_message

_NEEDED = (
    "torch._dynamo",
    "autoprec.applying.policy",
    "autoprec.applying.audit",
    "autoprec.graph.recorder",
    "autoprec.trial.inside.sensitivity.scan",
)


def preload() -> None:
    """Import what every trial needs, ``torch._dynamo`` included: any first optimizer step imports that."""
    for name in _NEEDED:
        importlib.import_module(name)
    if "torch._inductor.compile_fx" in sys.modules:  # torch.compile was called, and imported it
        _ask_for_the_compiler()


def _ask_for_the_compiler() -> None:
    """Ask once for all forks what Inductor asks in each process before its first graph, also where that is cached.

    That is the key of its cache, which covers torch's own source; the vector instructions of the CPU, for which it
    starts a Python for each kind: 1.5 s; and what it imports with its first graph: an operator that is registered then
    has the files of all modules looked up, each through a trial's isolation. What fails here fails in the fork that
    compiles, which then says so.
    """
    with contextlib.suppress(Exception):
        importlib.import_module("torch._inductor.codecache").torch_key()
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
        importlib.import_module("torch._inductor.codegen.common").init_backend_registration()
        if torch.distributed.is_available():
            importlib.import_module("torch.distributed.tensor.experimental")


def preload_compiler() -> None:
    """Import Inductor where there is a GPU: most trials compile there, and the import takes as long as twenty steps.

    The key of what it caches covers torch's own source, which is read here for all forks. It starts no worker. Should a
    version of torch initialise CUDA by it, this copy is of no more use, and ends.
    """
    if holds_in_fork(torch.cuda.is_available):
        importlib.import_module("torch._inductor.compile_fx")
        with contextlib.suppress(AttributeError):
            importlib.import_module("torch._inductor.codecache").torch_key()
        if torch.cuda.is_initialized() or not can_use_cuda_after_fork():  # type: ignore[no-untyped-call]
            os._exit(0)


def _may_be_copied() -> bool:
    """True when nothing of this process would be shared badly: no threads, no CUDA, nothing a fork shares."""
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialised or any(t.name != "autoprec-watch" for t in threading.enumerate()[1:]):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    return not shared_state() and can_use_cuda_after_fork()


def leave_zygote(address: str, configure: Callable[[Document], None], part: Callable[[], None]) -> bool:
    """Fork a zygote off this process, which serves forks of itself; returns in this process, and in every fork.

    Args:
        configure: called in a fork with its own configuration.
        part: called in this process once the zygote is made: what it writes from now on, no fork of that must see.

    Returns True in a fork.
    """
    if not _may_be_copied():
        return False
    flush_streams()
    before_forks()
    if fork():
        part()
        return False
    os.setsid()
    try:
        control = connect(address)
        send_message(control, op="zygote")
    except OSError:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    config = serve_forks(control, when_idle=_import_ahead)
    configure(config)
    return True


def _import_ahead() -> None:
    preload()
    preload_compiler()


def leave_zygote_at_first_seed(address: str, configure: Callable[[Document], None], part: Callable[[], None]) -> None:
    """Leave a zygote (see :func:`leave_zygote`) when the script first seeds Python, numpy or torch, before it does.

    Args:
        address: of the socket that asks for children.
        configure: is given a child's configuration.
        part: runs in a child before it goes on.
    """
    numpy = sys.modules.get("numpy")
    places: list[tuple[Any, str]] = [(random, "seed"), (torch, "manual_seed"), (torch.random, "manual_seed")]
    if numpy is not None:
        places.append((numpy.random, "seed"))
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]

    def intercept(owner: Any, name: str) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            for holder, attribute, original in originals:
                setattr(holder, attribute, original)
            leave_zygote(address, configure, part)
            return getattr(owner, name)(*args, **kwargs)  # a fork may have shifted it

        return seed

    for owner, name in places:
        setattr(owner, name, intercept(owner, name))
