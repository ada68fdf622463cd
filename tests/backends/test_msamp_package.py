import sys
import types

import pytest
import torch
from torch import nn

from autoprec.backends import msamp_package
from autoprec.errors import UnsupportedError
from autoprec.levels import LEVELS
from autoprec.policy import Policy

H100 = "NVIDIA H100 80GB HBM3"


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
    monkeypatch.setattr(msamp_package, "_adamw_is_adam", lambda: False)
    return calls


def network():
    return nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 8)})


def adamw(model):
    made = torch.optim.AdamW(model.parameters())
    made.defaults.pop("decoupled_weight_decay", None)  # as in the torch that msamp knows
    return made


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_package_runs_where_it_can(fake, level):
    model = network()
    run = msamp_package.initialize(LEVELS[f"msamp-{level.lower()}"].policy(), model, adamw(model), device_name=H100)
    assert (run.ran, run.reason) == (f"msamp {level}", "")
    assert type(run.optimizer).__name__ == "LBOptimizer"
    assert fake == [(level, False, [])]


def test_layers_that_the_policy_keeps_are_left_out(fake):
    model, row = network(), LEVELS["msamp-o2"]
    document = row.policy().to_dict()
    document["recipes"]["bf16"] = {"format": "bf16"}
    document["layers"] = [{"match": "head", "recipe": "bf16"}]
    msamp_package.initialize(Policy.model_validate(document), model, adamw(model), device_name=H100)
    assert fake == [("O2", False, ["head"])]


@pytest.mark.parametrize(
    ("device", "optimizer", "reason"),
    [
        ("NVIDIA H200", adamw, "H100 only"),
        ("", adamw, "no GPU"),
        (H100, lambda m: torch.optim.SGD(m.parameters(), 0.1), "not SGD"),
        (H100, lambda m: torch.optim.AdamW(m.parameters()), "does not know this optimizer's options"),
    ],
)
def test_where_it_cannot_run_the_reason_is_given_and_ours_runs(fake, device, optimizer, reason):
    model = network()
    made = optimizer(model)
    run = msamp_package.initialize(LEVELS["msamp-o2"].policy(), model, made, device_name=device)
    assert run.ran == "autoprec O2"
    assert reason in run.reason
    assert run.optimizer is made
    assert fake == []


def test_adamw_that_is_an_adam_is_refused(fake, monkeypatch):
    monkeypatch.setattr(msamp_package, "_adamw_is_adam", lambda: True)
    model = network()
    run = msamp_package.initialize(LEVELS["msamp-o1"].policy(), model, adamw(model), device_name=H100)
    assert "weight decay" in run.reason


def test_without_the_package():
    model = network()
    run = msamp_package.initialize(LEVELS["msamp-o1"].policy(), model, adamw(model))
    assert run.ran == "autoprec O1"
    assert msamp_package.IMAGE in run.reason


def test_a_policy_that_is_no_level_is_refused():
    model = network()
    assert msamp_package.opt_level(Policy()) is None
    with pytest.raises(UnsupportedError, match="none of MS-AMP's levels"):
        msamp_package.initialize(Policy(), model, adamw(model))
