"""axolotl: one precision for the whole model, which of two is nearer to the policy, and what it never converts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from autoprec.export import Export, Request, exporter
from autoprec.export.stacks.axolotl import left_out
from tests.conformance.exporters import MODELS, POLICIES


def _export(case: str, names: tuple[str, ...] = MODELS["gpt"], **update: Any) -> tuple[Any, Export]:
    policy = POLICIES[case].model_copy(update=update)
    done = exporter("axolotl").export(Request(policy, names))
    return yaml.safe_load(done.files["axolotl_precision.yaml"]), done


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_recipe_is_one_of_torchaos_and_the_ends_stay_out_of_it(recipe: str) -> None:
    config, done = _export(f"{recipe}, fast fprop")
    assert (config["fp8"], config["bf16"], config["fp16"]) == (True, True, False)
    assert config["fp8_config"] == {"recipe": recipe}
    lost = [loss for loss in done.losses if loss.match]
    assert [loss.match for loss in lost] == ["transformer.h.0.attn.c_attn", "lm_head"]
    assert all("the first and the last linear layer" in loss.instead for loss in lost)
    unnamed = [loss.what for loss in _export(f"{recipe}, fast fprop", ())[1].losses]
    assert "FP8 in the first and the last linear layer" in unnamed, "no names, no matches"


def test_routers_stay_out_too() -> None:
    assert left_out(MODELS["moe"]) == ["layers.0.wq", "layers.0.router", "layers.1.router", "layers.1.experts.1.w1"]


def test_a_weight_gradient_in_high_precision_is_a_recipe_of_its_own() -> None:
    policy = POLICIES["rowwise, fast fprop"]
    (rule,) = policy.layers
    rule = rule.model_copy(update={"gemms": {"dgrad": "full", "wgrad": "bf16"}})
    recipes = {**policy.recipes, "bf16": POLICIES["bf16"].recipes["bf16"]}
    config, done = _export("rowwise, fast fprop", recipes=recipes, layers=(rule,))
    assert config["fp8_config"] == {"recipe": "rowwise_with_gw_hp"}
    (loss,) = [loss for loss in done.losses if loss.match == "*"]
    assert loss.instead == "torchao's rowwise_with_gw_hp recipe: one scale per tensor for dgrad's weight"


def test_a_policy_with_fp8_on_few_layers_becomes_bf16() -> None:
    policy = POLICIES["mixed"]
    done = exporter("axolotl").export(Request(policy, ("a.mlp", "b", "c")))
    config = yaml.safe_load(done.files["axolotl_precision.yaml"])
    assert "fp8" not in config
    assert config["bf16"] is True
    assert [(loss.match, loss.instead) for loss in done.losses if loss.match] == [("*mlp*", "bf16")]


def test_compilation_is_written_where_the_policy_says_so_and_only_there() -> None:
    assert _export("compiled")[0]["torch_compile"] is True
    assert _export("eager")[0]["torch_compile"] is False
    config, done = _export("tensorwise everywhere")
    assert "torch_compile" not in config
    assert any("consider torch_compile" in note for note in done.notes)


def test_a_model_that_trains_in_16_bits_is_stored_in_them() -> None:
    lost = {loss.what: loss.instead for loss in _export("bf16")[1].losses}
    assert lost["optimizer.weights: fp32"].startswith("bf16: axolotl loads the model")
    assert _export("empty")[1].losses == ()


def test_loss_scaling_belongs_to_fp16() -> None:
    assert "loss_scaling: dynamic" not in [loss.what for loss in _export("fp16")[1].losses]
    losses = _export("fp16", activations="bf16")[1].losses
    assert "loss_scaling: dynamic" in [loss.what for loss in losses]
