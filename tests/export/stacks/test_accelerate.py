"""accelerate: lists in the YAML, the backend that delayed scaling needs, and what that backend cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from autoprec.export import Export, Request, export, exporter
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.testing.exporters import MODELS, POLICIES


def test_accelerate_writes_lists() -> None:
    text = export(POLICIES["delayed"], "accelerate", layers=["a"]).files["accelerate_config.yaml"]
    assert yaml.safe_load(text)["fp8_config"]["override_linear_precision"] == [False, False, False]


def _config(case: str, layers: tuple[str, ...] = MODELS["gpt"]) -> tuple[Any, Export]:
    done = exporter("accelerate").export(Request(POLICIES[case], layers))
    return yaml.safe_load(done.files["accelerate_config.yaml"]), done


def test_one_delayed_recipe_becomes_the_transformer_engine_backend() -> None:
    config, done = _config("delayed")
    assert config["fp8_config"]["backend"] == "TE"
    assert config["fp8_config"]["amax_history_len"] == 16
    assert list(done.files) == ["accelerate_config.yaml"], "that backend takes no Python"
    (loss,) = done.losses
    assert (loss.what, loss.match) == ("bf16", "*head")
    assert "this backend converts every linear layer" in loss.instead
    assert _config("delayed", ("a", "b"))[1].losses == (), "no layer is the head"


def test_a_recipe_per_layer_travels_in_kwargs() -> None:
    config, done = _config("mixed")
    assert config == {
        "mixed_precision": "fp8",
        "fp8_config": {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": False},
    }
    source = done.files["precision_accelerate.py"]
    assert 'MAIN = "fp8_rowwise"' in source, "three layers of the model run it"
    assert any("accelerator_kwargs" in note for note in done.notes)


@pytest.mark.parametrize(("case", "mixed"), [("bf16", "bf16"), ("fp16", "fp16"), ("empty", "no")])
def test_without_fp8_the_mode_is_that_of_the_activations(case: str, mixed: str) -> None:
    config, done = _config(case)
    assert config == {"mixed_precision": mixed}
    assert f'{{"mixed_precision": "{mixed}"}}' in done.files["precision_accelerate.py"]


def test_scales_that_the_backend_cannot_round_are_lost() -> None:
    recipe = BUILTIN_RECIPES["fp8_delayed"]
    assert recipe.scaling is not None
    rounded = recipe.model_copy(update={"scaling": recipe.scaling.model_copy(update={"power_of_2": True})})
    policy = POLICIES["delayed"].model_copy(update={"recipes": {**POLICIES["delayed"].recipes, "fp8_delayed": rounded}})
    done = exporter("accelerate").export(Request(policy, ("a",)))
    assert [str(loss) for loss in done.losses] == ["power_of_2 scales; instead: scales that are not powers of two"]


def test_fp8_asks_for_bf16_activations() -> None:
    policy = POLICIES["tensorwise everywhere"].model_copy(update={"activations": "fp16"})
    done = exporter("accelerate").export(Request(policy))
    assert "activations: fp16" in [loss.what for loss in done.losses]
