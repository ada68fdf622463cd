"""Optimizers and models find each other by their parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.optimizers import optimizers_of, own_optimizer
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
