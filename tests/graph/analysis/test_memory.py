"""Memory of a step: parameters, gradients and saved tensors exact; optimizer state exact before it exists."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoprec.graph.analysis.memory import optimizer_bytes
from autoprec.graph.recorder import record_step


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        torch.optim.Adagrad,
        torch.optim.Adafactor,
        torch.optim.RMSprop,
    ],
)
def test_optimizer_state_is_predicted_exactly(make):
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    model[0].bias.requires_grad_(False)
    optimizer = make(model.parameters())
    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    predicted = optimizer_bytes(optimizer)
    handle.remove()
    assert not seen
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    assert predicted == optimizer_bytes(optimizer)


def test_an_optimizer_nobody_can_predict_is_left_out():
    class Odd(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            raise RuntimeError("needs the real thing")

    model = nn.Linear(4, 4)
    report = record_step(model, lambda: model(torch.randn(2, 4)).sum().backward(), optimizers=[Odd(model.parameters())])
    assert "optimizer" not in report.memory


def test_saved_tensors_are_counted_once_without_parameters_and_batch():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(32, 8)
    memory = record_step(model, lambda: model(x).sum().backward()).memory
    assert memory["parameters"] == memory["gradients"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert memory["saved_for_backward"] == 4 * 32 * 16  # tanh's output, which the next layer saves too


def test_frozen_parameters_have_no_gradients():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    memory = record_step(model, lambda: model(torch.randn(2, 8)).sum().backward()).memory
    assert memory["parameters"] == 2 * memory["gradients"]
