"""Weights that are loaded while delayed scaling has a history: the first outputs are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec import Policy
from autoprec.applying.around.loading import load_execution, weights_were_loaded
from autoprec.applying.swap import execution_of
from autoprec.precision.recipes import BUILTIN_RECIPES

DELAYED = Policy.model_validate({"recipes": {"d": BUILTIN_RECIPES["fp8_delayed"]}, "default": "d"})


class Raw(nn.Module):
    """A weight that a function multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer: nn.Module = Raw() if kind == "raw" else nn.Linear(64, 64, bias=False)
    model = nn.Sequential(nn.Embedding(32, 64), nn.Sequential(layer, nn.Tanh()), nn.Linear(64, 64, bias=False))
    DELAYED.apply(model)
    return model


def tokens(step: int) -> Tensor:
    return torch.randint(0, 32, (64,), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = (model(tokens(step)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["linear", "raw"])
@pytest.mark.parametrize("factor", [1e-5, 0.03, 30.0, 3000.0])
@pytest.mark.parametrize("what", ["model", "wrapper", "layer", "embedding"])
def test_the_first_outputs_of_loaded_weights_are_right(kind: str, factor: float, what: str) -> None:
    model = made(kind)
    model(tokens(0)).sum().backward()
    changed = {
        key: value * factor if key.startswith("0") == (what == "embedding") else value.clone()
        for key, value in model.state_dict().items()
    }
    if what == "layer":
        model[1].load_state_dict({"0.weight": changed["1.0.weight"]})
        model[2].load_state_dict({"weight": changed["2.weight"]})
    elif what == "wrapper":
        nn.ModuleDict({"inner": model}).load_state_dict({f"inner.{key}": value for key, value in changed.items()})
    else:
        model.load_state_dict(changed)
    begun = made(kind)
    begun.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens(9)), begun(tokens(9)))


@pytest.mark.parametrize("order", ["weights first", "optimizer first"])
def test_a_history_of_the_same_checkpoint_stays_in_either_order(order: str) -> None:
    def run() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = made("linear")
        return model, DELAYED.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)

    model, optimizer = run()
    train(model, optimizer, 0, 4)
    held = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 4, 8)
    again, other = run()
    train(again, other, 20, 22)  # a run of its own is going on where the checkpoint is loaded
    pairs: list[tuple[Any, Any]] = [(again, held[0]), (other, held[1])]
    for one, state in pairs if order == "weights first" else reversed(pairs):
        one.load_state_dict(state)
    assert train(again, other, 4, 8) == expected


def test_what_a_checkpoint_does_not_hold_begins_anew() -> None:
    model = made("linear")
    model(tokens(0)).sum().backward()
    layer = model[2]
    run = execution_of(layer)
    now = run.state(torch.device("cpu"))
    assert any(bool(value.any()) for name, value in now.items() if name != "random")
    kept = {name: value for name, value in now.items() if name.startswith("fprop.weight")}
    load_execution(layer, "weight", run, kept, torch.device("cpu"))
    after = run.state(torch.device("cpu"))
    for name, value in after.items():
        if name != "random":
            assert torch.equal(value, kept.get(name, torch.zeros_like(value)))


def test_a_model_without_a_history_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    Policy.model_validate({"recipes": {"b": {"format": "bf16"}}, "default": "b"}).apply(model)
    model.load_state_dict(model.state_dict())
    weights_were_loaded(model, whole=True)
    assert model(torch.ones(2, 16)).shape == (2, 16)
