"""torchtitan: a converter per recipe, and substrings that take or skip the right layers."""

from __future__ import annotations

import pytest

from autoprec.export import Request, export, exporter
from autoprec.export.stacks.torchtitan import nearest_converter
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.readers import load_source


def test_without_layer_names_rules_are_lost() -> None:
    done = export(POLICIES["rowwise but the ends"], "torchtitan", allow_lossy=True)
    assert any("pass --layers" in line for line in done.lossy)


def test_the_float8_converter_skips_what_another_rule_has() -> None:
    done = exporter("torchtitan").export(Request(POLICIES["rowwise but the ends"], MODELS["llama"]))
    source = done.files["precision_torchtitan.py"]
    assert 'recipe_name="rowwise"' in source
    assert 'filter_fqns=["lm_head"]' in source
    assert [loss.instead for loss in done.losses if loss.match] == [
        "torchtitan's rowwise converter: fast accumulation in fprop"
    ]


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        (LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]), "rowwise"),
        (LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]), "rowwise"),  # torchtitan 0.3 has no other name
        (LayerPlan(fprop=BUILTIN_RECIPES["fp8_rowwise"], dgrad=BUILTIN_RECIPES["fp8_rowwise"]), "rowwise_with_gw_hp"),
        (LayerPlan.uniform(BUILTIN_RECIPES["mxfp8"]), "mxfp8"),
        (LayerPlan.uniform(BUILTIN_RECIPES["nvfp4_plain"]), "nvfp4"),
        (LayerPlan.uniform(BUILTIN_RECIPES["int8"]), ""),
        (LayerPlan.uniform(BUILTIN_RECIPES["bf16"]), ""),
    ],
)
def test_the_recipes_of_torchtitan_0_3(plan: LayerPlan, recipe: str) -> None:
    assert nearest_converter(plan) == recipe


def test_two_recipes_are_two_converters_that_share_no_layer() -> None:
    done = exporter("torchtitan").export(Request(POLICIES["microscaling"], MODELS["vit"]))
    source = done.files["precision_torchtitan.py"]
    assert "import MXFP8LinearConverter, NVFP4LinearConverter" in source
    assert 'fqns=["qkv"]' in source
    assert [loss for loss in done.losses if loss.match] == []


def test_experts_are_grouped_and_all_of_one_kind() -> None:
    done = exporter("torchtitan").export(Request(POLICIES["rowwise, fast fprop"], MODELS["moe"]))
    source = done.files["precision_torchtitan.py"]
    assert "Float8GroupedExpertsConverter.Config(" in source
    assert "Float8LinearConverter.Config(" in source
    assert [loss for loss in done.losses if loss.match] == []


def test_the_notes_say_whose_names_are_needed() -> None:
    notes = exporter("torchtitan").export(Request(POLICIES["bf16"], MODELS["llama"])).notes
    assert any("torchtitan's own" in note for note in notes)


def test_without_fp8_there_is_nothing_to_convert() -> None:
    done = exporter("torchtitan").export(Request(POLICIES["bf16"], MODELS["llama"]))
    assert load_source(done.files["precision_torchtitan.py"], "precision_torchtitan").converters() == []
