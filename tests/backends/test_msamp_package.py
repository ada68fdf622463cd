import sys
import types

import pytest
import torch
from torch import nn

from autoprec.backends import msamp, msamp_package
from autoprec.errors import UnsupportedError
from autoprec.policy import Policy
from autoprec.policy.levels import LEVELS

H100 = "NVIDIA H100 80GB HBM3"
REAL_ADAMW = torch.optim.AdamW


class OldAdamW(torch.optim.Optimizer):
    """AdamW as in the torch that MS-AMP knows: no subclass of Adam."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3, "weight_decay": 1e-2})


@pytest.fixture
def fake(monkeypatch):
    """A module with msamp's interface (v0.4.0: msamp/__init__.py initialize, msamp/deepspeed/__init__.py)."""
    calls = []

    def module(name, **content):
        made = types.ModuleType(name)
        made.__spec__ = types.SimpleNamespace(name=name, parent=name.rpartition(".")[0])
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    class LBOptimizer:
        pass

    def initialize(model, optimizer=None, opt_level="O1", use_te=False):
        assert opt_level in ("O1", "O2"), "msamp.initialize accepts only 'O1','O2'"
        skipped = [n for n, m in model.named_modules() if getattr(m, "use_fp32_linear", False)]
        calls.append((opt_level, use_te, skipped))
        return model, LBOptimizer()

    def deepspeed_initialize(model=None, optimizer=None, config=None):
        assert config["msamp"]["enabled"]
        assert config["zero_optimization"]["stage"] in (1, 2)
        calls.append((config["msamp"]["opt_level"], config["msamp"]["use_te"], []))
        return model, LBOptimizer(), None, None

    module("msamp", initialize=initialize, __path__=[])
    module("msamp.deepspeed", initialize=deepspeed_initialize)
    module("deepspeed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H100)
    monkeypatch.setattr(msamp, "is_available", lambda name: True)
    monkeypatch.setattr(msamp, "installed_version", lambda name: "0.4.0")
    monkeypatch.setattr(torch.optim, "AdamW", OldAdamW)
    return calls


def network():
    return nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 8)})


def adamw(model):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_package_runs_where_it_can(fake, level):
    model = network()
    run = msamp_package.initialize(LEVELS[f"msamp-{level.lower()}"].policy(), model, adamw(model))
    assert (run.ran, run.reason) == (f"msamp {level}", "")
    assert type(run.optimizer).__name__ == "LBOptimizer"
    assert fake == [(level, False, [])]


def test_layers_that_the_policy_keeps_are_left_out(fake):
    model, row = network(), LEVELS["msamp-o2"]
    document = row.policy().to_dict()
    document["recipes"]["bf16"] = {"format": "bf16"}
    document["layers"] = [{"match": "head", "recipe": "bf16"}]
    msamp_package.initialize(Policy.model_validate(document), model, adamw(model))
    assert fake == [("O2", False, ["head"])]


@pytest.mark.parametrize(
    ("device", "optimizer", "level", "reason"),
    [
        ("NVIDIA H200", adamw, "msamp-o2", "H100 only"),
        ("NVIDIA H200", adamw, "msamp-o3", "H100 only"),
        (H100, lambda m: torch.optim.SGD(m.parameters(), 0.1), "msamp-o1", "not SGD"),
    ],
)
def test_where_it_cannot_run_the_reason_is_given_and_ours_runs(fake, monkeypatch, device, optimizer, level, reason):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)
    model = network()
    made = optimizer(model)
    run = msamp_package.initialize(LEVELS[level].policy(), model, made)
    assert run.ran == f"autoprec {level[-2:].upper()}"
    assert reason in run.reason
    assert run.optimizer is made
    assert fake == []
    assert not any("use_fp32_linear" in vars(m) for m in model.modules())


def test_with_this_torch_adamw_would_be_trained_as_adam(fake, monkeypatch):
    monkeypatch.setattr(msamp.torch.optim, "AdamW", REAL_ADAMW)
    model = network()
    run = msamp_package.initialize(LEVELS["msamp-o1"].policy(), model, adamw(model))
    assert "weight decay" in run.reason


def test_without_the_package():
    model = network()
    run = msamp_package.initialize(LEVELS["msamp-o1"].policy(), model, adamw(model))
    assert run.ran == "autoprec O1"
    assert "not installed" in run.reason


def test_a_policy_that_is_no_level_is_refused():
    model = network()
    assert msamp_package.opt_level(Policy()) is None
    with pytest.raises(UnsupportedError, match="none of MS-AMP's levels"):
        msamp_package.initialize(Policy(), model, adamw(model))
