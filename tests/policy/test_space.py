from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import SpaceError, UnknownNameError
from autoprec.policy.space import (
    Choice,
    default_space,
    load_space,
    space_from_dict,
    space_names,
    spaces_dir,
    with_value,
)
from autoprec.precision.hardware import TARGETS, Capability
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.files import canonical_json, parse_document, read_document
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import Problem
from tests.tuning.models import gpt

SHIPPED = [
    "ada-fp8",
    "amp-fp16",
    "ampere-bf16",
    "blackwell-mx",
    "blackwell-nvfp4",
    "blackwell-rtx-nvfp4",
    "conservative",
    "cpu",
    "hopper-fp8",
    "hopper-fp8-block",
    "int8",
    "msamp-levels",
    "te-delayed",
    "tiny",
]


def space(**fields: object) -> dict[str, object]:
    return {"schema": "autoprec.space/1", "name": "x", **fields}


def test_the_shipped_spaces_are_the_documented_ones() -> None:
    assert space_names() == SHIPPED
    table = (spaces_dir() / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in table for name in SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_space_is_valid_and_makes_a_searchable_problem(name: str) -> None:
    found = load_space(name)
    assert found.name == name
    assert found.description
    assert set(found.targets) >= set(found.default_for)
    problem = Problem.build(gpt(), found)
    assert problem.free_groups, "nothing to decide"
    points = presets(problem)
    assert points
    for _, params in points:
        assert set(params) == set(problem.distributions())
        problem.policy(params)


@pytest.mark.parametrize("name", SHIPPED)
def test_targets_of_shipped_spaces_exist(name: str) -> None:
    unknown = set(load_space(name).targets) - set(TARGETS)
    assert not unknown, f"{name} names targets the hardware table does not have: {sorted(unknown)}"


@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_space_offers_a_consumer_card_what_has_no_kernel_there(name: str) -> None:
    """Hadamard transform and stochastic rounding of NVFP4 need compute capability 10.0; the RTX cards are 12.0."""
    found = load_space(name)
    for target in set(found.targets) & {"rtx5090", "rtx-pro-6000", "gb10"}:
        for rule in found.choices:
            for choice in rule.choices:
                recipes = [r for r in choice.plan(found.all_recipes).scaled if r.format == "nvfp4"]
                assert all(TARGETS[target].can_run(recipe) for recipe in recipes), (target, choice.name)
    assert not TARGETS["rtx5090"].can_run(BUILTIN_RECIPES["nvfp4"])
    assert TARGETS["rtx5090"].can_run(BUILTIN_RECIPES["nvfp4_plain"])
    assert TARGETS["b200"].can_run(BUILTIN_RECIPES["nvfp4"])


def test_every_target_has_exactly_one_default_space() -> None:
    claims = [target for name in SHIPPED for target in load_space(name).default_for]
    assert len(claims) == len(set(claims))
    assert default_space("cpu").name == "cpu"
    assert default_space("h200").name == "hopper-fp8"
    assert default_space("b200").name == "blackwell-mx"
    assert default_space("a machine nobody knows").name == "ampere-bf16"


def test_a_head_on_a_cpu_has_int8_with_a_scale_a_row_alone() -> None:
    # one scale a tensor there ended up to 94 % above the reference (benchmarks/results/2026-11-23_long_run_int8.md)
    space = load_space("cpu")
    head, other = ({choice.name for choice in space.rule_for("x", flags)} for flags in (("head",), ()))
    assert other - head == {"int8_tensor/wgrad=keep", "int8_tensor/wgrad=bf16"}
    assert "int8" in head


def test_one_scale_a_tensor_on_a_cpu_leaves_the_weight_gradient_in_high_precision() -> None:
    # in INT8 a ViT of width 128 ended 1.1 % above the reference (benchmarks/results/2026-11-27_long_run_int8.md)
    names = {choice.name for flags in ((), ("head",)) for choice in load_space("cpu").rule_for("x", flags)}
    assert "int8_tensor" not in names


@pytest.mark.parametrize(
    ("name", "architecture", "fp8", "space"),
    [
        ("mycard", "hopper", True, "hopper-fp8"),
        ("mycard", "blackwell", True, "blackwell-mx"),
        ("mycard", "of its own", True, "hopper-fp8"),
        ("mycard", "of its own", False, "ampere-bf16"),
        ("cpu", "hopper", True, "hopper-fp8"),
    ],
)
def test_a_users_own_gpu_takes_the_space_of_its_architecture(
    name: str, architecture: str, fp8: bool, space: str
) -> None:
    recipes = {"fp8_row": Capability(fp8)}
    own = replace(TARGETS["h100"], name=name, architecture=architecture, recipes=recipes)
    assert default_space(own).name == space


def test_a_users_own_file_is_loaded_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((spaces_dir() / "tiny.yaml").read_text(encoding="utf-8").replace("name: tiny", "name: mine"))
    assert load_space(path).name == "mine"
    assert load_space(str(path)).name == "mine"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'hopper-fp8'"):
        load_space("hoper-fp8")


def test_a_missing_file_is_a_space_error() -> None:
    with pytest.raises(SpaceError, match="no such file"):
        load_space("nowhere/mine.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choices": [{"match": "*", "choices": ["fp8_rowwize"]}]}, "did you mean 'fp8_rowwise'"),
        ({"baseline": "bf17"}, "unknown recipe 'bf17'"),
        ({"choises": []}, "did you mean 'choices'"),
        ({"parameters": {"fp8_delayed.scaling.amax_histori_len": [1]}}, "no field 'scaling.amax_histori_len'"),
        ({"parameters": {"fp8_delayed.scaling.amax_history_len": [0]}}, "greater than or equal to 1"),
        ({"parameters": {"nope.x": [1]}}, "'nope' is not a recipe"),
        ({"parameters": {"fp8_rowwise.scaling.margin": [0, 1]}}, "delayed only"),
        ({"parameters": {"fp8_delayed.scaling.margin": []}}, "no values"),
        ({"optimizer": {"exp_avg": ["fp33"]}}, "fp33"),
        ({"communication": {"gradients": ["int2"]}}, "int2"),
        ({"activations": []}, "at least 1"),
        ({"recipes": {"keep": {"format": "bf16"}}}, "reserved"),
        ({"presets": [{"name": "O9", "parameters": {"optimizer.weights": "fp16_scaled"}}]}, "is not in this space"),
    ],
)
def test_mistakes_are_named_with_a_fix(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpaceError, match=message.replace("(", r"\(")) as caught:
        space_from_dict(space(**fields), where="mine.yaml")
    assert "mine.yaml" in str(caught.value)


