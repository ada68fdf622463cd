from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import NothingAcceptableError, UsageError
from autoprec.graph.report import Operator
from autoprec.policy import ImplementationPolicy, OptimizerPolicy, resolve
from autoprec.policy.space import load_space, space_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Recipe
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import UNFUSED, Problem, layer_key
from autoprec.tuning.decide.table import SensitivityTable, parameter_probes, plan_probes
from tests.tuning.models import even_space, gpt, linear, report

HOPPER = Problem.build(gpt(), even_space("hopper-fp8"))
CPU = Problem.build(gpt(), load_space("cpu"))
ATTENTION = Operator(
    "x_0", "h", "aten::_scaled_dot_product_flash_attention", "forward", "attention", "follow", "", (), (), 0, 0
)


def test_tables_follow_groups_and_choices() -> None:
    table = HOPPER.table(lambda _group, choice: float(len(choice)))
    assert table.shape == (17, 7) == HOPPER.allowed.shape
    assert np.isfinite(table).all()
    assert set(HOPPER.distributions()) == {layer_key(g.name) for g in HOPPER.groups} | set(HOPPER.parameters)


@given(st.data())
def test_a_policy_resolves_to_exactly_the_plans(data: st.DataObject) -> None:
    params = {name: data.draw(st.sampled_from(d.choices)) for name, d in HOPPER.distributions().items()}
    policy = HOPPER.policy(params)
    names = [layer.name for layer in HOPPER.report.layers]
    if HOPPER.is_autocast(params):
        assert not policy.layers  # torch.autocast itself
    else:
        assert resolve(policy, names) == HOPPER.plans(params)
    index = HOPPER.indices(params)
    assert HOPPER.from_indices(index, params) == params


def test_parameters_reach_the_recipe_in_the_policy() -> None:
    params = HOPPER.params_of("fp8_delayed", **{"fp8_delayed.scaling.amax_history_len": 64})
    recipe = HOPPER.policy(params).recipes["fp8_delayed"]
    assert recipe.scaling is not None
    assert recipe.scaling.amax_history_len == 64


def test_a_parameter_of_a_recipe_that_does_not_run_makes_no_difference() -> None:
    name = "fp8_delayed.scaling.amax_history_len"
    idle = HOPPER.params_of("fp8_rowwise")
    assert HOPPER.key(idle) == HOPPER.key(idle | {name: 64})
    used = HOPPER.params_of("fp8_delayed")
    assert HOPPER.key(used) != HOPPER.key(used | {name: 64})


def test_attention_in_the_scripts_own_dtype_makes_no_difference() -> None:
    rows = (replace(ATTENTION, dtypes=("fp32", "fp32", "fp32", "bool")),)
    found = Problem.build(replace(gpt(), operators=rows), load_space("cpu"))
    for choice, activations in itertools.product(("keep", "bf16"), ("keep", "bf16")):
        kept, named = (found.params_of(choice, activations=activations, attention=a) for a in ("keep", "fp32"))
        assert (found.key(kept) == found.key(named)) == (activations == "keep")  # autocast hands it 16 bits
        low = found.params_of(choice, activations=activations, attention="bf16")
        assert (found.key(kept) == found.key(low)) == (activations == "bf16")
    assert found.is_script(found.params_of("keep", attention="fp32"))
    low = Problem.build(replace(gpt(), operators=(replace(ATTENTION, dtypes=("bf16",) * 3),)), load_space("cpu"))
    assert low.key(low.params_of("keep", attention="fp32")) != low.key(low.params_of("keep"))
    assert not low.is_script(low.params_of("keep", attention="fp32"))


def test_all_16_bits_under_autocast_is_autocast_itself_with_the_lists_of_the_device() -> None:
    policy = CPU.policy(CPU.params_of("bf16", activations="bf16"))
    assert (policy.activations, policy.layers, policy.recipes) == ("bf16", (), {})
    kept = policy.operators.model_dump()
    assert kept.pop("output") == "fp32", "the loss sees what it sees under autocast, which has it in FP32"
    assert set(kept.values()) == {"keep"}
    mixed = CPU.params_of("keep", activations="bf16", norm="fp32")
    assert CPU.policy(mixed).operators.norm == "fp32"
    assert CPU.key(mixed) != CPU.key(mixed | {"norm": "keep"})
    assert CPU.is_script(CPU.params_of("keep", norm="fp32")), "nothing in 16 bits reaches a norm"


