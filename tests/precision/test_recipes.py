"""Recipes: what has no effect is refused, what is written comes back, names say what is meant."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoprec.policy import LayerPlan
from autoprec.precision.formats import FORMATS
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, OPERANDS, Gemm, Recipe

SUMS = st.sampled_from(["full", "fast"])
DOCUMENTS = st.fixed_dictionaries(
    {"format": st.sampled_from(["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8"])},
    optional={
        "scaling": st.fixed_dictionaries(
            {},
            optional={
                "granularity": st.sampled_from(["tensor", "row", "block"]),
                "scale": st.sampled_from(["current", "delayed"]),
                "power_of_2": st.booleans(),
                "margin": st.integers(-2, 2),
                "amax_history_len": st.sampled_from([1, 16, 64]),
                "amax_compute_algo": st.sampled_from(["max", "most_recent"]),
                "amax_epsilon": st.sampled_from([0.0, 1e-6]),
            },
        ),
        "operands": st.fixed_dictionaries({}, optional={name: st.sampled_from(["e4m3", "e5m2"]) for name in OPERANDS}),
        "accumulation": SUMS | st.dictionaries(st.sampled_from(GEMMS), SUMS),
        "output": st.sampled_from(["keep", "fp32"]),
        "hadamard": st.booleans(),
        "stochastic_rounding": st.booleans(),
        "weight_2d": st.booleans(),
    },
)


@given(DOCUMENTS)
def test_a_recipe_is_refused_or_comes_back_as_it_was_written(document: dict[str, Any]) -> None:
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError:
        return
    assert Recipe.model_validate(recipe.to_dict()) == recipe
    assert Recipe.model_validate(recipe.model_dump()) == recipe


@given(DOCUMENTS)
def test_no_accepted_recipe_multiplies_e5m2_by_e5m2(document: dict[str, Any]) -> None:
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError:
        return
    for operands in GEMM_OPERANDS.values():
        assert [recipe.operand_format(name) for name in operands] != ["e5m2", "e5m2"]


@given(DOCUMENTS, DOCUMENTS)
def test_recipes_that_differ_are_written_differently(first: dict[str, Any], second: dict[str, Any]) -> None:
    try:
        a, b = Recipe.model_validate(first), Recipe.model_validate(second)
    except ValidationError:
        return
    assert (a == b) == (a.to_dict() == b.to_dict())


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"format": "bf16", "scaling": {}}, "scaling has no effect"),
        ({"format": "int8", "operands": {}}, "operands has no effect"),
        ({"format": "mxfp8", "accumulation": "fast"}, "accumulation has no effect"),
        ({"format": "bf16", "accumulation": {"fprop": "fast"}}, "accumulation has no effect"),
        ({"format": "fp8", "accumulation": {"forward": "fast"}}, "forward"),
        ({"format": "fp8", "accumulation": {"fprop": "quick"}}, "Input should be"),
        ({"format": "fp8", "hadamard": True}, "hadamard has no effect with format: fp8, only with nvfp4"),
        ({"format": "fp8", "scaling": {"granularity": "row", "scale": "delayed"}}, "per tensor only"),
        ({"format": "fp8", "scaling": {"amax_history_len": 64}}, "with scale: delayed only"),
        ({"format": "int8", "scaling": {"granularity": "block"}}, "row or tensor only"),
        ({"format": "int8", "scaling": {"scale": "delayed"}}, "row or tensor only"),
        ({"format": "fp8", "operands": {"input": "e5m2", "grad_output": "e5m2"}}, "wgrad would multiply e5m2 by e5m2"),
        ({"format": "fp8", "interval": 4}, "Extra inputs"),
        ({"format": "fp9"}, "Input should be"),
        ({"format": "fp8", "scaling": {"amax_epsilon": float("nan")}}, "finite"),
        ({}, "Field required"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(document: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Recipe.model_validate(document)


def test_defaults_are_spelled_out_where_they_matter() -> None:
    assert Recipe.model_validate({"format": "fp8"}).to_dict() == {
        "format": "fp8",
        "scaling": {"granularity": "tensor", "scale": "current", "power_of_2": False},
        "operands": {"input": "e4m3", "weight": "e4m3", "grad_output": "e4m3"},
    }
    assert Recipe.model_validate({"format": "bf16"}).to_dict() == {"format": "bf16"}


@pytest.mark.parametrize("name", BUILTIN_RECIPES)
def test_builtin_recipes_name_formats_that_exist(name: str) -> None:
    recipe = BUILTIN_RECIPES[name]
    for operand in OPERANDS:
        found = recipe.operand_format(operand)
        assert found in FORMATS or found == "mxfp8"
    assert recipe.scaled == (recipe.format not in ("fp32", "tf32", "bf16", "fp16"))


def test_descriptions_tell_recipes_apart_that_people_confuse() -> None:
    described = {name: BUILTIN_RECIPES[name].describe() for name in BUILTIN_RECIPES}
    assert described["fp8_rowwise"] == "fp8 row e4m3/e4m3/e4m3"
    assert described["fp8_delayed"] == "fp8 delayed e4m3/e4m3/e5m2"
    assert described["bf16"] == "bf16"


def test_the_three_gemms_of_a_linear_layer() -> None:
    assert set(GEMM_OPERANDS) == set(GEMMS)
    assert {operand for pair in GEMM_OPERANDS.values() for operand in pair} == set(OPERANDS)


def test_an_output_in_fp32_is_of_16_bit_products_and_of_fprop_alone() -> None:
    head = BUILTIN_RECIPES["bf16_fp32_output"]
    assert (head.describe(), head.to_dict()) == ("bf16 -> fp32", {"format": "bf16", "output": "fp32"})
    assert head.backward() == BUILTIN_RECIPES["bf16"]
    assert head.wide_output
    assert not BUILTIN_RECIPES["bf16"].wide_output
    for name in ("fp32", "tf32", "fp8", "mxfp8", "nvfp4", "int8"):
        with pytest.raises(ValidationError, match=r"output has no effect with format: .*, only with bf16 or fp16"):
            Recipe.model_validate({"format": name, "output": "fp32"})


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ({}, "full"),
        ({"dgrad": "full"}, "full"),
        (dict.fromkeys(GEMMS, "fast"), "fast"),
        ("fast", "fast"),
    ],
)
def test_one_word_for_all_gemms_is_written_as_one(written: object, means: str) -> None:
    recipe = Recipe.model_validate({"format": "fp8", "accumulation": written})
    assert recipe == Recipe.model_validate({"format": "fp8", "accumulation": means})
    assert recipe.to_dict().get("accumulation", "full") == means


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_gemm_has_its_own_word_for_how_it_accumulates(gemm: Gemm) -> None:
    recipe = Recipe.model_validate({"format": "fp8", "accumulation": {gemm: "fast"}})
    assert recipe.to_dict()["accumulation"] == {gemm: "fast"}
    assert recipe.describe() == f"fp8 tensor e4m3/e4m3/e4m3 fast {gemm}"
    plan = LayerPlan.uniform(recipe)
    assert {name: recipe.accumulation for name, recipe in zip(GEMMS, plan.scaled, strict=True)} == {
        name: "fast" if name == gemm else "full" for name in GEMMS
    }
    assert plan == LayerPlan(**{name: recipe.of_gemm(name) for name in GEMMS})
