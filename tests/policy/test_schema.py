"""The policy as data: what is valid, what is refused and with which words, what a rule means."""

from typing import Any

import pytest
from pydantic import ValidationError

from autoprec.errors import PolicyError
from autoprec.policy import LayerPlan, LayerRule, Policy, compiles, parse_policy, policy_from_dict
from autoprec.policy.diff import diff_policies
from autoprec.policy.document import lean
from autoprec.precision.recipes import BUILTIN_RECIPES

SMALL: dict[str, Any] = {
    "schema": "autoprec.policy/1",
    "recipes": {"bf16": {"format": "bf16"}, "fp8": {"format": "fp8"}},
    "layers": [
        {"match": "blocks.*.fc", "recipe": "fp8", "gemms": {"wgrad": "bf16"}},
        {"match": "head", "recipe": "keep"},
    ],
    "default": "bf16",
}


def changed(**values: Any) -> dict[str, Any]:
    return {**SMALL, **values}


def test_a_rule_gives_each_gemm_its_recipe() -> None:
    policy = policy_from_dict(SMALL)
    plan = policy.plan_of_rule(policy.layers[0])
    assert (plan.fprop, plan.dgrad, plan.wgrad) == (
        policy.recipes["fp8"],
        policy.recipes["fp8"],
        policy.recipes["bf16"],
    )
    assert policy.plan_of_rule(policy.layers[1]).keeps
    assert policy.plan_of_rule(None) == LayerPlan.uniform(policy.recipes["bf16"])
    assert plan.recipe("wgrad") is policy.recipes["bf16"]


def test_an_empty_policy_keeps_everything() -> None:
    policy = Policy()
    assert policy.plan_of_rule(None).keeps
    assert policy.activations == "keep"
    assert policy.optimizer.model_dump(exclude_defaults=True) == {}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"layer": []}, "unknown key 'layer'.*did you mean 'layers'"),
        ({"optimizer": {"exp_avgsq": "fp32"}}, "unknown key 'exp_avgsq'.*did you mean 'exp_avg_sq'"),
        ({"layers": [{"match": "a", "recipie": "bf16"}]}, "unknown key 'recipie'.*did you mean 'recipe'"),
        ({"layers": [{"match": "a", "recipe": "fp9"}]}, r"layers\[0\].recipe: recipe 'fp9'.*did you mean 'fp8'"),
        ({"layers": [{"match": "x" * 4001, "recipe": "fp8"}]}, r"layers\[0\].match"),
        ({"layers": [{"match": "a", "recipe": "fp8", "gemms": {"grad": "bf16"}}]}, "'grad' is not one of fprop"),
        ({"layers": [{"match": "a", "recipe": "fp8", "gemms": {"wgrad": "bf61"}}]}, "gemms.wgrad: recipe 'bf61'"),
        ({"default": "bf61"}, "default: recipe 'bf61'.*did you mean 'bf16'"),
        ({"activations": "bfloat16"}, "'bfloat16' is not one of keep, bf16, fp16.*did you mean 'bf16'"),
        ({"operators": {"softmax": "bf16"}}, "operators.softmax: 'bf16' is not one of keep, fp32"),
        ({"recipes": {"keep": {"format": "bf16"}}}, "'keep' is reserved"),
        ({"recipes": {"fp8": {"format": "fp8", "scale": "current"}}}, "unknown key 'scale'"),
        ({"recipes": {"fp8": {"format": "bf16", "scaling": {}}}}, "scaling has no effect with format: bf16"),
        ({"recipes": {"fp8": {"format": "fp8", "scaling": {"margin": 1}}}}, "margin has an effect with scale: delayed"),
        ({"loss_scaling": "dynamic"}, "loss_scaling: dynamic is for fp16 only"),
        ({"schema": "autoprec.policy/2"}, "'autoprec.policy/2', not 'autoprec.policy/1'"),
        ({"evidence": [1]}, "evidence"),
        ({"model": {"class": "GPT", "parameters": -1}}, "model.parameters"),
    ],
)
def test_what_is_refused_and_how_it_is_said(values: dict[str, Any], says: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy_from_dict(changed(**values), where="p.yaml")
    message = " ".join(str(caught.value).split())
    assert message.startswith("p.yaml: ")
    import re

    assert re.search(says, message), message


def test_e5m2_times_e5m2_is_refused_because_no_gpu_runs_it() -> None:
    both = {"format": "fp8", "operands": {"input": "e5m2", "weight": "e5m2", "grad_output": "e4m3"}}
    with pytest.raises(PolicyError, match="fprop would multiply e5m2 by e5m2"):
        policy_from_dict(changed(recipes={"bf16": {"format": "bf16"}, "fp8": both}))


def test_dynamic_loss_scaling_goes_with_fp16() -> None:
    policy = policy_from_dict({"schema": "autoprec.policy/1", "activations": "fp16", "loss_scaling": "dynamic"})
    assert policy.loss_scaling == "dynamic"


@pytest.mark.parametrize(
    ("executed", "expected"), [("keep", False), ("eager", False), ("compile", True), ("compile_whole", True)]
)
def test_a_policy_and_its_document_say_alike_whether_it_compiles(executed: str, expected: bool) -> None:
    document = {"schema": "autoprec.policy/1", "execution": executed}
    assert compiles(document) is compiles(policy_from_dict(document)) is expected


def test_a_policy_that_says_nothing_of_execution_compiles_nothing() -> None:
    assert not compiles({"schema": "autoprec.policy/1"})
    assert not compiles({})  # the script as written, in a duel


def test_a_policy_cannot_be_changed() -> None:
    policy = policy_from_dict(SMALL)
    with pytest.raises(ValidationError):
        policy.default = "keep"
    with pytest.raises(ValidationError):
        policy.layers[0].recipe = "keep"


@pytest.mark.parametrize("name", BUILTIN_RECIPES)
def test_every_builtin_recipe_survives_a_file(name: str) -> None:
    policy = Policy(recipes={name: BUILTIN_RECIPES[name]}, layers=(LayerRule(match="*", recipe=name),))
    assert policy_from_dict(policy.to_dict()) == policy


def test_formats_in_use_are_only_those_that_rules_name() -> None:
    policy = parse_policy(
        "schema: autoprec.policy/1\nrecipes: {a: {format: bf16}, b: {format: fp16}}\ndefault: a\n", where="x"
    )
    assert policy.uses_format("bf16")
    assert not policy.uses_format("fp16")


def test_a_policy_prints_as_one_line() -> None:
    policy = Policy.model_validate(
        {"recipes": {"bf16": {"format": "bf16"}}, "layers": [{"match": "*", "recipe": "bf16"}], "activations": "bf16"}
    )
    assert repr(policy) == str(policy) == "Policy(1 rules, recipes=['bf16'], default=keep, activations=bf16)"


def test_a_plan_says_what_it_runs() -> None:
    bf16, fp8 = BUILTIN_RECIPES["bf16"], BUILTIN_RECIPES["fp8_tensorwise"]
    assert LayerPlan.uniform(bf16).describe() == "bf16"
    assert LayerPlan(fprop=bf16, dgrad=bf16).describe() == "fprop: bf16, dgrad: bf16, wgrad: keep"
    mixed = LayerPlan(fprop=fp8, dgrad=None, wgrad=bf16)
    assert mixed.recipes == (fp8, None, bf16)
    assert mixed.scaled == (fp8,)
    assert LayerPlan.uniform(bf16).scaled == ()


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, "a tenth", None])
def test_a_share_of_the_embeddings_gradient_lies_between_nothing_and_all_of_it(share: object) -> None:
    with pytest.raises(PolicyError, match="embedding_gradient"):
        policy_from_dict(changed(embedding_gradient=share))


