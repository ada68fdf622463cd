"""Traps of single targets that the conformance suite's labels do not show."""

from __future__ import annotations

import re

import pytest
import yaml

from autoprec.export import Request, export
from autoprec.export.stacks.dlfw_inspect import section_pattern
from autoprec.export.stacks.torchtitan import skip_list
from autoprec.export.stacks.transformer_engine import nearest_te, nested_recipe, slot_specs
from autoprec.policy import LayerPlan, glob_matches
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.testing.exporters import MODELS, POLICIES


def test_torchao_never_shares_a_cast_config_and_always_names_its_dtype() -> None:
    source = export(POLICIES["mixed"], "torchao").files["precision_torchao.py"]
    casts = re.findall(r"CastConfig\(([^)]*)\)", source)
    assert len(casts) % 6 == 0
    assert all("target_dtype=torch.float8_" in cast for cast in casts)


def test_accelerate_writes_lists() -> None:
    text = export(POLICIES["delayed"], "accelerate", layers=["a"]).files["accelerate_config.yaml"]
    assert yaml.safe_load(text)["fp8_config"]["override_linear_precision"] == [False, False, False]


def test_every_layer_is_in_one_dlfw_section_with_and_without_the_model_prefix() -> None:
    globs = ["*fc*", "*mlp*", "*head", "*"]
    patterns = [re.compile(section_pattern(glob, globs[:i])) for i, glob in enumerate(globs)]
    for name in MODELS["gpt"]:
        first = next(i for i, glob in enumerate(globs) if glob_matches(glob, name))
        for spelled in (name, f"model.{name}"):
            assert [i for i, p in enumerate(patterns) if p.search(spelled)] == [first]


def test_torchtitan_substrings_do_not_catch_their_neighbours() -> None:
    layers = [f"layers.{i}.w" for i in range(12)]
    skip, stuck = skip_list(["layers.1.w"], [name for name in layers if name != "layers.1.w"])
    assert stuck == []
    assert [name for name in layers if any(part in name for part in skip)] == ["layers.1.w"]


def test_torchtitan_says_what_no_substring_separates() -> None:
    assert skip_list(["w"], ["w1"]) == ([], ["w"])


def test_torchtitan_without_layer_names_loses_the_rules() -> None:
    done = export(POLICIES["rowwise but the ends"], "torchtitan", allow_lossy=True)
    assert any("pass --layers" in line for line in done.lossy)


def test_te_slots_put_single_gemms_into_rows_and_columns() -> None:
    fp8, bf16 = BUILTIN_RECIPES["fp8_tensorwise"], BUILTIN_RECIPES["bf16"]
    slots = slot_specs(LayerPlan(fprop=fp8, dgrad=fp8, wgrad=bf16))
    assert slots["weight"][0] == slots["weight"][1]
    assert slots["input"][1] is None
    assert slots["grad_output"][1] is None
    assert slots["grad_output"][0] is not None
    assert slots["grad_output"][0]["format"] == "e5m2"


def test_te_replaces_what_it_does_not_have() -> None:
    plan, changes = nearest_te(LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]))
    assert plan.fprop is not None
    assert plan.fprop.scaling is not None
    assert plan.fprop.scaling.granularity == "tensor"
    assert changes
    delayed = LayerPlan(fprop=BUILTIN_RECIPES["fp8_delayed"], dgrad=BUILTIN_RECIPES["fp8_delayed"], wgrad=None)
    near, _ = nearest_te(delayed)
    assert near.fprop is not None
    assert near.fprop.scaling is not None
    assert near.fprop.scaling.scale == "current"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fp8_delayed", "DelayedScaling(fp8_format=recipe.Format.HYBRID, margin=0, amax_history_len=16"),
        ("fp8_tensorwise", "Float8CurrentScaling(fp8_format=recipe.Format.HYBRID"),
        ("fp8_block", "Float8BlockScaling(fp8_format=recipe.Format.E4M3"),
        ("mxfp8", "MXFP8BlockScaling("),
        ("nvfp4", "NVFP4BlockScaling(disable_rht=False"),
    ],
)
def test_nested_recipes(name: str, source: str) -> None:
    assert source in nested_recipe(LayerPlan.uniform(BUILTIN_RECIPES[name]))[0]


def test_forward_only_fp8_uses_backward_override() -> None:
    fp8, bf16 = BUILTIN_RECIPES["fp8_tensorwise"], BUILTIN_RECIPES["bf16"]
    source, coarser = nested_recipe(LayerPlan(fprop=fp8, dgrad=bf16, wgrad=bf16))
    assert 'backward_override="high_precision"' in source
    assert coarser == ""


def test_rules_that_match_no_known_layer_are_left_out() -> None:
    request = Request(POLICIES["mixed"], ("mlp.up",))
    assert [rule.match for rule in request.rules()] == ["*mlp*", "*"]
