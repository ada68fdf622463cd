import math

import pytest
import torch

from autoprec.optim.guard import StepGuard, gradient_norm


def optimizer(value: float) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    return torch.optim.SGD(parameters, lr=0.1)


def test_the_norm_is_over_all_gradients():
    parameters = optimizer(2.0).param_groups[0]["params"]
    assert gradient_norm(parameters) == pytest.approx(2 * math.sqrt(7))
    assert gradient_norm([]) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_gradients_are_refused_and_counted(bad):
    guard = StepGuard()
    assert guard.admits(optimizer(1.0))
    assert not guard.admits(optimizer(bad))
    assert (guard.skipped, guard.nonfinite) == (1, 1)


def test_an_outlier_is_refused_once_enough_was_seen():
    guard = StepGuard(outlier=10.0)
    assert guard.admits(optimizer(1e6))  # nothing known yet
    for _ in range(20):
        assert guard.admits(optimizer(1.0))
    assert not guard.admits(optimizer(50.0))
    assert guard.admits(optimizer(5.0))
    assert guard.skipped == 1
    assert guard.nonfinite == 0


def test_outliers_that_stay_are_the_new_normal():
    guard = StepGuard(outlier=10.0, limit=3)
    for _ in range(10):
        guard.admits(optimizer(1.0))
    assert [guard.admits(optimizer(1e3)) for _ in range(5)] == [False, False, False, True, True]


def test_by_default_only_non_finite_gradients_are_refused():
    guard = StepGuard()
    for value in (1.0,) * 20 + (1e12,):
        assert guard.admits(optimizer(value))


def test_a_step_that_the_scaler_found_infinite_is_refused():
    guard, made = StepGuard(), optimizer(1.0)
    made.found_inf = torch.ones(1)
    assert not guard.admits(made)
    assert guard.skipped == 1