def test_a_wrong_schema_is_refused() -> None:
    with pytest.raises(SpaceError, match=r"autoprec\.space/1"):
        space_from_dict({"schema": "autoprec.policy/1", "name": "x"})


def test_choice_names_round_trip() -> None:
    for choice in (Choice(recipe="bf16"), Choice(recipe="fp8_rowwise", gemms={"wgrad": "bf16", "fprop": "keep"})):
        assert Choice.parse(choice.name) == choice
    assert (
        Choice(recipe="fp8_rowwise", gemms={"wgrad": "bf16", "fprop": "keep"}).name
        == "fp8_rowwise/fprop=keep/wgrad=bf16"
    )


def test_the_first_rule_wins_and_flags_narrow_it() -> None:
    found = space_from_dict(
        space(
            baseline="bf16",
            choices=[
                {"match": "*", "flag": "head", "choices": ["bf16"]},
                {"match": "h.0.*", "choices": ["keep"]},
                {"match": "h.*", "choices": ["bf16", "fp8_rowwise"]},
            ],
        )
    )
    assert [c.name for c in found.rule_for("h.1.x")] == ["bf16", "fp8_rowwise"]
    assert [c.name for c in found.rule_for("h.0.x")] == ["keep"]
    assert [c.name for c in found.rule_for("h.1.x", ("head",))] == ["bf16"]
    assert [c.name for c in found.rule_for("elsewhere")] == ["bf16"]


