"""What coarse targets need of a policy: its main recipe, and which layers fall out of it."""

from __future__ import annotations

import pytest

from autoprec.export import Request
from autoprec.export.base import Loss, Losses, RulePlan
from autoprec.export.summary import high_dtype, lose_rule, main_plan, matching_layers
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.testing.exporters import MODELS, POLICIES


def test_the_main_plan_is_the_quantised_one_that_most_layers_run() -> None:
    policy = POLICIES["mixed"]
    layers = ("a.fc1", "a.mlp", "b.mlp", "c", "d", "e")
    assert main_plan(Request(policy, layers)) == LayerPlan.uniform(policy.recipes["fp8_tensorwise"])
    assert main_plan(Request(policy, ("a.fc1", "b.fc1", "a.mlp"))) == LayerPlan.uniform(policy.recipes["fp8_rowwise"])
    assert main_plan(Request(POLICIES["bf16"], layers)) is None


def test_without_layers_rules_are_counted() -> None:
    policy = POLICIES["rowwise but the ends"]
    assert main_plan(Request(policy)) == LayerPlan.uniform(policy.recipes["fp8_rowwise"])


def test_every_layer_is_decided_by_one_rule() -> None:
    request = Request(POLICIES["mixed"], MODELS["gpt"])
    found = [matching_layers(request, index) for index in range(len(request.rules()))]
    assert sorted(name for names in found for name in names) == sorted(MODELS["gpt"])
    rules = [rule.match for rule in request.rules()]
    assert found[rules.index("*head")] == ("lm_head",)
    fc = found[rules.index("*fc*")]
    assert len(fc) == 3
    assert all("mlp" in name for name in fc), "the earlier rule has them, although *mlp* matches as well"


@pytest.mark.parametrize(
    ("fprop", "dtype"), [("bf16", "bf16"), ("fp32", "fp32"), ("fp8_tensorwise", "fp16"), (None, "fp16")]
)
def test_a_layers_high_dtype_is_that_of_its_fprop_or_of_the_activations(fprop: str | None, dtype: str) -> None:
    plan = LayerPlan(fprop=BUILTIN_RECIPES[fprop] if fprop else None, wgrad=BUILTIN_RECIPES["fp32"])
    assert high_dtype(Request(POLICIES["fp16"]), plan) == dtype


def test_a_lost_rule_says_what_it_was() -> None:
    losses = Losses()
    lose_rule(losses, RulePlan("*head", LayerPlan(fprop=BUILTIN_RECIPES["bf16"])), "fp32")
    assert losses.done() == (Loss("fprop: bf16, dgrad: keep, wgrad: keep", "fp32", "*head"),)
