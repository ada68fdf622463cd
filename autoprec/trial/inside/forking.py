"""What forks of this process can do; CUDA is asked in a fork, because asking it in the process itself spoils its forks.

A fork of a process that has run a parallel region with several threads hangs in its own first one: OpenMP's threads are
not forked, and it waits for them. So what will be forked keeps to one thread, whatever its script asks for, and a fork
takes the threads that the script would have before it computes anything.

Where NVML cannot tell how many GPUs there are (MIG, a container without it), ``torch.cuda.is_available()`` asks CUDA,
after which no fork of the process can use CUDA, although ``torch.cuda.is_initialized()`` stays False.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch

#: With ``1`` torch asks NVML whether there is a GPU, which initialises nothing.
NVML_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


class _Threads:
    """Of a process held at one thread: what its script asked for, and what a fork is offered; 0 for nothing."""

    def __init__(self) -> None:
        self.held, self.asked, self.offered, self.set = False, 0, 0, torch.set_num_threads

    def note(self, nthreads: int) -> None:
        """Stand in for ``torch.set_num_threads``."""
        self.asked = int(nthreads)


_threads = _Threads()


def hold_one_thread() -> None:
    """Keep this process and its forks at one thread; what the script asks of ``torch.set_num_threads`` is noted."""
    if not _threads.held:
        _threads.held = True
        torch.set_num_threads = _threads.note


def offer_threads(count: int) -> None:
    """Say how many threads the script has where it does not ask for a number itself; 0: one, whatever it asks for."""
    _threads.offered = count


def take_threads() -> None:
    """In a fork of a process held at one thread: take the threads that are offered. No fork of it may compute then."""
    if _threads.held and _threads.offered:
        _threads.held = False
        torch.set_num_threads = _threads.set
        torch.set_num_threads(_threads.asked or _threads.offered)


def holds_in_fork(question: Callable[[], bool]) -> bool:
    """Ask in a fork that ends with the answer; False where asking fails."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            os._exit(0 if question() else 1)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def ask_nvml_for_gpus() -> bool:
    """From now on let this process and those it starts ask NVML whether there is a GPU, if CUDA itself finds one.

    NVML also lists GPUs whose driver is too old for this build of torch. Returns whether NVML is asked.
    """
    if NVML_VARIABLE not in os.environ and torch._C._has_cuda and holds_in_fork(torch.cuda.is_available):
        os.environ[NVML_VARIABLE] = "1"
    return os.environ.get(NVML_VARIABLE) == "1"


def can_train_after_fork() -> bool:
    """Whether a fork of this process can run a backward; a build of PyTorch with CUDA is asked by trying.

    Where its first backward was one that ``torch.compile`` traced, such a build has started a thread for each kind of
    device, on machines without a GPU as well (2.11 to 2.14), and autograd refuses to work in a fork that lacks them.
    """

    def trains() -> bool:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        return True

    return torch.version.cuda is None or holds_in_fork(trains)


def can_use_cuda_after_fork() -> bool:
    """Whether a fork of this process can use CUDA as far as torch allows it; True in a build without CUDA."""
    asked = getattr(torch._C, "_cuda_isInBadFork", None)
    return asked is None or not torch._C._has_cuda or holds_in_fork(lambda: not asked())