def test_parameters_change_the_recipe_and_nothing_else() -> None:
    found = load_space("te-delayed")
    changed = found.recipes_with({"te_hybrid.scaling.margin": 2})
    assert changed["te_hybrid"].scaling is not None
    assert changed["te_hybrid"].scaling.margin == 2
    assert changed["te_e4m3"] == found.all_recipes["te_e4m3"]
    assert changed["bf16"] == BUILTIN_RECIPES["bf16"]


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_accumulation_is_a_parameter_of_one_gemm_or_of_all(gemm: str) -> None:
    path = f"fp8_rowwise.accumulation.{gemm}"
    changed = with_value(BUILTIN_RECIPES, path, "fast")
    assert changed["fp8_rowwise"].to_dict()["accumulation"] == {gemm: "fast"}
    assert with_value(changed, path, "full") == BUILTIN_RECIPES
    assert with_value(changed, "fp8_rowwise.accumulation", "fast")["fp8_rowwise"].accumulation == "fast"
    with pytest.raises(ValueError, match=r"recipe 'fp8_rowwise' has no field 'accumulation\.forward'"):
        with_value(BUILTIN_RECIPES, "fp8_rowwise.accumulation.forward", "fast")
    with pytest.raises(ValueError, match="only with fp8"):
        with_value(BUILTIN_RECIPES, f"bf16.accumulation.{gemm}", "fast")


def test_what_transformer_engine_ignores_is_not_searched() -> None:
    text = canonical_json(read_document(spaces_dir() / "te-delayed.yaml")["parameters"])
    assert "interval" not in text
    assert "override_linear_precision" not in text


def test_the_documented_example_is_valid() -> None:
    page = (
        (spaces_dir().parent / "docs" / "policy-format.md").read_text(encoding="utf-8").split("\n## Search spaces\n")[1]
    )
    example = parse_document(page.split("```yaml\n")[1].split("```")[0])
    found = space_from_dict(example)
    assert found.parameter_values()["optimizer.exp_avg"] == ("fp32", "bf16")
    keys = ("choices", "baseline", "groups", "parameters", "presets", "loss_scaling", "embedding_gradient")
    assert all(key in example or f"`{key}`" in page for key in keys)


@pytest.mark.parametrize(
    ("where", "loss", "layout", "attention"),
    [
        ({"compiled": False, "measured": True}, 2, 2, 2),
        ({"compiled": True, "measured": True}, 1, 1, 2),  # torch.compile chooses, but for a kernel
        ({"compiled": False, "measured": False}, 1, 1, 1),  # the numerics are the same, and the time is modelled
        ({"compiled": False, "measured": True, "ranks": 2}, 1, 2, 2),
    ],
)
def test_ways_to_compute_are_offered_where_they_are_carried_out(
    where: dict[str, Any], loss: int, layout: int, attention: int
) -> None:
    ways = load_space("cpu").executed(**where).implementation
    assert (len(ways.loss), len(ways.layout), len(ways.attention)) == (loss, layout, attention)


def test_execution_is_offered_where_it_differs() -> None:
    space = space_from_dict({"schema": "autoprec.space/1", "name": "x", "execution": ["keep", "compile", "eager"]})
    assert space.executed(compiled=False, measured=True).execution == ("keep", "compile")
    assert space.executed(compiled=True, measured=True).execution == ("keep", "eager")
    assert space.executed(compiled=True, measured=False).execution == ("keep",)


@pytest.mark.parametrize("name", [n for n in SHIPPED if n not in ("cpu", "conservative", "tiny")])
def test_a_gpu_space_leaves_the_output_layer_a_way_to_float32(name: str) -> None:
    # what the two packages run, and nothing else; hopper-fp8 has no such choice yet
    if name in ("msamp-levels", "te-delayed", "hopper-fp8"):
        return
    assert {"fp32", "tf32"} & {choice.name for choice in load_space(name).rule_for("lm_head", ("head",))}


GPU_SPACES = [name for name in SHIPPED if name != "tiny" and load_space(name).targets != ("cpu",)]


@pytest.mark.parametrize("name", GPU_SPACES)
def test_every_gpu_space_offers_a_wide_head_and_attention_in_fp32(name: str) -> None:
    found = load_space(name)
    head = {choice.name for choice in found.rule_for("lm_head", ("head",))}
    assert head & {"bf16_fp32_output", "fp16_fp32_output"}
    assert head & {"fp32", "tf32"}
    if name not in ("te-delayed", "msamp-levels"):  # which are about what these packages decide
        assert set(found.attention) == {"keep", "fp32"}


