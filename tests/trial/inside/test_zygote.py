"""When a process may be copied."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from autoprec.trial.inside import zygote as template


def test_not_with_open_data_files_threads_or_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template.os, "listdir", lambda path: [])
    monkeypatch.setattr(template.threading, "enumerate", lambda: [threading.main_thread()])
    assert template._may_be_copied()
    with (tmp_path / "data").open("w") as stream:
        monkeypatch.setattr(template.os, "listdir", lambda path: ["0", "1", "2", str(stream.fileno())])
        assert not template._may_be_copied()
    monkeypatch.setattr(template.os, "listdir", lambda path: [])
    monkeypatch.setattr(template.threading, "enumerate", lambda: [threading.main_thread(), threading.Thread()])
    assert not template._may_be_copied()
    monkeypatch.setattr(template.threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not template._may_be_copied()


def test_the_offer_is_made_once_before_the_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    import numpy

    before = (random.seed, torch.manual_seed, torch.random.manual_seed, numpy.random.seed)
    offered: list[str] = []
    monkeypatch.setattr(template, "offer", lambda address, become: offered.append(address))
    template.offer_at_first_seed("here", lambda config: None)
    assert torch.manual_seed is not before[1]
    assert offered == []
    torch.manual_seed(5)
    assert offered == ["here"]
    assert (random.seed, torch.manual_seed, torch.random.manual_seed, numpy.random.seed) == before
    assert torch.initial_seed() == 5
