"""What a fork could do, with stand-ins for CUDA."""

from __future__ import annotations

import os

import pytest
import torch

from autoprec.trial.inside.forking import (
    NVML_VARIABLE,
    ask_nvml_for_gpus,
    can_train_after_fork,
    can_use_cuda_after_fork,
    holds_in_fork,
)


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
