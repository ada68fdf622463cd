"""The MS-AMP adapter, with a stand-in package."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch
from torch import nn

from autoprec.backends import get
from autoprec.backends.msamp import MsampBackend
from autoprec.errors import UnsupportedError
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES


@pytest.fixture
def msamp(monkeypatch: pytest.MonkeyPatch) -> list:
    calls: list = []
    package = types.ModuleType("msamp")
    package.__spec__ = importlib.machinery.ModuleSpec("msamp", None)
    package.initialize = lambda model, optimizer, opt_level: calls.append(opt_level) or (model, optimizer)
    monkeypatch.setitem(sys.modules, "msamp", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("autoprec.backends.msamp.issubclass", lambda a, b: False, raising=False)
    return calls


def test_it_converts_where_everything_is_right(msamp: list) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    assert MsampBackend().initialize(model, optimizer, "O2") == (model, optimizer)
    assert msamp == ["O2"]


def test_every_precondition_is_checked(msamp: list, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters())
    backend = MsampBackend()
    with pytest.raises(UnsupportedError, match="O1 and O2, not O3"):
        backend.initialize(model, adam, "O3")
    with pytest.raises(UnsupportedError, match="not SGD"):
        backend.initialize(model, sgd, "O1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    with pytest.raises(UnsupportedError, match="named H100 only"):
        backend.initialize(model, adam, "O1")
    assert msamp == []


def test_with_this_torch_adamw_would_become_adam(msamp: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("autoprec.backends.msamp.issubclass")
    assert "weight decay" in MsampBackend().available("cuda").reason


def test_absent_and_per_layer() -> None:
    backend = get("msamp")
    assert "not installed" in backend.available("cuda").reason
    asks = {"gemm": "fprop", "m": 0, "k": 0, "n": 0, "device": "cuda"}
    assert not backend.capability(BUILTIN_RECIPES["fp8_tensorwise"], **asks)
    with pytest.raises(UnsupportedError, match="whole models"):
        backend.bind(LayerPlan(), nn.Linear(2, 2), name="x", seed=0)
