"""Rules on module names: first match wins, and one that matches nothing is an error."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import PolicyError, PolicyMismatchError
from autoprec.policy import (
    LayerRule,
    Policy,
    first_match,
    parse_policy,
    resolve,
    unmatched_rules,
)
from autoprec.policy.document import MAX_POLICY_BYTES
from autoprec.precision.recipes import Recipe

RECIPES = {"bf16": Recipe(format="bf16"), "fp32": Recipe(format="fp32")}


def policy(*rules: tuple[str, str], default: str = "keep", optional: bool = False) -> Policy:
    layers = tuple(LayerRule(match=match, recipe=recipe, optional=optional) for match, recipe in rules)
    return Policy(recipes=RECIPES, layers=layers, default=default)


def test_the_first_match_wins() -> None:
    rules = policy(("a.*", "bf16"), ("a.b", "fp32"), ("*", "keep")).layers
    found = first_match(rules, "a.b")
    assert found is not None
    assert found.recipe == "bf16"
    assert first_match(policy(("a", "bf16")).layers, "b") is None


def test_resolve_keeps_the_order_of_the_model() -> None:
    plans = resolve(policy(("b", "bf16"), default="fp32"), ["c", "b", "a"])
    assert list(plans) == ["c", "b", "a"]
    assert plans["b"].fprop == RECIPES["bf16"]
    assert plans["a"].wgrad == RECIPES["fp32"]


def test_a_rule_that_matches_nothing_names_the_nearest_layer() -> None:
    wrong = policy(("transformer.h.*.mlp.c_fcc", "bf16"))
    with pytest.raises(PolicyMismatchError) as caught:
        resolve(wrong, ["transformer.h.0.mlp.c_fc", "transformer.h.0.attn.c_attn", "lm_head"])
    message = str(caught.value)
    assert "'transformer.h.*.mlp.c_fcc' (nearest layer: 'transformer.h.0.mlp.c_fc')" in message
    assert "optional: true" in message
    assert caught.value.exit_code == 1


def test_a_shadowed_rule_is_no_mismatch_and_an_optional_one_neither() -> None:
    names = ["a", "b"]
    assert unmatched_rules(policy(("*", "bf16"), ("a", "fp32")), names) == []
    assert resolve(policy(("zzz", "bf16"), optional=True), names)["a"].keeps
    assert resolve(policy(("zzz", "bf16")), names, strict=False)["a"].keeps


def test_a_policy_of_another_model_lists_only_the_first_rules() -> None:
    wrong = policy(*((f"layer{i}", "bf16") for i in range(30)))
    with pytest.raises(PolicyMismatchError, match=r"30 of 30 rules match no tunable layer.*and 22 more"):
        resolve(wrong, ["head"])


@given(st.lists(st.sampled_from(["a", "b", "a.b", "a.c", "x.y.z"]), unique=True), st.permutations(["a*", "*.b", "*"]))
def test_every_layer_gets_exactly_one_plan(names: list[str], globs: list[str]) -> None:
    rules = policy(*zip(globs, ("bf16", "fp32", "keep"), strict=True))
    plans = resolve(rules, names, strict=False)
    assert list(plans) == names
    for name, plan in plans.items():
        rule = first_match(rules.layers, name)
        assert rule is not None  # "*" is among them
        assert plan == rules.plan_of_rule(rule)


def test_a_policy_of_a_mebibyte_is_loaded_and_applied_in_seconds() -> None:
    """19,443 rules: a cache of compiled globs that is too small by one compiles each of them a hundred times."""
    names = [f"blocks.{index // 4}.linear.{index % 4}" for index in range(100)]
    rows = [f"  - {{match: 'blocks.*.linear*{index}', recipe: b}}\n" for index in range(19_443)]
    text = "schema: autoprec.policy/1\nrecipes: {b: {format: bf16}}\nlayers:\n" + "".join(rows)
    began = time.process_time()
    loaded = parse_policy(text + "#" * (MAX_POLICY_BYTES - len(text)))
    with pytest.raises(PolicyMismatchError, match="of 19443 rules match no tunable layer"):
        resolve(loaded, names)
    assert {plan.fprop for plan in resolve(loaded, names, strict=False).values()} == {loaded.recipes["b"]}
    assert time.process_time() - began < 30
    with pytest.raises(PolicyError, match="at most 20000 items"):
        parse_policy(json.dumps({"schema": "autoprec.policy/1", "layers": [{"match": "a", "recipe": "keep"}] * 20_001}))
