"""The section of a policy that a choice of the rollout side comes to."""

from __future__ import annotations

import pytest

from autoprec.policy import LayerRule
from autoprec.policy.rollout import section
from autoprec.precision.recipes import BUILTIN_RECIPES

RULES = [
    LayerRule(match="*.mlp.*", recipe="fp8_delayed", gemms={"wgrad": "bf16"}),
    LayerRule(match="*", recipe="fp8_rowwise", gemms={"fprop": "bf16"}),
]


@pytest.mark.parametrize("value", ["bf16", "fp16"])
def test_a_dtype_is_that_of_weights_and_products_whatever_training_runs(value: str) -> None:
    side, own = section(value, RULES, BUILTIN_RECIPES, "bf16")
    assert side is not None
    assert (side.to_dict(), own) == ({"activations": value, "weights": value}, {})


def test_the_same_is_what_training_runs_forward_by_scales_that_need_no_history() -> None:
    side, own = section("same", RULES, BUILTIN_RECIPES, "bf16")
    assert side is not None
    assert side.to_dict() == {
        "layers": [{"match": "*.mlp.*", "recipe": "fp8_delayed_current"}, {"match": "*", "recipe": "bf16"}],
        "activations": "bf16",
        "weights": "bf16",
    }
    (recipe,) = own.values()
    assert recipe.scaling is not None
    assert (recipe.format, recipe.scaling.scale, recipe.scaling.granularity) == ("fp8", "current", "tensor")


def test_nothing_is_said_of_a_copy_that_stays_as_written() -> None:
    assert section("keep", RULES, BUILTIN_RECIPES, "bf16") == section("same", [], BUILTIN_RECIPES, "keep") == (None, {})
