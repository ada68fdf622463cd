import math

import pytest
import torch

from autoprec.applying.state import carry_state
from autoprec.optim.guard import StepGuard, gradient_norm, only_makes_state
from autoprec.optim.loss_scaling import LossScaler
from autoprec.optim.optimizer import skipped_steps, wrap_optimizer
from autoprec.policy import OptimizerPolicy, Policy


def optimizer(value: float) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    return torch.optim.SGD(parameters, lr=0.1)


def test_the_norm_is_over_all_gradients():
    parameters = optimizer(2.0).param_groups[0]["params"]
    assert gradient_norm(parameters) == pytest.approx(2 * math.sqrt(7))
    assert gradient_norm([]) == 0.0


def test_the_norm_is_over_gradients_of_any_dtype():
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float64, torch.complex64)]
    parameters += [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    assert gradient_norm(parameters) == pytest.approx(math.sqrt(24))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_gradients_are_refused_and_counted(bad):
    guard = StepGuard()
    assert guard.admits(optimizer(1.0))
    assert not guard.admits(optimizer(bad))
    assert (guard.skipped, guard.nonfinite) == (1, 1)


def test_by_default_only_non_finite_gradients_are_refused():
    guard = StepGuard()
    for value in (1.0,) * 20 + (1e12,):
        assert guard.admits(optimizer(value))


def test_a_step_that_the_scaler_found_infinite_is_refused():
    guard, made = StepGuard(), optimizer(1.0)
    made.found_inf = torch.ones(1)
    assert not guard.admits(made)
    assert guard.skipped == 1


def stored() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A model whose optimizer stores its momentum low, and so guards its steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, wrap_optimizer(made, Policy(optimizer=OptimizerPolicy(exp_avg="bf16")), model)


def grads(model: torch.nn.Sequential, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_a_skipped_step_changes_neither_weights_nor_momentum_and_its_gradient_comes_back():
    model, made = stored()
    grads(model, 1.0)
    made.step()
    before = [p.detach().clone() for p in model.parameters()]
    momentum = [made.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    grads(model, math.inf)
    made.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(
        torch.equal(made.state[p]["momentum_buffer"], m) for p, m in zip(model.parameters(), momentum, strict=True)
    )
    assert float(model[1].bias.grad[0]) == math.inf
    assert skipped_steps(made) == 1
    wrap_optimizer(made, OptimizerPolicy())
    made.step()
    assert not torch.isfinite(model[1].bias).all(), "nothing guards it any more"


def test_counts_travel_in_checkpoints():
    model, made = stored()
    for value in (1.0, math.nan):
        grads(model, value)
        made.step()
    again, other = stored()
    carry_state(made, model)
    carry_state(other, again)
    other.load_state_dict(made.state_dict())
    assert skipped_steps(other) == 1


@pytest.mark.parametrize("way", ["positional", "named"])
def test_gradients_that_a_closure_makes_are_guarded(way: str) -> None:
    """As Lightning hands them over: when ``step`` begins, they are those of the step before, or none."""
    model, made = stored()
    scaled, optimizer = stored()
    wrap_optimizer(optimizer, OptimizerPolicy())
    scaler = LossScaler.install(scaled, [optimizer])

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
        def closure() -> float:
            grads(model, value)
            return value

        optimizer.step(closure) if way == "positional" else optimizer.step(closure=closure)

    for value in (1.0, math.inf, 1.0):
        before = model[1].weight.detach().clone()
        step(model, made, value)
        assert torch.equal(before, model[1].weight) is (value == math.inf)
    for value in (1.0, float("inf"), 1.0):
        step(scaled, optimizer, value)
    assert (skipped_steps(made), scaler.skipped_steps, scaler.scale) == (1, 1, 2.0**15)
    assert torch.isfinite(scaled[1].weight).all()


@pytest.mark.parametrize(
    ("rate", "made"),
    [
        (0.0, True),
        (0.1, False),
        (torch.tensor(0.0), True),
        (torch.tensor(0.1), False),
        (torch.empty((), device="meta"), False),
    ],
)
def test_a_rate_that_lies_on_a_device_is_not_read(rate, made):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.param_groups[0]["lr"], weight.grad = rate, torch.zeros(3)
    assert only_makes_state(optimizer) is made  # a value of the device "meta" cannot be read at all
