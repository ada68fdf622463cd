"""nvidia-dlfw-inspect: every layer in one section, and the recipe that the script must run."""

from __future__ import annotations

import re

import yaml

from autoprec.export import Request, exporter
from autoprec.export.stacks.dlfw_inspect import section_pattern
from autoprec.policy import glob_matches
from tests.conformance.exporters import MODELS, POLICIES


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
    assert lost["*qkv"] == "mxfp8: one recipe per run, Transformer Engine's own"
    assert "*" not in lost


def test_a_policy_that_switches_nothing_off_has_a_section_that_matches_no_layer() -> None:
    """The loader refuses a file without a section, which ``{}`` is; the suite asks the loader itself."""
    done = exporter("dlfw-inspect").export(Request(POLICIES["tensorwise everywhere"], MODELS["gpt"]))
    (section,) = yaml.safe_load(done.files["dlfw_inspect.yaml"]).values()
    assert section["enabled"] is True
    assert not any(re.search(section["layers"]["layer_name_regex_pattern"], name) for name in ("", *MODELS["gpt"]))


def test_a_rule_for_every_layer_is_not_overwritten_by_the_default() -> None:
    done = exporter("dlfw-inspect").export(Request(POLICIES["delayed, fast fprop"]))
    patterns = {
        n: s["layers"]["layer_name_regex_pattern"] for n, s in yaml.safe_load("".join(done.files.values())).items()
    }
    assert list(patterns) == ["default"], "the rule switches nothing off"
    assert not re.search(patterns["default"], "layers.0.fc1"), "the rule has them all"


def test_autocast_is_the_scripts_own() -> None:
    done = exporter("dlfw-inspect").export(Request(POLICIES["bf16"]))
    assert next(loss.what for loss in done.losses) == "activations: bf16"
    assert exporter("dlfw-inspect").export(Request(POLICIES["empty"])).losses == ()
