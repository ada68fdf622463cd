"""A stack's words: the nearest one, what differs under it, and the rule that an import makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.errors import FileError
from autoprec.export.stacks.torchao import NAMED
from autoprec.export.stacks.torchao_fqn import WORDS
from autoprec.export.words import Words, as_rule, section
from autoprec.policy import LayerPlan, Policy, policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

ROW, TENSOR, BF16 = (BUILTIN_RECIPES[name] for name in ("fp8_rowwise", "fp8_tensorwise", "bf16"))


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (LayerPlan.uniform(ROW), "rowwise"),
        (LayerPlan.uniform(TENSOR), "tensorwise"),
        (LayerPlan.uniform(BUILTIN_RECIPES["fp8_delayed"]), "tensorwise"),
        (LayerPlan.uniform(BUILTIN_RECIPES["fp8_block"]), "rowwise"),
        (
            LayerPlan(fprop=TENSOR, dgrad=TENSOR, wgrad=BF16),
            "rowwise_with_gw_hp",
        ),  # no scales count for more than which
        (LayerPlan.uniform(BUILTIN_RECIPES["nvfp4"]), ""),
        (LayerPlan.uniform(BF16), ""),
        (LayerPlan(), ""),
    ],
)
def test_the_nearest_word_is_in_low_precision_where_the_plan_is(plan: LayerPlan, word: str) -> None:
    assert NAMED.nearest(plan) == word


def test_what_differs_is_said_and_what_does_not_is_not() -> None:
    assert NAMED.lost(NAMED.plans["rowwise"], "rowwise", "bf16") == ""
    assert (
        NAMED.lost(LayerPlan.uniform(ROW), "rowwise", "bf16") == "torchao's rowwise recipe: fast accumulation in fprop"
    )
    held = NAMED.plans["rowwise_with_gw_hp"].model_copy(update={"wgrad": BF16})
    assert "one scale per tensor for dgrad's weight" in NAMED.lost(held, "rowwise_with_gw_hp", "bf16")
    assert "bf16" not in NAMED.lost(held, "rowwise_with_gw_hp", "bf16"), "bf16 is what it asks for"
    assert "fp16 in wgrad" in NAMED.lost(held, "rowwise_with_gw_hp", "fp16")
    wide = held.model_copy(update={"wgrad": BUILTIN_RECIPES["bf16_fp32_output"]})
    assert "bf16 in wgrad" in NAMED.lost(wide, "rowwise_with_gw_hp", "bf16"), "FP32 sums are lost"


def test_without_a_word_a_layer_is_in_high_precision() -> None:
    assert NAMED.lost(LayerPlan.uniform(ROW), "", "bf16") == "bf16"
    assert NAMED.lost(LayerPlan.uniform(ROW), "", "keep") == "as the script wrote it"
    assert NAMED.lost(LayerPlan.uniform(BF16), "", "bf16") == NAMED.lost(LayerPlan(), "", "bf16") == ""
    assert NAMED.lost(LayerPlan.uniform(Recipe(format="fp16")), "", "bf16", asked="fp16") == "", "activations say it"


@pytest.mark.parametrize("table", [NAMED, WORDS], ids=lambda table: table.said)
def test_a_rule_of_a_word_runs_what_the_word_does(table: Words) -> None:
    for word, plan in table.plans.items():
        recipes: dict[str, Any] = {}
        rule = as_rule("a.*", plan, recipes)
        policy: Policy = policy_from_dict({"schema": "autoprec.policy/1", "recipes": recipes, "layers": [rule]})
        assert policy.plan_of_rule(policy.layers[0]) == plan, word
        assert table.nearest(plan) == word


def test_a_section_that_is_left_out_is_empty_and_one_that_is_no_mapping_is_refused() -> None:
    assert section({"fp8": {"enabled": True}}, "fp8") == {"enabled": True}
    assert section({"fp8": None}, "fp8") == section({}, "fp8") == {}
    with pytest.raises(FileError, match="fp8 is not a mapping"):
        section({"fp8": 3}, "fp8")
