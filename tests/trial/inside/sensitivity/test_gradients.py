"""Gradients side by side."""

from __future__ import annotations

import math

import pytest
import torch

from autoprec.trial.inside.sensitivity.gradients import Gradients, relative_error


@pytest.mark.parametrize("shared", [True, False])
def test_store_compare_and_fold(shared: bool) -> None:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    gradients = Gradients(parameters, shared=shared)
    parameters[0].grad = torch.tensor([3.0, 0.0])
    gradients.store({})  # the second has none: zero
    parameters[1].grad = torch.tensor([0.0, 4.0, 0.0])
    error2, norm2 = gradients.compare({})
    assert (error2, norm2) == (16.0, 9.0)
    assert relative_error(error2, norm2) == pytest.approx(4 / 3)
    assert gradients.squares() == [9.0, 0.0]
    gradients.leave_shared()
    assert gradients.fold(1, {id(parameters[1]): 2.0}) == 32.0  # clipped to half: undone; the variance of the two
    assert gradients.squares() == [9.0, 16.0]  # of their mean
    assert math.isnan(relative_error(1.0, 0.0))
    bad = [torch.full((2,), float("nan")), None]
    assert math.isnan(gradients.compare({}, bad)[0])


@pytest.mark.parametrize("conjugate", [False, True])
def test_the_imaginary_part_of_a_gradient_counts(conjugate: bool) -> None:
    parameters = [torch.zeros(2, dtype=torch.complex64, requires_grad=True)]
    gradients = Gradients(parameters)
    gradients.store({}, [torch.tensor([3 + 4j, 0])])
    assert gradients.squares() == [25.0]
    other = torch.tensor([3 + 4j, 0])
    assert gradients.compare({}, [other.conj() if conjugate else other]) == (64.0 if conjugate else 0.0, 25.0)
