"""Ports of a trial's ranks: one that the script fixes is another in each trial, so that those run at once never meet.

A script that sets ``MASTER_PORT`` itself (``mp.spawn``), or is started with ``--master-port``, asks for the same port
in every trial. Trials on several devices, and two searches of one script, would wait for each other's ranks, or join
them. So where the ranks of a trial meet at a port of this machine, they meet at a free one: the first of them writes it
into the trial's own folder, and the others read it there.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoprec.trial.inside.patching import wrapped

_HERE = frozenset(("localhost", "127.0.0.1", "::1", ""))


def is_here(host: str) -> bool:
    """Say whether a host's name is this machine's."""
    return host in _HERE or host in (socket.gethostname(), socket.getfqdn())


def own_port(folder: Path, port: int) -> int:
    """Return the port that stands for ``port`` in the trial whose folder this is: the same one in each of its ranks.

    Args:
        folder: the trial's folder; a folder ``ports`` is made in it.
        port: the port that the script asks for; 0 (any port), and one that is the trial's own already, stay.
    """
    if not port:
        return port
    known = folder / "ports"
    known.mkdir(parents=True, exist_ok=True)
    if (known / f"own-{port}").exists():
        return port
    place = known / str(port)
    if not place.exists():
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        made = known / f"new-{os.getpid()}-{free}"
        made.write_text(str(free))
        note_own(folder, free)  # before another rank can read it
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.link(made, place)
        made.unlink()
    return int(place.read_text())


def note_own(folder: Path, port: int) -> None:
    """Note that a port is the trial's own: what listens there was started by it."""
    (folder / "ports").mkdir(parents=True, exist_ok=True)
    (folder / "ports" / f"own-{port}").touch()


def use_own_ports(folder: Callable[[], Path]) -> Callable[[], None]:
    """Let the stores at which ranks meet (``torch.distributed.TCPStore``) use the trial's own ports.

    Args:
        folder: returns that of the trial, for all of its processes. A process that is forked for a trial is told of it
            after this is called.

    Returns:
        What takes this back.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return lambda: None
    store_class: Any = dist.TCPStore  # type: ignore[attr-defined]
    original = store_class.__init__

    def meet(init: Callable[..., None], store: Any, host_name: str, port: int = 0, *rest: Any, **named: Any) -> None:
        if not is_here(host_name):
            init(store, host_name, port, *rest, **named)
            return
        init(store, host_name, own_port(folder(), port), *rest, **named)
        note_own(folder(), store.port)

    store_class.__init__ = wrapped(original, meet)

    def undo() -> None:
        store_class.__init__ = original

    return undo
