"""When a process may be copied."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from autoprec.trial.inside import zygote


def test_not_with_open_data_files_threads_or_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "shared_state", lambda: "")  # pytest's own files would be
    monkeypatch.setattr(zygote.threading, "enumerate", lambda: [threading.main_thread()])
    assert zygote._may_be_copied()
    monkeypatch.setattr(zygote, "shared_state", lambda: "a file that is open for reading and writing (data)")
    assert not zygote._may_be_copied()
    monkeypatch.setattr(zygote, "shared_state", lambda: "")
    monkeypatch.setattr(zygote.threading, "enumerate", lambda: [threading.main_thread(), threading.Thread()])
    assert not zygote._may_be_copied()
    monkeypatch.setattr(zygote.threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr(zygote, "can_use_cuda_after_fork", lambda: False)
    assert not zygote._may_be_copied()
    monkeypatch.setattr(zygote, "can_use_cuda_after_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not zygote._may_be_copied()


@pytest.mark.parametrize(("gpu", "initialised"), [(False, False), (True, False), (True, True)])
def test_the_compiler_is_imported_ahead_where_there_is_a_gpu(
    gpu: bool, initialised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(zygote, "holds_in_fork", lambda question: gpu)  # os._exit is replaced: no fork would end
    monkeypatch.setattr(zygote, "can_use_cuda_after_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(zygote.importlib, "import_module", done.append)
    monkeypatch.setattr(zygote.os, "_exit", lambda code: done.append(f"ended with {code}"))
    zygote.preload_compiler()
    imported = ["torch._inductor.compile_fx", "torch._inductor.codecache"]
    assert done == imported * gpu + ["ended with 0"] * initialised


def test_importing_the_compiler_starts_no_thread_that_a_fork_would_lack() -> None:
    code = (
        "import threading, torch\ntorch.cuda.is_available = lambda: True\n"
        "from autoprec.trial.inside.zygote import preload_compiler\npreload_compiler()\n"
        "from torch._inductor.codecache import torch_key\nassert threading.active_count() == 1\n"
        "import time; began = time.process_time(); torch_key(); assert time.process_time() - began < 0.02"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_what_inductor_asks_of_the_machine_is_asked_once_for_all_forks(backend: str) -> None:
    code = (
        f"import subprocess, sys, threading, torch\ntorch.compile(torch.nn.Linear(2, 2), backend={backend!r})\n"
        "from autoprec.trial.inside.zygote import preload\npreload()\nassert threading.active_count() == 1\n"
        "compiles = 'torch._inductor.compile_fx' in sys.modules\n"
        f"assert compiles is {backend == 'inductor'}\n"
        "from torch._inductor.codecache import torch_key\n"
        "from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list\n"
        "asked, subprocess.Popen = valid_vec_isa_list.cache_info().currsize, None\nassert asked == compiles\n"
        "import time; began = time.process_time(); compiles and (torch_key(), pick_vec_isa())\n"
        "assert time.process_time() - began < 0.02\n"
        "first = 'torch._inductor.codegen.cpp', 'torch.distributed.tensor.experimental'\n"
        "assert [name in sys.modules for name in first] == [compiles] * 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_the_zygote_is_left_once_before_the_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    import numpy

    before = (random.seed, torch.manual_seed, torch.random.manual_seed, numpy.random.seed)
    left: list[str] = []
    monkeypatch.setattr(zygote, "leave_zygote", lambda address, configure, part: left.append(address))
    zygote.leave_zygote_at_first_seed("here", lambda config: None, lambda: None)
    assert torch.manual_seed is not before[1]
    assert left == []
    torch.manual_seed(5)
    assert left == ["here"]
    assert (random.seed, torch.manual_seed, torch.random.manual_seed, numpy.random.seed) == before
    assert torch.initial_seed() == 5