def test_the_nvfp4_space_offers_the_head_fp32_sums_of_its_weight_gradient() -> None:
    found, wide = load_space("blackwell-nvfp4"), "bf16/wgrad=bf16_fp32_output"
    assert wide in {choice.name for choice in found.rule_for("lm_head", ("head",))}
    assert wide not in {choice.name for choice in found.rule_for("h.0.mlp.c_fc", ())}


def test_fp16_without_loss_scaling_is_told() -> None:
    rule = {"match": "*", "choices": ["fp16", "bf16/wgrad=fp16"]}
    found = space_from_dict(space(choices=[rule], activations=["fp16"]))
    (warning,) = found.warnings()
    assert "offers fp16 (fp16, activations: fp16) without loss scaling" in warning
    assert space_from_dict(space(choices=[rule], loss_scaling="dynamic")).warnings() == []
    assert [name for name in SHIPPED if load_space(name).warnings()] == []


@pytest.mark.parametrize(
    "offer",
    [
        {
            "recipes": {"wide": {"format": "fp8", "operands": {"input": "e5m2"}}},
            "choices": [{"match": "*", "choices": ["wide"]}],
        },
        {
            "choices": [{"match": "*", "choices": ["fp8_rowwise"]}],
            "parameters": {"fp8_rowwise.operands.input": ["e4m3", "e5m2"]},
        },
    ],
)
def test_e5m2_in_the_forward_pass_is_warned_of(offer: dict[str, object]) -> None:
    (warning,) = space_from_dict(space(**offer)).warnings()
    assert "e5m2 in fprop" in warning
    assert ".operands.input" in warning


@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_space_shrinks_the_embeddings_gradient_unasked(name: str) -> None:
    assert load_space(name).embedding_gradient == (1.0,)


@pytest.mark.parametrize("values", [[], [0.0], [1.0, 1.1], ["x"], 0.1])
def test_shares_of_the_embeddings_gradient_that_are_none_are_refused(values: object) -> None:
    with pytest.raises(SpaceError, match="embedding_gradient"):
        space_from_dict(space(embedding_gradient=values))


def test_a_space_that_lists_it_offers_it_and_a_preset_may_name_it() -> None:
    preset = {"name": "GLM-130B", "parameters": {"embedding_gradient": 0.1}}
    found = space_from_dict(space(embedding_gradient=[1.0, 0.1], presets=[preset]))
    assert found.parameter_values()["embedding_gradient"] == (1.0, 0.1)
    with pytest.raises(SpaceError, match=r"embedding_gradient = 0\.1 is not in this space"):
        space_from_dict(space(presets=[preset]))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_space_for_both_sides_offers_fp16_wherever_it_offers_bf16(name: str) -> None:
    space = load_space(name)
    wider = space.with_rollout()
    for before, after in zip(space.choices, wider.choices, strict=True):
        had, names = ([choice.name for choice in rule.choices] for rule in (before, after))
        assert [one for one in names if one in had] == had
        assert set(names) - set(had) <= {"fp16", "fp16_fp32_output"}
        for wide in ("bf16", "bf16_fp32_output"):
            narrow = wide.replace("bf16", "fp16")
            assert (narrow in names) == (wide in had or narrow in had)
    assert ("fp16" in wider.activations) == bool({"bf16", "fp16"} & set(space.activations))
    assert wider.loss_scaling == "dynamic"
    assert wider.rollout == ("same", "keep", "bf16", "fp16")


def test_what_a_space_says_of_the_copy_that_generates_stays() -> None:
    document = {"schema": "autoprec.space/1", "name": "own", "rollout": ["fp16"]}
    assert space_from_dict(document).with_rollout().rollout == ("fp16",)


def test_attention_in_bf16_is_offered_where_the_device_multiplies_it() -> None:
    found = {multiplied: load_space("cpu").with_bf16(multiplied=multiplied).attention for multiplied in (True, False)}
    assert found == {True: ("keep", "fp32", "bf16"), False: ("keep", "fp32")}
