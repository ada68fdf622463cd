"""What coarse targets need of a policy: its main recipe, and which layers fall out of it."""

from __future__ import annotations

import pytest

from autoprec.export import Request
from autoprec.export.base import Losses
from autoprec.export.summary import changes, distance, fast_forward, fitted, lose, main_plan
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


def test_high_precision_is_the_dtype_of_the_target() -> None:
    fp8, bf16 = BUILTIN_RECIPES["fp8_tensorwise"], BUILTIN_RECIPES["bf16"]
    plan, runs = LayerPlan(fprop=fp8, dgrad=fp8, wgrad=bf16), LayerPlan(fprop=fp8, dgrad=fp8)
    assert changes(plan, runs, "bf16") == changes(plan, runs, "fp16", asked="bf16") == ""
    assert changes(plan, runs, "fp16") == "fp16 in wgrad"
    assert changes(plan, LayerPlan(), "keep") == "as the script wrote it"
    assert changes(LayerPlan(), LayerPlan(), "fp16") == "", "nothing is asked for"


def test_a_layer_with_a_scaled_product_has_the_others_in_the_dtype_of_the_activations() -> None:
    row, bf16, fp32, tf32 = (BUILTIN_RECIPES[name] for name in ("fp8_rowwise", "bf16", "fp32", "tf32"))
    assert fitted(LayerPlan(fprop=row, dgrad=fp32), lambda _: row, "bf16") == LayerPlan(fprop=row)
    assert fitted(LayerPlan(fprop=row, dgrad=fp32), lambda _: bf16, "bf16") == LayerPlan.uniform(bf16), "of its fprop"
    assert fitted(LayerPlan(fprop=bf16), lambda _: row, "bf16") == LayerPlan(fprop=bf16), "all are the activations'"
    assert fitted(LayerPlan.uniform(tf32), lambda _: row, "bf16") == LayerPlan.uniform(fp32)


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
    assert changes(*plans, "bf16") == words


def test_a_change_of_one_product_names_it() -> None:
    fp8 = BUILTIN_RECIPES["fp8_tensorwise"]
    assert changes(LayerPlan.uniform(fp8), fast_forward(fp8), "bf16") == "fast accumulation in fprop"


def test_layers_lose_by_their_rule_what_most_of_them_lose() -> None:
    request = Request(POLICIES["rowwise but the ends"], MODELS["vit"])
    losses = Losses()
    lose(losses, request, lambda _, name: "bf16" if "blocks" in name else "", "no words")
    assert [(loss.match, loss.instead) for loss in losses.found] == [("*", "bf16: no words")]
    losses = Losses()
    lose(losses, request, lambda _, name: {"blocks.0.qkv": "bf16", "head": "fp16"}.get(name, ""))
    assert {loss.match: loss.instead for loss in losses.found} == {"blocks.0.qkv": "bf16", "*head": "fp16"}
    losses = Losses()
    lose(losses, Request(request.policy), lambda plan, name: name or plan.describe())
    assert [loss.match for loss in losses.found] == ["*head", "*embed", "0", "*"], "no layers are known: all rules"


def test_a_product_that_is_scaled_in_one_plan_alone_is_further_than_any_other_difference() -> None:
    row, tensor = (LayerPlan.uniform(BUILTIN_RECIPES[name]) for name in ("fp8_rowwise", "fp8_tensorwise"))
    assert distance(row, row) == (0, 0)
    assert distance(row, tensor) < distance(row, row.model_copy(update={"wgrad": None}))
