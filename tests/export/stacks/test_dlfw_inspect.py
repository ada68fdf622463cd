"""nvidia-dlfw-inspect: every layer in one section, and the recipe that the script must run."""

from __future__ import annotations

import re

import yaml

from autoprec.export import Request, exporter
from autoprec.export.stacks.dlfw_inspect import section_pattern
from autoprec.policy import glob_matches
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.testing.exporters import MODELS, POLICIES


def test_every_layer_is_in_one_dlfw_section_with_and_without_the_model_prefix() -> None:
    globs = ["*fc*", "*mlp*", "*head", "*"]
    patterns = [re.compile(section_pattern(glob, globs[:i])) for i, glob in enumerate(globs)]
    for name in MODELS["gpt"]:
        first = next(i for i, glob in enumerate(globs) if glob_matches(glob, name))
        for spelled in (name, f"model.{name}"):
            assert [i for i, p in enumerate(patterns) if p.search(spelled)] == [first]


def test_single_gemms_are_switched_off_by_name_and_the_recipe_is_in_the_notes() -> None:
    done = exporter("dlfw-inspect").export(Request(POLICIES["mixed"], MODELS["moe"]))
    sections = yaml.safe_load(done.files["dlfw_inspect.yaml"])
    features = {name: section["transformer_engine"] for name, section in sections.items()}
    assert {"DisableQuantizationGEMM": {"enabled": True, "gemms": ["wgrad"]}} in features.values()
    assert features["default"] == {"DisableQuantizationLayer": {"enabled": True}}
    assert any("te.autocast(recipe=recipe.Float8CurrentScaling(" in note for note in done.notes)


def test_a_policy_without_fp8_switches_every_layer_off() -> None:
    done = exporter("dlfw-inspect").export(Request(POLICIES["bf16"]))
    assert list(yaml.safe_load(done.files["dlfw_inspect.yaml"])) == ["default"]
    assert not any("te.autocast" in note for note in done.notes)


def test_a_second_recipe_is_lost_to_the_first() -> None:
    done = exporter("dlfw-inspect").export(Request(POLICIES["microscaling"], MODELS["vit"]))
    lost = {loss.match: loss.instead for loss in done.losses if loss.match}
    assert lost["*qkv"] == f"{BUILTIN_RECIPES['mxfp8'].describe()}: one recipe per run"
    assert "*" not in lost
