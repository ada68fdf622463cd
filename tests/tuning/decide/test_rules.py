from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoprec.policy import glob_matches
from autoprec.tuning.decide.rules import GlobTable, compact_rules, layer_rules, recipes_in

NAMES = [f"h.{b}.{leaf}" for b in range(12) for leaf in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")] + ["lm_head"]
TABLE = GlobTable(NAMES)


def outcome(rules: list[tuple[str, str]], name: str, default: str) -> str:
    return next((choice for glob, choice in rules if glob_matches(glob, name)), default)


@given(st.lists(st.sampled_from(["keep", "bf16", "fp8"]), min_size=len(NAMES), max_size=len(NAMES)))
def test_rules_say_exactly_the_assignment(choices: list[str]) -> None:
    assignment = dict(zip(NAMES, choices, strict=True))
    rules = compact_rules(TABLE, assignment, "keep")
    assert {name: outcome(rules, name, "keep") for name in NAMES} == assignment
    assert all(any(glob_matches(glob, name) for name in NAMES) for glob, _ in rules)


def test_what_a_person_would_write_is_what_comes_out() -> None:
    assignment = {name: "fp8" if ".mlp." in name else "bf16" for name in NAMES}
    assert compact_rules(TABLE, assignment, "keep") == [("h.*.mlp.*", "fp8"), ("*", "bf16")]
    assert compact_rules(TABLE, dict.fromkeys(NAMES, "bf16"), "keep") == [("*", "bf16")]
    assert compact_rules(TABLE, dict.fromkeys(NAMES, "keep"), "keep") == []


def test_an_exception_stands_before_the_rule_it_breaks() -> None:
    assignment = dict.fromkeys(NAMES, "fp8") | {"lm_head": "bf16", "h.3.mlp.up": "bf16"}
    rules = compact_rules(TABLE, assignment, "keep")
    assert rules[-1] == ("*", "fp8")
    assert {glob for glob, _ in rules[:-1]} == {"lm_head", "h.3.mlp.up"}


def test_one_block_is_one_rule() -> None:
    assignment = {name: "bf16" if name.startswith("h.0.") else "fp8" for name in NAMES}
    assert compact_rules(TABLE, assignment, "keep") == [("h.0.*", "bf16"), ("*", "fp8")]


def test_names_with_glob_characters_are_taken_literally() -> None:
    names = ["a[0]", "a0", "b*c", "bxc"]
    assignment = {"a[0]": "x", "a0": "y", "b*c": "x", "bxc": "y"}
    rules = compact_rules(GlobTable(names), assignment, "keep")
    assert {name: outcome(rules, name, "keep") for name in names} == assignment


def test_a_rule_that_exempts_what_no_policy_reaches_may_match_nothing() -> None:
    choices = {name: "fp8/wgrad=bf16" for name in NAMES if name != "h.3.mlp.up"}
    exempt, general = layer_rules(TABLE, choices, list(choices))
    assert (exempt.match, exempt.recipe, exempt.optional) == ("h.3.mlp.up", "keep", True)
    assert (general.recipe, general.gemms, general.optional) == ("fp8", {"wgrad": "bf16"}, False)
    assert recipes_in([*choices.values(), "keep"]) == {"fp8", "bf16"}
    assert not any(rule.optional for rule in layer_rules(TABLE, choices, NAMES))
