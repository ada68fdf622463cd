"""Names of plans, and Python source written from data: unique, and equal to the data when it is read back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.export import Request
from autoprec.export.base import RulePlan
from autoprec.export.naming import expert, header, literal, name_plans, recipe_name, rule_table, substrings
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.exporters import MODELS, POLICIES

DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(DATA)
def test_data_written_as_python_reads_back_as_the_same_data(value: Any) -> None:
    assert eval(literal(value)) == value


def test_every_distinct_plan_has_its_own_name_and_it_is_a_python_name() -> None:
    bf16, fp8 = BUILTIN_RECIPES["bf16"], BUILTIN_RECIPES["fp8_tensorwise"]
    policy = POLICIES["bf16"].model_copy(update={"recipes": {"8 bit": fp8, "8-bit": BUILTIN_RECIPES["fp8_rowwise"]}})
    plans = [
        LayerPlan.uniform(fp8),
        LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]),
        LayerPlan(fprop=fp8, dgrad=fp8, wgrad=bf16),
        LayerPlan.uniform(None),
        LayerPlan.uniform(fp8),
    ]
    names = name_plans(policy, [RulePlan("*", plan) for plan in plans])
    assert len(names) == len(set(names.values())) == 4
    assert all(name.isidentifier() for name in names.values())
    assert names[plans[3]] == "keep"
    assert names[plans[0]] == "plan_8_bit"
    assert names[plans[1]] == "plan_8_bit_", "the same name once both are Python names"


def test_a_recipe_keeps_the_name_the_policy_gave_it() -> None:
    policy = POLICIES["delayed"]
    assert recipe_name(policy, policy.recipes["fp8_delayed"]) == "fp8_delayed"
    assert recipe_name(policy, None) == "keep"
    assert recipe_name(policy, BUILTIN_RECIPES["mxfp8"]) == "mxfp8", "by its format where the policy has no name for it"


@pytest.mark.parametrize("model", MODELS)
def test_the_rule_table_gives_each_layer_the_plan_that_the_policy_does(model: str) -> None:
    request = Request(POLICIES["mixed"], MODELS[model])
    names = name_plans(request.policy, request.rules())
    table = eval(rule_table(request.rules(), names))
    for layer, plan in request.plans().items():
        found = next(name for pattern, name in table if re.fullmatch(pattern, layer, re.DOTALL))
        assert found == names[plan]


@given(st.text())
def test_no_name_ends_the_comment_it_stands_in(name: str) -> None:
    text = header(Request(POLICIES["bf16"], name=name), "torchao")
    assert text.splitlines() == [text.rstrip("\n")]
    assert text.startswith("# torchao form of the AutoPrec policy ")


def test_substrings_do_not_catch_their_neighbours() -> None:
    layers = [f"layers.{i}.w" for i in range(12)]
    found, stuck = substrings(["layers.1.w"], [name for name in layers if name != "layers.1.w"])
    assert stuck == []
    assert [name for name in layers if any(part in name for part in found)] == ["layers.1.w"]


def test_what_no_substring_separates_is_said() -> None:
    assert substrings(["w"], ["w1"]) == ([], ["w"])


def test_grouped_experts_are_known_by_their_name() -> None:
    assert expert("layers.1.moe.routed_experts.inner_experts")
    assert not expert("layers.1.feed_forward.w1")
