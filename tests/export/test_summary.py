"""What coarse targets need of a policy: its main recipe, and which layers fall out of it."""

from __future__ import annotations

import pytest

from autoprec.export import Request
from autoprec.export.base import Loss, Losses, RulePlan
from autoprec.export.summary import changes, distance, fast_forward, lose_layers, lose_rule, main_plan, other_dtype
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.exporters import MODELS, POLICIES


def test_the_main_plan_is_the_quantised_one_that_most_layers_run() -> None:
    policy = POLICIES["mixed"]
    layers = ("a.fc1", "a.mlp", "b.mlp", "c", "d", "e")
    assert main_plan(Request(policy, layers)) == LayerPlan.uniform(policy.recipes["fp8_tensorwise"])
    assert main_plan(Request(policy, ("a.fc1", "b.fc1", "a.mlp"))) == LayerPlan.uniform(policy.recipes["fp8_rowwise"])
    assert main_plan(Request(POLICIES["bf16"], layers)) is None


def test_without_layers_rules_are_counted() -> None:
    policy = POLICIES["rowwise but the ends"]
    assert main_plan(Request(policy)) == LayerPlan.uniform(policy.recipes["fp8_rowwise"])


def test_a_product_in_another_dtype_is_found() -> None:
    fp8, bf16 = BUILTIN_RECIPES["fp8_tensorwise"], BUILTIN_RECIPES["bf16"]
    assert not other_dtype(LayerPlan(fprop=fp8, wgrad=bf16), "bf16")
    assert other_dtype(LayerPlan(fprop=fp8, wgrad=bf16), "fp16")
    assert not other_dtype(LayerPlan(), "fp16"), "nothing is asked for"


def test_only_fprop_accumulates_fast_and_never_blocks() -> None:
    plan = fast_forward(BUILTIN_RECIPES["fp8_tensorwise"])
    assert [r is not None and r.accumulation for r in plan.recipes] == ["fast", "full", "full"]
    assert fast_forward(BUILTIN_RECIPES["fp8_block"]) == LayerPlan.uniform(BUILTIN_RECIPES["fp8_block"])


@pytest.mark.parametrize(
    ("want", "got", "words"),
    [
        ("fp8_rowwise", "fp8_tensorwise_e4m3", "one scale per tensor, scales that are not powers of two"),
        ("fp8_delayed", "bf16", "bf16"),
        ("mxfp8", "nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8", ""),
    ],
)
def test_what_changed_is_said_in_words(want: str, got: str, words: str) -> None:
    plans = [LayerPlan.uniform(BUILTIN_RECIPES[name]) for name in (want, got)]
    assert changes(*plans) == words


def test_a_change_of_one_product_names_it() -> None:
    fp8 = BUILTIN_RECIPES["fp8_tensorwise"]
    assert changes(LayerPlan.uniform(fp8), fast_forward(fp8)) == "fast accumulation in fprop"


def test_a_lost_rule_says_what_it_was() -> None:
    losses = Losses()
    lose_rule(losses, RulePlan("*head", LayerPlan(fprop=BUILTIN_RECIPES["bf16"])), "fp32")
    assert losses.found == [Loss("fprop: bf16, dgrad: keep, wgrad: keep", "fp32", "*head")]


def test_layers_lose_by_their_rule_where_all_of_them_lose_the_same() -> None:
    request = Request(POLICIES["rowwise but the ends"], MODELS["vit"])
    losses = Losses()
    lose_layers(losses, request, {name: "bf16" for name in MODELS["vit"] if "blocks" in name})
    assert [(loss.match, loss.instead) for loss in losses.found] == [("*", "bf16")]
    losses = Losses()
    lose_layers(losses, request, {"blocks.0.qkv": "bf16", "head": "fp16"})
    assert {loss.match: loss.instead for loss in losses.found} == {"blocks.0.qkv": "bf16", "*head": "fp16"}


def test_a_product_that_is_scaled_in_one_plan_alone_is_further_than_any_other_difference() -> None:
    row, tensor = (LayerPlan.uniform(BUILTIN_RECIPES[name]) for name in ("fp8_rowwise", "fp8_tensorwise"))
    assert distance(row, row) == (0, 0)
    assert distance(row, tensor) < distance(row, row.model_copy(update={"wgrad": None}))
