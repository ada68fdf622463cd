"""When a process must not be forked, with stand-ins for what this machine lacks."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.trial.inside.host import fork_obstacle, gpus_used, host_info
from autoprec.trial.inside.observe.discovery import Found


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pytest and other tests hold in this process is not these tests' business (tests/.../test_sharing.py)."""
    monkeypatch.setattr("autoprec.trial.inside.host.shared_state", lambda: "")


def found(device: str = "cpu") -> Found:
    model = nn.Sequential(nn.Linear(4, 4, device=device))
    return Found([model], [torch.optim.SGD(model.parameters())], list(model.parameters()))


def test_a_plain_cpu_process_may_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])  # whatever other tests left behind
    assert fork_obstacle(found()) == ""


@pytest.mark.parametrize(
    ("owner", "name", "value", "says"),
    [
        (torch.cuda, "is_initialized", lambda: True, "CUDA"),
        (torch.distributed, "is_initialized", lambda: True, "process group"),
        (multiprocessing, "active_children", lambda: [1], "worker processes"),
    ],
)
def test_obstacles(owner: Any, name: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: 1 // 0)  # asking CUDA would spoil every fork
    monkeypatch.setattr(owner, name, value)
    assert says in fork_obstacle(found())


def test_autograd_with_threads_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr("autoprec.trial.inside.host.can_train_after_fork", lambda: False)
    assert "autograd has started threads" in fork_obstacle(found())


def test_host_info() -> None:
    info = host_info(found(), "process", 1.5, "CUDA is initialised")
    assert info.layers == ("0",)
    assert info.optimizers == ("SGD",)
    assert info.device == "cpu"
    assert "CUDA is initialised" in info.notes[-1]
    assert info.model.keys() == {"class", "parameters", "fingerprint"}
    assert info.model["parameters"] == 20


def test_gpus_that_hold_tensors_or_will_have_replicas_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_used(found()) == 0

    class Parameter:
        device = torch.device("cuda", 1)

    on_gpu = found()
    on_gpu.parameters = [Parameter()]  # type: ignore[list-item]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: {0: 512, 1: 1024}.get(index, 0))
    assert gpus_used(on_gpu) == 2
    replicated = nn.DataParallel(nn.Linear(2, 2))
    replicated.device_ids = [0, 1, 2, 3]
    assert gpus_used(on_gpu) == 4


def test_threads_that_training_may_wait_for_are_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name=name) for name in ("tqdm_monitor", "prefetch")]
    # what other tests left running in this process is not this test's business
    monkeypatch.setattr(threading, "enumerate", lambda: [thread for thread in threads if thread.is_alive()])
    try:
        threads[0].start()
        assert fork_obstacle(found()) == ""
        threads[1].start()
        assert fork_obstacle(found()).endswith("1 other thread, which a fork would not have: prefetch")
    finally:
        over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
