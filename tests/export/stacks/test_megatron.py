"""Megatron: ordered matchers, flags for what is global, and one delayed recipe per run."""

from __future__ import annotations

from typing import Any

import yaml

from autoprec.export import Export, Request, exporter
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.exporters import MODELS, POLICIES


def _export(policy: Any, layers: tuple[str, ...] = MODELS["gpt"]) -> tuple[Any, list[str], Export]:
    done = exporter("megatron").export(Request(policy, layers))
    flags = done.files["megatron_flags.txt"].splitlines()
    return yaml.safe_load(done.files["te_precision_config.yaml"]), flags, done


def test_matchers_are_the_rules_in_their_order() -> None:
    config, _, _ = _export(POLICIES["mixed"])
    assert [m["pattern"] for m in config["matchers"].values()] == ["*fc*", "*mlp*", "*head", "*"]
    assert all(matcher["config"] in config["configs"] for matcher in config["matchers"].values())


def test_delayed_scaling_is_flags_and_its_layers_inherit_them() -> None:
    config, flags, done = _export(POLICIES["delayed"])
    assert "--fp8-recipe delayed" in flags
    assert "--fp8-amax-history-len 16" in flags
    assert config["configs"]["fp8_delayed"]["training_recipe"] == {"override_quantized_autocast": False}
    (loss,) = [loss for loss in done.losses if loss.match != "*head"]
    assert loss.instead.startswith("fast accumulation in fprop")
    assert _export(POLICIES["delayed, fast fprop"])[2].losses == ()


def test_a_second_delayed_recipe_becomes_current_scaling() -> None:
    delayed = BUILTIN_RECIPES["fp8_delayed"]
    assert delayed.scaling is not None
    long = delayed.model_copy(update={"scaling": delayed.scaling.model_copy(update={"amax_history_len": 1024})})
    document = {
        "schema": "autoprec.policy/1",
        "recipes": {"short": delayed.to_dict(), "long": long.to_dict()},
        "layers": [{"match": "*head", "recipe": "long"}],
        "default": "short",
        "activations": "bf16",
    }
    config, flags, done = _export(policy_from_dict(document))
    assert "--fp8-amax-history-len 1024" in flags, "the first rule has the flags"
    assert config["configs"]["short"]["training_recipe"]["fp8_quantization_recipe"] == "tensorwise"
    lost = {loss.match: loss.instead for loss in done.losses}
    assert lost["*"].startswith("one scale per tensor, fast accumulation in fprop: Megatron has one built-in recipe")


def test_optimizer_state_is_flags() -> None:
    _, flags, done = _export(POLICIES["state"])
    for flag in ("--use-precision-aware-optimizer", "--main-params-dtype fp16", "--exp-avg-dtype fp8"):
        assert flag in flags
    assert [loss.what for loss in done.losses] == ["communication.gradients: fp8"]
    bf16 = POLICIES["bf16"]
    sent = bf16.model_copy(update={"communication": bf16.communication.model_copy(update={"gradients": "bf16"})})
    _, flags, done = _export(sent)
    assert "--grad-reduce-in-bf16" in flags
    assert [loss.what for loss in done.losses] == ["optimizer.gradients: fp32"], "one buffer is held and reduced"


def test_a_recipe_that_te_rounds_otherwise_is_lost() -> None:
    _, _, done = _export(POLICIES["rowwise but the ends"])
    lost = {loss.match: loss.instead for loss in done.losses}
    assert lost["*"].startswith("one scale per tensor, scales that are not powers of two")
    config, _, done = _export(POLICIES["microscaling"], MODELS["moe"])
    assert config["configs"]["mxfp8"]["training_recipe"]["fp8_quantization_recipe"] == "mxfp8"
    assert {loss.match: loss.instead for loss in done.losses}["*wo"].startswith("bf16:"), "int8 has no recipe there"


def test_a_rule_for_every_layer_is_not_overwritten_by_the_default() -> None:
    config, _, _ = _export(POLICIES["tensorwise, fast fprop"])
    first = next(iter(config["matchers"].values()))
    assert (first["pattern"], len(config["matchers"])) == ("*", 2)
    assert "fp8_quantization_recipe" in config["configs"][first["config"]]["training_recipe"]
