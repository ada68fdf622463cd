"""Phases: when they begin, what they replace, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from autoprec.errors import PolicyError, UsageError
from autoprec.policy import Policy, boundaries, diff_policies, parse_policy, policy_from_dict, resolve
from autoprec.policy.document import dump_yaml
from autoprec.policy.phases import plain_recipe

RECIPES = {"fp8": {"format": "fp8"}, "bf16": {"format": "bf16"}}


def made(*phases: dict[str, Any], **rest: Any) -> Policy:
    document = {"schema": "autoprec.policy/1", "recipes": RECIPES, "default": "fp8", **rest}
    return policy_from_dict({**document, "phases": list(phases)})


def formats(policy: Policy) -> list[list[str]]:
    """Return what the layers ``a`` and ``b`` run in each stage."""
    plans = [resolve(stage, ["a", "b"], strict=False) for stage in policy.stages]
    return [[plan.describe().split()[0] for plan in stage.values()] for stage in plans]


def test_a_phase_replaces_what_it_names_and_keeps_the_rest() -> None:
    policy = made(
        {"from": 10, "layers": [{"match": "a", "recipe": "bf16"}]},
        {"from": 0.5, "activations": "bf16"},
        {"from": 0.85, "layers": [], "default": "bf16", "optimizer": {"exp_avg": "bf16"}},
    )
    assert formats(policy) == [["fp8", "fp8"], ["bf16", "fp8"], ["bf16", "fp8"], ["bf16", "bf16"]]
    assert [stage.activations for stage in policy.stages] == ["keep", "keep", "bf16", "bf16"]
    assert [stage.optimizer.exp_avg for stage in policy.stages] == ["fp32", "fp32", "fp32", "bf16"]
    assert all(stage.phases == () for stage in policy.stages)
    assert boundaries(policy, 1000) == (0, 10, 500, 850)
    assert policy.with_stages(policy.stages).stages == policy.stages


def test_a_policy_without_phases_is_one_stage() -> None:
    policy = made()
    assert policy.stages == (policy,)
    assert boundaries(policy, None) == (0,)
    assert "phases" not in policy.to_dict()


def test_it_is_written_and_read_back() -> None:
    policy = made({"from": 200, "default": "fp8"}, {"from": 0.85, "layers": [{"match": "*", "recipe": "bf16"}]})
    text = dump_yaml(policy.to_dict())
    assert parse_policy(text) == policy
    assert [phase["from"] for phase in yaml.safe_load(text)["phases"]] == [200, 0.85]


def test_a_share_needs_the_steps_of_the_run() -> None:
    policy = made({"from": 0.85, "default": "bf16"})
    with pytest.raises(UsageError, match="85 % of the run") as found:
        boundaries(policy, None)
    assert "--run-steps" in found.value.fix
    by_step = made({"from": 200, "default": "bf16"})
    assert boundaries(by_step, None) == (0, 200)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([{"from": 0.5, "default": "fp9"}], "phases.0..default: recipe 'fp9'"),
        ([{"from": 0.5, "layers": [{"match": "*", "recipe": "fp9"}]}], "phases.0..layers.0..recipe: recipe 'fp9'"),
        ([{"from": 0.0, "default": "bf16"}], "between 0 and 1"),
        ([{"from": 1.0, "default": "bf16"}], "between 0 and 1"),
        ([{"from": 0, "default": "bf16"}], "from 1 on"),
        ([{"from": True, "default": "bf16"}], "from 1 on"),
        ([{"from": "soon", "default": "bf16"}], "from 1 on"),
        ([{"from": 0.5}], "changes nothing"),
        ([{"from": 0.5, "defualt": "bf16"}], "unknown key 'defualt'"),
        ([{"from": 0.5, "default": "bf16"}, {"from": 0.5, "default": "keep"}], "after the one before"),
        ([{"from": 20, "default": "bf16"}, {"from": 10, "default": "keep"}], "after the one before"),
        ([{"from": 0.5, "loss_scaling": "dynamic"}], "for fp16 only"),
    ],
)
def test_what_cannot_be_meant_is_refused(phases: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        made(*phases)


def test_steps_and_shares_are_put_in_order_when_the_run_is_known() -> None:
    policy = made({"from": 600, "default": "bf16"}, {"from": 0.5, "default": "keep"})
    assert boundaries(policy, 2000) == (0, 600, 1000)
    with pytest.raises(PolicyError, match="600, 500 of a run of 1000"):
        boundaries(policy, 1000)
    with pytest.raises(UsageError):
        boundaries(policy, 0)


def test_plain_bf16_has_a_name_of_its_own_where_that_is_taken() -> None:
    policy = made()
    assert plain_recipe(policy)[0] == "bf16"
    other = policy.model_copy(update={"recipes": {"bf16": policy.recipes["fp8"], "fp8": policy.recipes["fp8"]}})
    assert plain_recipe(other)[0] == "plain_bf16"


def test_a_changed_phase_is_named_by_its_beginning() -> None:
    left, right = made({"from": 0.5, "default": "bf16"}), made({"from": 0.5, "default": "keep"})
    assert diff_policies(left, right) == [("phases.from 0.5.default", "bf16", "keep")]
    assert diff_policies(left, made()) == [("phases.from 0.5.default", "bf16", None)]