def test_under_autocast_keep_is_bf16() -> None:
    keep, bf16 = (CPU.params_of(choice, activations="bf16") for choice in ("keep", "bf16"))
    assert CPU.key(keep) == CPU.key(bf16)
    assert CPU.key(CPU.params_of("keep")) != CPU.key(CPU.params_of("bf16"))


def test_the_script_is_recognised() -> None:
    assert CPU.is_script(CPU.params_of("keep"))
    assert not CPU.is_script(CPU.params_of("keep", activations="bf16"))
    assert not CPU.is_script(CPU.params_of("bf16"))
    assert CPU.policy(CPU.params_of("keep")).layers == ()


def test_groups_of_the_graph_move_together_and_the_space_can_widen_them() -> None:
    layers = [linear(f"h.{b}.{x}", 64, 64, 64, group=f"h.{b}.qkv") for b in range(2) for x in ("q", "k", "v")]
    document = {"schema": "autoprec.space/1", "name": "x", "choices": [{"choices": ["keep", "bf16"]}]}
    problem = Problem.build(report(layers), space_from_dict(document))
    assert [g.layers for g in problem.groups] == [("h.0.q", "h.0.k", "h.0.v"), ("h.1.q", "h.1.k", "h.1.v")]
    wide = Problem.build(report(layers), space_from_dict(document | {"groups": [["h.*.q"]]}))
    assert [g.layers for g in wide.groups] == [tuple(layer.name for layer in layers)]


def test_a_model_that_is_itself_a_layer_has_a_rule_of_its_own() -> None:
    """``model = nn.Linear(512, 512)``: the name of its only layer is the empty one."""
    problem = Problem.build(report([linear("", 512, 512, 512)]), even_space("hopper-fp8"))
    policy = problem.policy(problem.params_of("fp8_rowwise"))
    assert [rule.match for rule in policy.layers] == [""]
    assert resolve(policy, [""])[""].fprop == BUILTIN_RECIPES["fp8_rowwise"]


def test_what_the_target_refuses_is_not_offered_and_the_reason_is_kept() -> None:
    def can_run(layer: object, recipe: Recipe) -> tuple[bool, str]:
        return (recipe.format != "fp8", "no FP8 units")

    problem = Problem.build(gpt(), even_space("hopper-fp8"), can_run)
    assert problem.choice_names == ("bf16",)
    assert set(problem.distributions()) == {"execution", "attention"}  # no layer is left to decide
    assert ("lm_head", "fp8_rowwise", "no FP8 units") in problem.refused
    assert not any("amax" in name for name in problem.parameters)


def test_a_group_is_offered_only_what_all_its_members_have() -> None:
    layers = [linear("a", 64, 64, 64, group="ab"), linear("b", 64, 64, 64, group="ab")]
    rules = [{"match": "a", "choices": ["keep", "bf16"]}, {"match": "b", "choices": ["keep"]}]
    found = space_from_dict({"schema": "autoprec.space/1", "name": "x", "choices": rules})
    assert Problem.build(report(layers), found).groups[0].choices == ("keep",)


def test_rules_do_not_touch_layers_that_are_not_tunable() -> None:
    layers = [linear(f"h.{b}.x", 64, 64, 64) for b in range(4)]
    layers[2] = replace(layers[2], tunable=False)
    problem = Problem.build(report(layers), load_space("tiny"))
    plans = resolve(problem.policy(problem.params_of("bf16")), [layer.name for layer in layers])
    assert plans["h.2.x"].keeps
    assert not plans["h.1.x"].keeps


def test_a_rule_that_exempts_a_recurrent_kernel_is_optional_since_no_policy_reaches_it() -> None:
    layers = [replace(linear("rnn", 64, 64, 64), tunable=False), linear("fc1", 64, 64, 64), linear("fc2", 64, 64, 64)]
    problem = Problem.build(report(layers), load_space("tiny"))
    policy = problem.policy(problem.params_of("bf16"))
    assert [(rule.match, rule.optional) for rule in policy.layers] == [("rnn", True), ("*", False)]
    assert all(
        not plan.keeps for plan in resolve(policy, ["fc1", "fc2"]).values()
    )  # refused before: 'rnn' matches none


