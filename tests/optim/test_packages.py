import sys
import types

import pytest
import torch
from torch import nn

from autoprec.errors import MissingDependencyError, UnknownNameError, UnsupportedError
from autoprec.optim import packages as optimizer_packages
from autoprec.optim.packages import package_optimizer


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def groups(model):
    return [{"params": list(model[0].parameters()), "lr": 1e-2}, {"params": list(model[2].parameters())}]


def train(model, optimizer, steps=20):
    losses = []
    for seed in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = (model(x) - torch.tanh(x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def torchao():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.optim", reason="torchao is not installed")


@pytest.mark.parametrize("name", ["torchao-fp8", "torchao-8bit"])
@pytest.mark.filterwarnings("ignore")
def test_torchao_trains_like_the_optimizer_it_replaces(torchao, name):
    plain, model = network(), network()
    expected = train(plain, torch.optim.AdamW(groups(plain), lr=3e-3, weight_decay=0.05))
    made = package_optimizer(torch.optim.AdamW(groups(model), lr=3e-3, weight_decay=0.05), name)
    assert "AdamW" in type(made).__name__
    assert [float(group["lr"]) for group in made.param_groups] == pytest.approx([1e-2, 3e-3])
    assert [group["weight_decay"] for group in made.param_groups] == [0.05, 0.05]
    assert train(model, made)[-1] == pytest.approx(expected[-1], rel=0.05)


@pytest.mark.filterwarnings("ignore")
def test_torchaos_learning_rate_may_be_assigned_as_a_number(torchao):
    model = network()
    made = package_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), "torchao-fp8")
    train(model, made, 1)
    made.param_groups[0]["lr"] = 0.0
    before = model[0].weight.detach().clone()
    train(model, made, 1)
    assert torch.equal(before, model[0].weight)


@pytest.fixture
def bitsandbytes(monkeypatch):
    """bitsandbytes' interface: optim.AdamW8bit(params, lr, betas, eps, weight_decay, ...)."""

    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
            super().__init__(params, lr, betas, eps, weight_decay)

    module = types.ModuleType("bitsandbytes.optim")
    module.AdamW8bit = AdamW8bit
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", module)
    return module


def test_bitsandbytes_gets_groups_and_options(bitsandbytes):
    model = network()
    source = torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.8, 0.9), weight_decay=0.2)
    made = package_optimizer(source, "bitsandbytes-8bit")
    assert type(made) is bitsandbytes.AdamW8bit
    assert [group["betas"] for group in made.param_groups] == [(0.8, 0.9)] * 2
    assert [p for group in made.param_groups for p in group["params"]] == list(model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "not SGD"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize"),
    ],
)
def test_what_a_package_cannot_do_is_refused(make, message):
    with pytest.raises(UnsupportedError, match=message) as caught:
        package_optimizer(make(network().parameters()), "torchao-fp8")
    assert caught.value.fix


def test_an_optimizer_that_has_stepped_is_refused():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(UnsupportedError, match="has stepped"):
        package_optimizer(optimizer, "torchao-fp8")


def test_names_and_missing_packages(monkeypatch):
    optimizer = torch.optim.AdamW(network().parameters())
    with pytest.raises(UnknownNameError, match="torchao-fp8"):
        package_optimizer(optimizer, "torchao-fp")
    table = {"nothing": ("no_such_package_here.optim", "A", "B", "")}
    monkeypatch.setattr(optimizer_packages, "PACKAGE_OPTIMIZERS", table)
    with pytest.raises(MissingDependencyError, match="no_such_package_here"):
        package_optimizer(optimizer, "nothing")
