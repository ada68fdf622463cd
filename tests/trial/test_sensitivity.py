"""Gradient errors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from autoprec.trial.sensitivity import Gradients, Weights, relative_error


@pytest.mark.parametrize("shared", [True, False])
def test_store_compare_and_spread(shared: bool) -> None:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    gradients = Gradients(parameters, 2, shared=shared)
    parameters[0].grad = torch.tensor([3.0, 0.0])
    gradients.store(0, {})  # the second has none: zero
    parameters[1].grad = torch.tensor([0.0, 4.0, 0.0])
    error2, norm2 = gradients.compare(0, {})
    assert (error2, norm2) == (16.0, 9.0)
    assert relative_error(error2, norm2) == pytest.approx(4 / 3)
    gradients.store(1, {id(parameters[1]): 2.0})  # clipped to half: undone
    assert gradients.compare(1, {id(parameters[1]): 2.0})[0] == 0.0
    variance, size = gradients.spread(2)
    assert (variance, size) == (32.0, 9.0)
    assert math.isnan(relative_error(1.0, 0.0))
    bad = [torch.full((2,), float("nan")), None]
    assert math.isnan(gradients.compare(0, {}, bad)[0])


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
