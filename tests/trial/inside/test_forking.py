"""What a fork could do, with stand-ins for CUDA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.trial.inside.forking import (
    NVML_VARIABLE,
    ask_nvml_for_gpus,
    can_train_after_fork,
    can_use_cuda_after_fork,
    hold_one_thread,
    holds_in_fork,
    offer_threads,
    take_threads,
)
from autoprec.trial.protocol import TrainSpec


def test_a_process_whose_autograd_has_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real where PyTorch was built with CUDA; the error of such a build is raised by hand here."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert can_train_after_fork()

    def backward(_tensor: torch.Tensor) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    assert not can_train_after_fork()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert can_train_after_fork()


def test_a_question_is_asked_in_a_fork() -> None:
    here = os.getpid()
    assert holds_in_fork(lambda: os.getpid() != here)
    assert not holds_in_fork(lambda: False)
    assert not holds_in_fork(lambda: 1 // 0 == 0)


@pytest.mark.parametrize("driver_too_old", [False, True])
def test_nvml_is_asked_only_where_cuda_itself_finds_a_gpu(
    driver_too_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def is_available() -> bool:
        asked.append(os.getpid())
        assert NVML_VARIABLE not in os.environ, "NVML lists the GPU in either case"
        return not driver_too_old

    monkeypatch.setenv(NVML_VARIABLE, "1")  # put back at the end
    monkeypatch.delenv(NVML_VARIABLE)
    monkeypatch.setattr(torch._C, "_has_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert ask_nvml_for_gpus() is not driver_too_old
    assert os.environ.get(NVML_VARIABLE) == (None if driver_too_old else "1")
    assert asked == [], "CUDA must not be asked in this process"


def test_a_fork_is_asked_whether_cuda_was_spoilt_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    assert can_use_cuda_after_fork()
    monkeypatch.setattr(torch._C, "_has_cuda", True)
    # as after cudaGetDeviceCount: not initialised, False in the process itself, True in what it forks
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: os.getpid() != here, raising=False)
    assert not torch.cuda.is_initialized()
    assert not can_use_cuda_after_fork()
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: False, raising=False)
    assert can_use_cuda_after_fork()


@pytest.mark.parametrize(
    ("asked", "offered", "taken"), [(0, 2, 2), (3, 2, 3), (1, 4, 1), (3, 0, 1)], ids=["own", "asked", "one", "beside"]
)
def test_what_will_be_forked_has_one_thread_and_a_fork_takes_what_the_script_would_have(
    asked: int, offered: int, taken: int
) -> None:
    """A parallel region of several threads here would be the end of the next fork's first one."""
    set_threads = torch.set_num_threads

    def right() -> bool:
        set_threads(1)
        hold_one_thread()
        hold_one_thread()
        if asked:
            torch.set_num_threads(asked)
        held = torch.get_num_threads() == 1
        offer_threads(offered)
        take_threads()
        if torch.get_num_threads() != taken:
            return False
        torch.set_num_threads(5)  # the script's own word, later
        return held and torch.get_num_threads() == (5 if offered else 1)

    assert holds_in_fork(right)


def test_what_is_not_held_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    offer_threads(before + 3)
    take_threads()
    offer_threads(0)
    assert torch.get_num_threads() == before


#: Its losses say in how many threads it computes; each is a parallel region of them, before the first step as well.
COUNTS_THREADS = """
import torch
from torch import nn
{asks}
torch.manual_seed(0)
rows = torch.randn(600, 600)
rows = rows @ rows
model = nn.Sequential(nn.Linear(600, 64), nn.ReLU(), nn.Linear(64, 600))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(8):
    loss = 0.0 * model(rows).square().mean() + torch.get_num_threads()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("launch", ["fork", "zygote"])
@pytest.mark.parametrize(
    ("asks", "threads"), [("", 3), ("torch.set_num_threads(2)", 2), ("torch.set_num_threads(1)", 1)]
)
def test_a_trial_that_is_alone_has_the_threads_of_the_script(
    launch: str, asks: str, threads: int, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that asked for two and multiplied matrices before its first step hung in every fork."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (tmp_path / "train.py").write_text(COUNTS_THREADS.format(asks=asks))
    with host(str(tmp_path / "train.py"), launch=launch, real=launch == "zygote") as runner:
        assert runner.start().launch == launch
        beside = runner.run(TrainSpec(steps=3, warmup=0))
        alone = runner.run(TrainSpec(steps=3, warmup=0, alone=True))
    assert (beside.losses, beside.clock) == ((1.0,) * 3, "cpu_time"), beside.reason + beside.tail
    assert alone.losses == (float(threads),) * 3, alone.reason + alone.tail
    assert alone.clock == ("cpu_time" if threads == 1 else "thread_time")


def test_a_script_whose_threads_cannot_be_held_is_not_forked(host: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTS_THREADS.format(asks="torch._C.set_num_threads(2)"))
    with host(str(tmp_path / "train.py")) as runner:
        info = runner.start()
    assert info.launch != "fork"
    assert "the script computes in 2 threads" in " ".join(info.notes)
