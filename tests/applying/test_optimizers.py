"""Optimizers and models find each other by their parameters."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.optimizers import optimizers_of, own_optimizer
from autoprec.errors import AutoPrecWarning
from autoprec.precision.recipes import BUILTIN_RECIPES


def policy() -> Policy:
    return Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES["fp8_delayed"]}, "default": "r"})


def test_an_optimizer_is_found_by_each_model_that_it_trains() -> None:
    large, small, other = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(n))) for n in (3, 1, 1))
    p = policy()
    for model in (small, large):
        p.apply(model)
    both = torch.optim.SGD([*small.parameters(), *large.parameters()])
    p.wrap_optimizer(both)
    assert optimizers_of(small) == optimizers_of(large) == [both]
    assert optimizers_of(other) == []


def test_the_optimizer_inside_a_wrapper_is_the_one_that_is_wrapped() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        param_groups: Any = property(lambda self: self.optimizer.param_groups)

    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    outer = Wrapper(Wrapper(inner))
    assert own_optimizer(outer) is inner
    assert own_optimizer(SimpleNamespace(optimizer=None)).optimizer is None  # type: ignore[arg-type, attr-defined]
    p = policy()
    p.apply(model)
    assert p.wrap_optimizer(outer) is outer
    assert "autoprec" in inner.state_dict()["param_groups"][0]


class Outer(torch.optim.Optimizer):
    """As SAM and Lookahead are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.base_optimizer = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


STORING = {"optimizer": {"weights": "bf16_stochastic"}}, {"optimizer": {"exp_avg": "bf16"}}
SCALING = {"activations": "fp16", "loss_scaling": "dynamic"}


@pytest.mark.parametrize("asked", [*STORING, SCALING])
def test_an_optimizer_that_is_not_wrapped_though_the_one_before_was_is_told(asked: dict[str, Any]) -> None:
    """Gradual unfreezing makes one for each stage: weights stored in BF16 would lose its small updates."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    p = Policy.model_validate(asked)
    p.apply(model)
    first = p.wrap_optimizer(torch.optim.AdamW(model.parameters()))

    def step(optimizer: torch.optim.Optimizer) -> bool:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return p.audit(model).ok

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(first)
        second = torch.optim.AdamW(model.parameters())
        p.wrap_optimizer(second)
        assert step(second)
        assert step(Outer(second)), "it steps with another one"
    third = torch.optim.AdamW(model.parameters())
    with pytest.warns(AutoPrecWarning, match="this AdamW trains what a policy has"):
        assert not step(third)
    p.wrap_optimizer(third)
    assert step(third)
