"""What changed between two policies."""

from autoprec.policy import LayerRule, OptimizerPolicy, Policy, RolloutPolicy, diff_policies
from autoprec.precision.recipes import BUILTIN_RECIPES

RECIPES = {name: BUILTIN_RECIPES[name] for name in ("bf16", "fp8_rowwise")}
A, B, C = (LayerRule(match=match, recipe="bf16") for match in "abc")


def test_equal_policies_do_not_differ() -> None:
    policy = Policy(recipes=RECIPES, layers=(A, B))
    assert diff_policies(policy, policy.model_copy()) == []


def test_changed_added_and_removed_rules() -> None:
    changed = LayerRule(match="a", recipe="fp8_rowwise", gemms={"wgrad": "bf16"})
    rows = diff_policies(Policy(recipes=RECIPES, layers=(A, B)), Policy(recipes=RECIPES, layers=(changed, C)))
    assert rows == [
        ("layers['a']", {"recipe": "bf16"}, {"recipe": "fp8_rowwise", "gemms": {"wgrad": "bf16"}}),
        ("layers['b']", {"recipe": "bf16"}, None),
        ("layers['c']", None, {"recipe": "bf16"}),
    ]


def test_order_matters_because_the_first_match_wins() -> None:
    rows = diff_policies(Policy(recipes=RECIPES, layers=(A, B)), Policy(recipes=RECIPES, layers=(B, A)))
    assert [row[0] for row in rows] == ["layers (order)"]


def test_settings_are_named_by_their_path() -> None:
    left, right = Policy(), Policy(activations="bf16", optimizer=OptimizerPolicy(exp_avg="bf16"))
    assert diff_policies(left, right) == [("activations", "keep", "bf16"), ("optimizer.exp_avg", "fp32", "bf16")]


def test_a_difference_is_symmetric() -> None:
    left, right = Policy(recipes=RECIPES, layers=(A,)), Policy(layers=(), default="keep", activations="fp16")
    forward = {where: (a, b) for where, a, b in diff_policies(left, right)}
    backward = {where: (b, a) for where, a, b in diff_policies(right, left)}
    assert forward == backward


def test_of_two_rules_with_one_glob_the_first_counts() -> None:
    behind = LayerRule(match="a", recipe="fp8_rowwise")
    rows = diff_policies(Policy(recipes=RECIPES, layers=(A, behind)), Policy(recipes=RECIPES, layers=(behind,)))
    assert rows == [("layers['a']", {"recipe": "bf16"}, {"recipe": "fp8_rowwise"})]
    assert diff_policies(Policy(recipes=RECIPES, layers=(A, behind)), Policy(recipes=RECIPES, layers=(A,))) == []


def test_rules_of_the_copy_that_generates_are_compared_as_those_of_training_are() -> None:
    left = Policy(recipes=RECIPES, layers=(A,), rollout=RolloutPolicy(layers=(A, B)))
    right = Policy(recipes=RECIPES, layers=(A,), rollout=RolloutPolicy(layers=(A,), weights="fp16"))
    assert diff_policies(left, right) == [
        ("rollout.layers['b']", {"recipe": "bf16"}, None),
        ("rollout.weights", None, "fp16"),
    ]
    assert diff_policies(Policy(), Policy(rollout=RolloutPolicy(activations="bf16"))) == [
        ("rollout.activations", None, "bf16")
    ]
