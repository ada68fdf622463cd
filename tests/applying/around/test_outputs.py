"""What a model returns is widened, and what is not is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

from autoprec import Policy
from autoprec.applying.around.outputs import each_tensor, holds_low, unwidened, widened


def test_outputs_of_any_nesting_are_widened() -> None:
    low = torch.ones(2, dtype=torch.bfloat16)

    @dataclasses.dataclass(frozen=True)
    class Output:
        logits: torch.Tensor

    given = Output(low)
    assert holds_low(given)
    assert (each_tensor(given, widened).logits.dtype, given.logits.dtype) == (torch.float32, torch.bfloat16)
    found = each_tensor({"a": [low, (low, 3)], "b": torch.ones(1, dtype=torch.long)}, widened)
    assert found["a"][0].dtype is found["a"][1][0].dtype is torch.float32
    assert found["b"].dtype is torch.long


class Returning(nn.Module):
    """A model that returns what ``make`` makes of its product, as policies of reinforcement learning do."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(8, 4), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


def _normal(mean: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.Normal(mean, torch.ones_like(mean)), 1)


def _squashed(mean: Tensor) -> distributions.Distribution:
    return distributions.TransformedDistribution(_normal(mean), [distributions.AffineTransform(mean, 2.0)])


@pytest.mark.parametrize(
    "make", [_normal, _squashed, lambda out: distributions.Bernoulli(logits=out), lambda out: SimpleNamespace(out=out)]
)
def test_a_distribution_that_a_model_returns_is_widened(make: Callable[[Tensor], Any]) -> None:
    model, policy = Returning(make), Policy.model_validate({"activations": "bf16"})
    policy.apply(model)
    found = model(torch.randn(3, 8))
    assert not holds_low(found)
    if isinstance(found, distributions.Distribution):
        assert type(found) is type(make(torch.zeros(3, 4)))
        assert found.log_prob(torch.ones(3, 4)).dtype is torch.float32
    assert policy.audit(model).operators["output"]["executed"] == "fp32"


class Cache:
    """What a script goes on to write to."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def test_an_object_of_the_script_stays_as_it_is_and_is_told() -> None:
    model, policy = Returning(Cache), Policy.model_validate({"activations": "bf16"})
    policy.apply(model)
    assert model(torch.randn(3, 8)).keys.dtype is torch.bfloat16
    row = policy.audit(model).operators["output"]
    assert (row["executed"], "of the Cache that the model returns stay" in row["reason"]) == ("bf16", True)
    assert [unwidened(other) for other in (Cache(torch.ones(2)), torch.ones(2), None, [], SimpleNamespace())] == [
        ""
    ] * 5
