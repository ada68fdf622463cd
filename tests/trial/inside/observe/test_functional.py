"""Gradients that are returned instead of stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.trial.inside.observe.hooks import Events, Hooks
from autoprec.trial.protocol import Probe, ScanSpec, TrainSpec
from tests.trial.conftest import uniform


class Seen(Events):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.losses, self.norms, self.transforms = model, list[float](), list[float](), 0

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.losses += [float(t.detach()) for t in tensors]

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.norms.append(sum(float(p.grad.detach().norm()) for p in self.model.parameters() if p.grad is not None))

    def transformed(self) -> None:
        self.transforms += 1


@pytest.fixture
def seen() -> Iterator[Seen]:
    hooks = Hooks()
    hooks.install()
    hooks.events = Seen(nn.Linear(4, 3))
    yield hooks.events
    hooks.remove()


X = torch.ones(2, 4)


def test_gradients_by_parameters_are_a_backward(seen: Seen) -> None:
    loss = seen.model(X).square().mean()
    found = torch.autograd.grad(loss, list(seen.model.parameters()))
    assert seen.losses == [float(loss.detach())]
    assert seen.norms == [pytest.approx(sum(float(g.norm()) for g in found))]
    assert all(p.grad is None for p in seen.model.parameters())  # only lent


def test_gradients_by_inputs_and_higher_ones_are_not(seen: Seen) -> None:
    x = X.clone().requires_grad_()
    torch.autograd.grad(seen.model(x).sum(), x)
    torch.autograd.grad(seen.model(X).square().sum(), list(seen.model.parameters()), create_graph=True)
    assert seen.losses == []


def test_a_functional_call_lends_to_the_module(seen: Seen) -> None:
    weights = {name: (2 * p.detach()).requires_grad_() for name, p in seen.model.named_parameters()}
    loss = torch.func.functional_call(seen.model, weights, (X,)).square().mean()
    torch.autograd.grad(loss, list(weights.values()))
    assert seen.losses == [float(loss.detach())]
    assert seen.norms[0] > 0
    assert seen.transforms == 0


def test_a_transform_is_reported(seen: Seen) -> None:
    weights = {name: p.detach() for name, p in seen.model.named_parameters()}
    torch.func.grad(lambda w: torch.func.functional_call(seen.model, w, (X,)).square().mean())(weights)
    assert seen.transforms == 1


@pytest.mark.parametrize("script", ["functional.py", "functional_outside.py"])
def test_weights_beside_the_module_are_seen_in_its_graph_and_scanned(script: str, host: Any) -> None:
    probes = (Probe("none", {"schema": "autoprec.policy/1"}), Probe("bf16", uniform("bf16")))
    with host(script) as runner:
        graph = runner.run(TrainSpec(steps=2, warmup=0, record_graph=True)).answer
        scan = runner.run(ScanSpec(warmup=1, probes=probes)).answer
    assert graph.tunable_flops_share == 1.0
    assert [layer.name for layer in graph.layers if layer.tunable] == ["up", "mid", "head"]
    rows = {row.id: row.gradient_error for row in scan.probes}
    assert rows["none"] == 0.0
    assert 0 < rows["bf16"] < 0.1
    assert scan.gradient_noise > 0.05
