"""Gradient errors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.sensitivity.scan import StateSample, Weights, hardly_moved


def lost(start: list[float], update: list[float]) -> float:
    parameter = torch.nn.Parameter(torch.tensor(start))
    kept = Weights(SimpleNamespace(parameters=[parameter]))  # type: ignore[arg-type]
    with torch.no_grad():
        parameter += torch.tensor(update)
    return kept.lost_in_bf16()


def test_an_update_below_half_a_step_of_the_weight_is_lost() -> None:
    step = 2.0**-7  # between neighbours of bfloat16 at 1
    assert lost([1.0, 1.0], [0.4 * step, 0.4 * step]) == 1.0
    assert lost([1.0, 1.0], [0.6 * step, 2 * step]) == 0.0
    assert lost([1.0, 1.0, 0.001], [0.25 * step, -0.75 * step, step]) == pytest.approx(0.125)
    assert math.isnan(lost([1.0], [0.0]))


def test_a_slow_second_moment_does_not_move_in_bf16() -> None:
    """Adam's second moment at beta2 = 0.999 changes by at most 0.1 % a step; bfloat16 is 0.4 to 0.8 % apart."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(300, 1000))
    found = SimpleNamespace(optimizers=[torch.optim.Adam([parameter], betas=(0.9, 0.999))])
    assert StateSample(found).lost_in_bf16() == {}  # type: ignore[arg-type]  # no step yet, no state
    for _ in range(30):
        parameter.grad = torch.randn_like(parameter)
        found.optimizers[0].step()
    for state in found.optimizers[0].state.values():  # as after a long run: every step is a small share
        state["exp_avg_sq"].fill_(1.0)
    sample = StateSample(found)  # type: ignore[arg-type]
    parameter.grad = torch.randn_like(parameter)
    found.optimizers[0].step()
    shares = sample.lost_in_bf16()
    assert set(shares) == {"exp_avg", "exp_avg_sq"}
    assert shares["exp_avg"] < 0.05
    assert 0.3 < shares["exp_avg_sq"] < 0.95  # a few squared gradients are ten times the mean and more


def test_only_a_sample_of_large_state_is_copied() -> None:
    parameter = torch.nn.Parameter(torch.randn(1000, 1000))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    ((name, _, kept),) = StateSample(SimpleNamespace(optimizers=[optimizer]))._kept  # type: ignore[arg-type]
    assert name == "momentum_buffer"
    assert StateSample.VALUES <= kept.numel() < 1.1 * StateSample.VALUES


def test_layers_behind_a_projection_that_begins_at_zero_have_no_gradient_to_judge_by() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    found = Found([model], [], list(model.parameters()))
    assert hardly_moved(found, [1.0, 0.1, 1.0, 0.1, 0.5, 0.5]) == []
    assert hardly_moved(found, [1e-5, 0.1, 1.0, 0.1, 0.5, 0.5]) == ["0"]
    assert hardly_moved(found, [0.0, 0.0, 0.0, 0.1, 0.5, 0.5]) == ["0", "1"]
    model[0].weight.requires_grad_(False)  # frozen: nothing of it is ever to be judged
    found = Found([model], [], [p for p in model.parameters() if p.requires_grad])
    assert hardly_moved(found, [0.1, 0.0, 0.1, 0.5, 0.5]) == ["1"]