def test_values_outside_the_space_are_refused() -> None:
    with pytest.raises(UsageError, match="not in the search space 'hopper-fp8'"):
        HOPPER.policy({"layer:lm_head": "nvfp4"})
    with pytest.raises(UsageError, match="layer:nowhere"):
        HOPPER.complete({"layer:nowhere": "bf16"})


def test_a_model_without_tunable_layers_is_refused() -> None:
    with pytest.raises(NothingAcceptableError):
        Problem.build(report([]), load_space("tiny"))


def test_every_parameter_of_the_space_reaches_the_policy() -> None:
    problem = Problem.build(gpt(), load_space("msamp-levels"))
    params = problem.params_of(
        "fp8_delayed",
        **{"optimizer.weights": "fp16_scaled", "optimizer.exp_avg": "e4m3", "communication.gradients": "fp8"},
    )
    policy = problem.policy(params, evidence={"speedup": 1.2})
    assert (policy.optimizer.weights, policy.optimizer.exp_avg) == ("fp16_scaled", "e4m3")
    assert policy.communication.gradients == "fp8"
    assert policy.evidence == {"speedup": 1.2}
    assert policy.model is not None
    assert policy.model.class_name == "GPT"


def test_equal_numerics_have_one_key_and_long_histories_are_what_a_trial_can_show() -> None:
    space = load_space("te-delayed")
    known, short = Problem.build(gpt(), space), Problem.build(gpt(), space, steps=23)
    names = [f"te_hybrid.scaling.{name}" for name in ("amax_history_len", "amax_compute_algo", "margin")]
    points = [dict(zip(names, v, strict=True)) for v in itertools.product(*(space.parameters[n] for n in names))]
    assert len(points) == 24
    keys = [{problem.key(problem.params_of("te_hybrid", **p)) for p in points} for problem in (known, short)]
    assert [len(found) for found in keys] == [15, 9]


def test_the_default_space_of_a_hopper_gpu_searches_what_a_recipe_is_made_of() -> None:
    fields = {name.split(".", 1)[1] for name in HOPPER.parameters if "." in name}
    assert {"scaling.margin", "scaling.amax_compute_algo", "scaling.amax_history_len", "scaling.power_of_2"} <= fields
    assert {"operands.grad_output", *(f"accumulation.{gemm}" for gemm in GEMMS)} <= fields
    assert "fp8_delayed/wgrad=bf16" in HOPPER.choice_names


@pytest.mark.parametrize(
    ("dtype", "activations", "attention", "differs"),
    [
        ("fp32", "keep", "keep", False),
        ("fp32", "bf16", "keep", True),
        ("fp32", "keep", "bf16", True),
        ("bf16", "keep", "keep", True),
        ("fp32", "bf16", "fp32", False),
        ("bf16", "keep", "fp32", False),
    ],
)
def test_attention_is_written_out_in_16_bits_alone(dtype: str, activations: str, attention: str, differs: bool) -> None:
    found = Problem.build(replace(gpt(), operators=(replace(ATTENTION, dtypes=(dtype,)),)), load_space("cpu"))
    around = {"activations": activations, "attention": attention}
    kept, other = (found.params_of("keep", **around | {UNFUSED: way}) for way in ("keep", "unfused"))
    assert (found.key(kept) != found.key(other)) == differs
    assert found.is_script(other) == (found.is_script(kept) and not differs)
    assert found.policy(other).implementation.attention == ("unfused" if differs else "keep")
    by_hand = replace(ATTENTION, op="aten::bmm", pattern="scores")
    assert UNFUSED not in Problem.build(replace(gpt(), operators=(by_hand,)), load_space("cpu")).parameters


def test_attention_is_not_searched_where_there_is_none() -> None:
    space = load_space("hopper-fp8")
    assert "attention" in Problem.build(replace(gpt(), operators=(ATTENTION,)), space).parameters
    product = replace(ATTENTION, op="aten::mm")  # x @ w where w is data, not a parameter
    for other in (replace(ATTENTION, cls="norm"), product):
        problem = Problem.build(replace(gpt(), operators=(other,)), space)
        assert problem.fixed["attention"] == "keep"
    assert (
        "attention" in Problem.build(replace(gpt(), operators=(replace(product, pattern="scores"),)), space).parameters
    )
    assert not [probe.id for probe in parameter_probes(problem) if "attention" in probe.id]


