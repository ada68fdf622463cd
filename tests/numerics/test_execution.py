"""What every execution shares: what ran is noted where it ran."""

from __future__ import annotations

import pytest
import torch

from autoprec.numerics.execution import Execution, autocast_dtype
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES


class Doubling(Execution):
    def __call__(self, input, weight, bias, *, training=True):
        out = input * 2
        self.record(out, "first", dict.fromkeys(("fprop", "dgrad", "wgrad"), "doubling"), dgrad=True, wgrad=False)
        return out


def test_dgrad_is_noted_when_the_gradient_arrives_and_not_before() -> None:
    run = Doubling(LayerPlan.uniform(BUILTIN_RECIPES["bf16"]))
    out = run(torch.ones(3, requires_grad=True), None, None)
    assert (run.executed, run.watched) == ({"fprop": "doubling"}, None)
    out.sum().backward()
    assert (run.executed, run.watched) == ({"fprop": "doubling", "dgrad": "doubling"}, "first")


def test_what_it_says_is_a_copy() -> None:
    run = Doubling(LayerPlan(), backend="mine")
    run.executed["fprop"] = "something else"
    assert run.executed == {}
    assert (run.backend, run.describe()) == ("mine", "keep")


def test_there_is_no_execution_that_computes_nothing() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Execution(LayerPlan())  # type: ignore[abstract]


def test_autocast_is_seen() -> None:
    assert autocast_dtype("cpu") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") is torch.bfloat16
