"""The host: one running copy of the script that says what the script is, and then serves forks of itself.

It stops at its first training forward and reports the model, its layers and its device to the driver. Where a fork of
this process can train, every trial is one (:mod:`autoprec.trial.inside.fork_server`); otherwise the host says why not
and ends, and trials are processes of their own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from typing import Any

import torch
from torch import nn

from autoprec.numerics.sharded import rank, world_size
from autoprec.support.plain import Document
from autoprec.trial.inside.fork_server import serve_forks, settle
from autoprec.trial.inside.forking import can_train_after_fork
from autoprec.trial.inside.isolate.isolation import programs
from autoprec.trial.inside.isolate.seeding import clock_seeds
from autoprec.trial.inside.isolate.sharing import shared_state
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.zygote import preload
from autoprec.trial.messages import connect, send_message
from autoprec.trial.processes import raise_open_files
from autoprec.trial.protocol import HostInfo

_LOADER_NOTE = (
    "DataLoader workers are replaced by loading in the process, so that trials can be forked; that time is not counted"
)
_STREAM_NOTE = "; an IterableDataset that shards by worker gives its data in another order"


def serve(config: Document, found: Found, *, setup_s: float, loading: Any, heard: threading.Event) -> Document:
    """Report what the script is, and serve forks; returns in a fork only, with its configuration: that of a trial.

    Args:
        config: the configuration of this process: ``socket``, ``mark``, ``launch``.
        found: what the script trains.
        setup_s: seconds until its first training forward.
        loading: the stand-in for DataLoader workers, or None.
        heard: set once the driver hears of this process's end by its connection.
    """
    if rank() != 0:
        os._exit(0)  # every rank has stopped here, and one of them is enough to say what the script is
    obstacle = fork_obstacle(found) if config.get("launch", "auto") in ("auto", "fork") else "not asked for"
    if loading is not None and loading.loaders and not obstacle:
        found.notes.append(_LOADER_NOTE + (_STREAM_NOTE if loading.iterable else ""))
    info = host_info(found, "process" if obstacle else "fork", setup_s, obstacle)
    raise_open_files()
    control = connect(str(config["socket"]))
    heard.set()
    preload()  # what every trial would import, and then collect, is done once for all forks
    settle()
    send_message(control, op="hello", info=info.to_json())
    if obstacle:
        control.close()
        os._exit(0)
    return serve_forks(control, str(config["mark"]))


def report_end(config: Document, seen: Document) -> None:
    """Report that the script ended, or never trains, before a training step was seen.

    Args:
        seen: ``why`` (a code of :mod:`autoprec.trial.driver.failures`, or empty), and what the hooks had counted.
    """
    with contextlib.suppress(OSError):
        control = connect(str(config["socket"]))
        send_message(control, op="ended", seen=seen)
        control.close()


def fork_obstacle(found: Found) -> str:
    """Say why this process must not be forked now; empty when it may."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return "a process group is initialised"
    import multiprocessing

    if multiprocessing.active_children():
        return "the script has live worker processes"
    if any(p.device.type not in ("cpu", "meta") for p in found.parameters):
        return f"the model is on {found.parameters[0].device.type}"
    if others := _other_threads():
        count = f"{len(others)} other thread{'s' if len(others) > 1 else ''}"
        return f"the script has {count}, which a fork would not have: {', '.join(others[:4])}"
    if sys.platform != "linux":
        return "this system cannot fork"
    if (threads := torch.get_num_threads()) > 1:
        return f"the script computes in {threads} threads, which a fork would wait for"
    if shared := shared_state():
        return f"the script has {shared}, which forks would share"
    return "" if can_train_after_fork() else "autograd has started threads, which a fork would not have"


#: Threads that no training needs: ours, and the one with which tqdm looks after bars that stand still.
IDLE_THREADS = ("autoprec-watch", "tqdm_monitor")


def _other_threads() -> list[str]:
    """Return the names of threads that training may wait for, such as one that loads batches into a queue."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and thread.name not in IDLE_THREADS
        and not str(getattr(getattr(thread, "_target", None), "__module__", "")).startswith("torch._inductor")
    ]


def host_info(found: Found, launch: str, setup_s: float, obstacle: str) -> HostInfo:
    """Describe the script at its first training forward.

    Args:
        found: models and optimizers of the script.
        launch: the launch mode in use.
        setup_s: seconds until the first training step.
        obstacle: why nothing is forked; empty for nothing.
    """
    from autoprec.applying.compiling import is_compiled, most_alike
    from autoprec.applying.units import tunable_units
    from autoprec.graph.analysis.modules import ModelNames

    root = found.root
    device = found.parameters[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    notes = list(found.notes)
    if obstacle and launch == "process" and obstacle != "not asked for":
        notes.append(f"trials are started as plain processes: {obstacle}")
    if started := programs():
        what = ", ".join(started[:4])
        notes.append(
            f"the script starts other programs ({what}), which here cannot work on a copy of your files: they are "
            "refused to write outside caches and the temporary directory, though not to change permissions and times "
            "of your files (docs/trials.md)"
        )
    if clock_seeds:
        notes.append(f"{', '.join(clock_seeds)} is given the time as a seed: trials use one fixed seed instead")
    return HostInfo(
        launch=launch,
        model=dict(ModelNames(root).identity()),
        layers=tuple(tunable_units(root)),
        optimizers=tuple(type(o).__name__ for o in found.optimizers),
        device=name,
        world_size=world_size(),
        setup_s=setup_s,
        notes=tuple(notes),
        compiled=is_compiled(root),
        blocks=most_alike(root),
        scripted=any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()),
        gpus=gpus_used(found),
        device_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
    )


def gpus_used(found: Found) -> int:
    """Return how many GPUs this process trains on: it holds tensors there, or will have replicas of its model there."""
    if found.parameters[0].device.type != "cuda":
        return 0
    used = {p.device.index for p in found.parameters}
    used |= {index for index in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(index)}
    for module in gc.get_objects() if torch.cuda.device_count() > 1 else ():
        if type(module) is nn.DataParallel:
            used.update(module.device_ids)
    return len(used)