@pytest.mark.parametrize("name", ["hopper-fp8", "cpu"])
def test_autocast_is_not_offered_to_a_script_in_float64(name: str) -> None:
    model, space = gpt(), load_space(name).model_copy(update={"activations": ("bf16", "keep")})
    wide = replace(model, layers=tuple(replace(layer, dtype="fp64") for layer in model.layers))
    assert "activations" in Problem.build(model, space).parameters
    problem = Problem.build(wide, space)
    assert problem.value({}, "activations") == "keep"
    assert any(choice == "autocast" and "float64" in why for _, choice, why in problem.refused)


def test_what_autocast_leaves_alone_has_no_error_under_it() -> None:
    model = gpt()
    first = model.tunable[0].name
    layers = tuple(replace(layer, dtype="fp64" if layer.name == first else layer.dtype) for layer in model.layers)
    problem = Problem.build(replace(model, layers=layers), load_space("cpu"))
    kept = {layer_key(group.name): "keep" for group in problem.groups} | {"activations": "bf16"}
    effective = {group.name: problem.effective(kept, group) for group in problem.groups}
    alone = {group.name for group in problem.groups if group.layers == (first,)}
    assert alone
    assert {name for name, choice in effective.items() if choice == "keep"} >= alone
    ones = {f"{g}|bf16": 1.0 for g in range(len(problem.groups))} | {"parameter|activations=bf16": 100.0}
    table = SensitivityTable.of(problem, ones, None)
    reached = sum(choice == "bf16" for choice in effective.values())
    assert table.parameters["activations=bf16"] == 100.0 - reached
    assert table.predict(problem, kept) == pytest.approx(10.0)


EMBEDDING = replace(ATTENTION, op="aten::embedding", cls="embedding")
SHRUNK = space_from_dict(
    {
        **{"schema": "autoprec.space/1", "name": "shrunk", "embedding_gradient": [1.0, 0.1]},
        "choices": [{"match": "*", "choices": ["keep", "bf16"]}],
        "presets": [{"name": "GLM-130B", "parameters": {"embedding_gradient": 0.1}}],
    }
)


def test_a_shrunk_embedding_gradient_is_a_decision_of_its_own() -> None:
    found = Problem.build(replace(gpt(), operators=(EMBEDDING,)), SHRUNK)
    assert found.parameters["embedding_gradient"] == (1.0, 0.1)
    plain, shrunk = (found.params_of("keep", embedding_gradient=share) for share in (1.0, 0.1))
    assert (found.is_script(plain), found.is_script(shrunk)) == (True, False)
    assert found.key(plain) != found.key(shrunk)
    assert found.policy(plain).embedding_gradient == 1.0
    assert found.policy(shrunk).embedding_gradient == 0.1
    assert found.policy(found.params_of("bf16", embedding_gradient=0.1)).embedding_gradient == 0.1
    assert dict(presets(found))["GLM-130B"]["embedding_gradient"] == 0.1


def test_a_fused_update_is_offered_where_the_optimizer_has_one() -> None:
    space = space_from_dict(SHRUNK.model_dump(by_alias=True) | {"optimizer": {"update": ["keep", "fused"]}})
    assert "optimizer.update" not in Problem.build(gpt(), space).parameters
    found = Problem.build(replace(gpt(), can_fuse=True), space)
    assert found.parameters["optimizer.update"] == ("keep", "fused")
    plain, fused = (found.params_of("keep", **{"optimizer.update": update}) for update in ("keep", "fused"))
    assert (found.is_script(plain), found.is_script(fused)) == (True, False)
    assert found.policy(fused).optimizer.update == "fused"
    assert found.policy(plain).optimizer == found.render(found.quiet()).optimizer == OptimizerPolicy()


def test_products_of_a_step_are_offered_in_a_dtype_that_enough_of_them_are_not_in() -> None:
    name = "optimizer.products"
    space = space_from_dict(SHRUNK.model_dump(by_alias=True) | {"optimizer": {"products": ["keep", "bf16", "fp32"]}})
    assert name not in Problem.build(gpt(), space).parameters
    steps = {"in_fp32": ("fp32", 1024), "in_bf16": ("bf16", 1024), "small": ("fp32", 32)}
    offered = {}
    for label, (dtype, size) in steps.items():
        shapes, dtypes = ((size, size),) * 2, (dtype,) * 2
        row = Operator("mm_0", "h", "aten::mm", "optimizer", "gemm", "keep", "", shapes, dtypes, 0, 0)
        found = Problem.build(replace(gpt(), updating=(row,) * 100, total_flops=10**12), space)
        offered[label] = found.parameters.get(name, ())
    assert offered == {"in_fp32": ("keep", "bf16"), "in_bf16": ("keep", "fp32"), "small": ()}
    large = replace(row, shapes=((1024,) * 2,) * 2)
    found = Problem.build(replace(gpt(), updating=(large,), total_flops=10**12), space)
    assert name not in found.parameters  # one product in a step of many
    only = space_from_dict(SHRUNK.model_dump(by_alias=True) | {"optimizer": {"products": ["bf16"]}})
    assert Problem.build(gpt(), only).fixed[name] == "keep"


