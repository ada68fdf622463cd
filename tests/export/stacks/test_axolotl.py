"""axolotl: one precision for the whole model, and which of two is nearer to the policy."""

from __future__ import annotations

from typing import Any

import yaml

from autoprec.export import Export, Request, exporter
from autoprec.testing.exporters import MODELS, POLICIES


def _export(case: str, **update: Any) -> tuple[Any, Export]:
    policy = POLICIES[case].model_copy(update=update)
    done = exporter("axolotl").export(Request(policy, MODELS["gpt"]))
    return yaml.safe_load(done.files["axolotl_precision.yaml"]), done


def test_fp8_on_every_layer_is_exact() -> None:
    config, done = _export("tensorwise everywhere")
    assert (config["fp8"], config["bf16"], config["fp16"], config["torch_compile"]) == (True, True, False, True)
    assert done.losses == ()


def test_a_policy_with_fp8_on_most_layers_becomes_fp8_and_names_the_rest() -> None:
    config, done = _export("rowwise but the ends")
    assert config["fp8"] is True
    assert [loss.match for loss in done.losses] == ["*head", "*"], "another recipe than axolotl's own, and the head"
    assert all("on every linear layer" in loss.instead for loss in done.losses)


def test_a_policy_with_fp8_on_few_layers_becomes_bf16() -> None:
    policy = POLICIES["mixed"]
    done = exporter("axolotl").export(Request(policy, ("a.mlp", "b", "c")))
    config = yaml.safe_load(done.files["axolotl_precision.yaml"])
    assert "fp8" not in config
    assert config["bf16"] is True
    assert [(loss.match, loss.instead) for loss in done.losses] == [("*mlp*", "bf16")]


def test_compilation_is_a_key_where_fp8_leaves_the_choice() -> None:
    assert _export("compiled")[0]["torch_compile"] is True
    assert _export("bf16", execution="eager")[0]["torch_compile"] is False
    config, done = _export("eager")
    assert config["torch_compile"] is True, "FP8 without it is slower than bf16"
    assert "execution: eager" in [loss.what for loss in done.losses]


def test_loss_scaling_belongs_to_fp16() -> None:
    assert _export("fp16")[1].losses == ()
    losses = _export("fp16", activations="bf16")[1].losses
    assert "loss_scaling: dynamic" in [loss.what for loss in losses]