def test_a_shrunk_embedding_gradient_stands_in_the_file_and_its_absence_does_not() -> None:
    plain, shrunk = policy_from_dict(SMALL), policy_from_dict(changed(embedding_gradient=0.1))
    assert "embedding_gradient" not in plain.to_dict()
    assert shrunk.to_dict()["embedding_gradient"] == 0.1
    assert policy_from_dict(shrunk.to_dict()) == shrunk
    assert diff_policies(plain, shrunk) == [("embedding_gradient", None, 0.1)]
    assert lean(shrunk)["embedding_gradient"] == 0.1


def test_a_phase_may_change_the_embeddings_gradient() -> None:
    policy = policy_from_dict(changed(embedding_gradient=0.1, phases=[{"from": 0.5, "embedding_gradient": 1.0}]))
    assert [stage.embedding_gradient for stage in policy.stages] == [0.1, 1.0]
    assert policy.with_stages(policy.stages).stages == policy.stages
    with pytest.raises(PolicyError, match="embedding_gradient"):
        policy_from_dict(changed(phases=[{"from": 0.5, "embedding_gradient": 2.0}]))


def test_a_rollout_section_says_what_the_copy_that_generates_runs() -> None:
    section = {
        "layers": [{"match": "head", "recipe": "bf16"}],
        "default": "fp8",
        "activations": "fp16",
        "weights": "fp16",
    }
    policy = policy_from_dict(changed(rollout=section, operators={"norm": "keep"}, optimizer={"exp_avg": "bf16"}))
    assert policy_from_dict(policy.to_dict()) == policy
    assert policy.to_dict()["rollout"] == lean(policy)["rollout"] == section
    assert "rollout" not in policy_from_dict(SMALL).to_dict()
    side = policy.rollout_side
    assert side is not None
    assert [rule.match for rule in side.layers] == ["head"]
    assert (side.default, side.activations, side.operators.norm) == ("fp8", "fp16", "keep")
    assert (side.rollout, side.optimizer, side.phases) == (None, Policy().optimizer, ())
    assert policy_from_dict(SMALL).rollout_side is None


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"default": "fp16"}, "rollout.default: recipe 'fp16' is not defined"),
        ({"layers": [{"match": "*", "recipe": "bf16", "gemms": {"wgrad": "fp8"}}]}, "runs fprop alone"),
        ({"default": "later"}, "delayed scales"),
        ({"weights": "int8"}, "weights"),
        ({"optimizer": {}}, "optimizer"),
    ],
)
def test_what_means_nothing_to_a_copy_that_generates_is_refused(section: dict[str, Any], why: str) -> None:
    later = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "delayed"}}
    with pytest.raises(PolicyError, match=why):
        policy_from_dict(changed(recipes={**SMALL["recipes"], "later": later}, rollout=section))