@pytest.mark.parametrize(
    ("field", "value", "operator"),
    [
        ("loss", "chunked", {"op": "aten::_log_softmax", "cls": "loss", "shapes": ((8, 50304),)}),
        ("layout", "channels_last", {"op": "aten::convolution", "cls": "conv", "shapes": ((8, 3, 4, 4), (9, 3, 3, 3))}),
    ],
)
def test_another_way_to_compute_is_offered_where_the_step_has_something_to_gain(
    field: str, value: str, operator: dict[str, Any]
) -> None:
    space = space_from_dict(SHRUNK.model_dump(by_alias=True) | {"implementation": {field: ["keep", value]}})
    name, small = f"implementation.{field}", replace(EMBEDDING, **operator | {"shapes": ((8, 100),)})
    for without in (gpt(), replace(gpt(), operators=(small,))):
        assert name not in Problem.build(without, space).parameters
    found = Problem.build(replace(gpt(), operators=(replace(EMBEDDING, **operator),)), space)
    assert found.parameters[name] == ("keep", value)
    plain, other = (found.params_of("keep", **{name: choice}) for choice in ("keep", value))
    assert (found.is_script(plain), found.is_script(other)) == (True, False)
    assert found.policy(other).implementation == ImplementationPolicy.model_validate({field: value})
    assert found.policy(plain).implementation == found.render(found.quiet()).implementation == ImplementationPolicy()


def test_its_gradient_is_meant_and_no_probe_takes_it_for_an_error() -> None:
    only = space_from_dict(SHRUNK.model_dump(by_alias=True) | {"embedding_gradient": [0.1], "presets": []})
    found = Problem.build(replace(gpt(), operators=(EMBEDDING,)), only)
    assert found.policy(found.params_of("bf16")).embedding_gradient == 0.1
    probes = [*parameter_probes(found), *plan_probes(found)]
    assert probes
    assert all("embedding_gradient" not in (probe.policy or {}) for probe in probes)


@pytest.mark.parametrize("values", [[1.0, 0.1], [0.1]])
def test_a_model_that_looks_nothing_up_has_no_gradient_to_shrink(values: list[float]) -> None:
    document = SHRUNK.model_dump(by_alias=True) | {"embedding_gradient": values, "presets": []}
    found = Problem.build(replace(gpt(), operators=(ATTENTION,)), space_from_dict(document))
    assert "embedding_gradient" not in found.parameters
    assert found.policy(found.params_of("bf16")).embedding_gradient == 1.0
    outside = Problem.build(
        replace(gpt(), operators=(EMBEDDING,)), space_from_dict(document).without_surroundings()
    )  # the script calls the model's parts: what surrounds its forward would not run
    assert outside.policy(outside.params_of("bf16")).embedding_gradient == 1.0


def test_what_runs_the_same_on_both_sides_is_one_point() -> None:
    problem = Problem.build(gpt(), load_space("cpu").with_rollout())
    autocast = {
        value: problem.params_of("bf16", activations="bf16", rollout=value) for value in ("same", "bf16", "fp16")
    }
    assert problem.key(autocast["same"]) == problem.key(autocast["bf16"]) != problem.key(autocast["fp16"])
    script = {value: problem.params_of("keep", rollout=value) for value in ("same", "keep", "bf16")}
    assert problem.key(script["same"]) == problem.key(script["keep"]) != problem.key(script["bf16"])
    assert problem.is_script(script["same"])
    assert not problem.is_script(script["bf16"])
    assert problem.render(problem.quiet()).rollout is None


def test_other_searches_leave_the_copy_as_written() -> None:
    problem = Problem.build(gpt(), load_space("hopper-fp8"))
    assert "rollout" not in problem.parameters
    assert problem.policy(problem.params_of("fp8_rowwise")).rollout is None
