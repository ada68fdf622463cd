"""accelerate: lists in the YAML, the backend that delayed scaling needs, and what that backend cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoprec.export import Export, Request, export, exporter
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import is_available
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.toys import one_rule


def test_accelerate_writes_lists() -> None:
    text = export(POLICIES["delayed, fast fprop"], "accelerate", layers=["a"]).files["accelerate_config.yaml"]
    assert yaml.safe_load(text)["fp8_config"]["override_linear_precision"] == [False, False, False]


def _config(case: str, layers: tuple[str, ...] = MODELS["gpt"]) -> tuple[Any, Export]:
    done = exporter("accelerate").export(Request(POLICIES[case], layers))
    return yaml.safe_load(done.files["accelerate_config.yaml"]), done


def test_one_delayed_recipe_becomes_the_transformer_engine_backend() -> None:
    config, done = _config("delayed")
    assert config["fp8_config"]["backend"] == "TE"
    assert config["fp8_config"]["amax_history_len"] == 16
    assert list(done.files) == ["accelerate_config.yaml"], "that backend takes no Python"
    head, rest = done.losses
    assert (head.what, head.match) == ("bf16", "*head")
    assert "its own recipe in every linear layer" in head.instead
    assert rest.match == "*"
    assert rest.instead.startswith("fast accumulation in fprop: the Transformer Engine backend")
    assert _config("delayed, fast fprop")[1].losses == ()


def test_a_recipe_per_layer_travels_in_kwargs() -> None:
    config, done = _config("mixed")
    assert config["mixed_precision"] == "fp8"
    assert config["fp8_config"] == {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": False}
    source = done.files["precision_accelerate.py"]
    assert 'MAIN = "fp8_rowwise"' in source, "three layers of the model run it"
    assert any("accelerator_kwargs" in note for note in done.notes)


@pytest.mark.parametrize(("case", "mixed"), [("bf16", "bf16"), ("fp16", "fp16"), ("empty", "no")])
def test_without_fp8_the_mode_is_that_of_the_activations(case: str, mixed: str) -> None:
    config, done = _config(case)
    assert config["mixed_precision"] == mixed
    assert "fp8_config" not in config
    assert f'{{"mixed_precision": "{mixed}"}}' in done.files["precision_accelerate.py"]


def test_layers_with_a_product_in_high_precision_are_converted_before_prepare() -> None:
    """accelerate converts with torchao's own forward, whose backward would multiply bf16 by float32 there."""
    policy = one_rule("fp8_tensorwise", gemms={"dgrad": "bf16"}, match="*")
    done = export(policy.model_copy(update={"activations": "bf16"}), "accelerate", layers=["a", "b"])
    assert yaml.safe_load(done.files["accelerate_config.yaml"])["mixed_precision"] == "bf16"
    source = done.files["precision_accelerate.py"]
    assert "return apply(model)" in source
    assert "cast_operands(module)" in source


@pytest.mark.skipif(not is_available("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("case", ["delayed", "mixed", "bf16", "empty"])
def test_accelerate_launch_takes_the_yaml_as_it_is(case: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    for name, text in _config(case)[1].files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    file = str(tmp_path / "accelerate_config.yaml")
    assert load_config_from_file(file).num_processes == 1
    line = ["--multi_gpu", "--num_processes", "2", "--config_file", file, "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(line))
    assert (args.num_processes, args.multi_gpu) == (2, True)


def test_scales_that_the_backend_cannot_round_are_lost() -> None:
    recipe = BUILTIN_RECIPES["fp8_delayed"]
    assert recipe.scaling is not None
    rounded = recipe.model_copy(update={"scaling": recipe.scaling.model_copy(update={"power_of_2": True})})
    policy = POLICIES["delayed"].model_copy(update={"recipes": {**POLICIES["delayed"].recipes, "fp8_delayed": rounded}})
    done = exporter("accelerate").export(Request(policy, ("a",)))
    (loss,) = done.losses
    assert loss.instead.startswith("scales that are not powers of two, fast accumulation in fprop")


def test_fp8_asks_for_bf16_activations() -> None:
    policy = POLICIES["tensorwise everywhere"].model_copy(update={"activations": "fp16"})
    done = exporter("accelerate").export(Request(policy))
    assert "activations: fp16" in [loss.what for loss in done.losses]
