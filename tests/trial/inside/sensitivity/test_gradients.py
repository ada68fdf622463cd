"""Gradients side by side."""

from __future__ import annotations

import math

import pytest
import torch

from autoprec.trial.inside.sensitivity.gradients import Gradients, relative_error


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
    assert gradients.squares(0) == [9.0, 0.0]
    variance, size = gradients.spread(2)
    assert (variance, size) == (32.0, 9.0)
    assert math.isnan(relative_error(1.0, 0.0))
    bad = [torch.full((2,), float("nan")), None]
    assert math.isnan(gradients.compare(0, {}, bad)[0])
