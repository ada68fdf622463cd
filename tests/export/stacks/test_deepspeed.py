"""DeepSpeed: autocast and communication precision for the whole model; no FP8, no layers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoprec.export import Export, Request, exporter
from tests.conformance.exporters import MODELS, POLICIES


def _export(case: str, **update: Any) -> tuple[Any, Export]:
    done = exporter("deepspeed").export(Request(POLICIES[case].model_copy(update=update), MODELS["gpt"]))
    return json.loads(done.files["ds_config.json"]), done


@pytest.mark.parametrize(("case", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_activations_become_torch_autocast_with_gradients_in_fp32(case: str, dtype: str) -> None:
    config, _ = _export(case)
    assert config["torch_autocast"]["dtype"] == dtype
    assert config["torch_autocast"]["lower_precision_safe_modules"] == [], "a module named here sends its gradient low"
    assert "communication_data_type" not in config, "it is not read once torch_autocast is on"


def test_a_script_left_alone_gets_no_section() -> None:
    config, done = _export("empty")
    assert config == {}
    assert done.losses == ()


def test_rules_are_lost_one_by_one() -> None:
    _, done = _export("mixed")
    lost = {loss.match: loss.instead for loss in done.losses if loss.match}
    assert lost == dict.fromkeys(("*fc*", "*head"), "bf16: DeepSpeed's JSON knows no layers, no FP8")
    assert "per-layer precision: call autoprec.load(policy).apply(model) before deepspeed.initialize" in done.notes


def test_gradients_travel_in_bf16_where_fp8_is_asked_for() -> None:
    config, done = _export("state")
    assert "torch.nn.Linear" in config["torch_autocast"]["lower_precision_safe_modules"]
    assert "communication.gradients: fp8; instead: bf16" in done.lossy


def test_loss_scaling_is_for_fp16() -> None:
    assert "loss_scaling: dynamic" not in [loss.what for loss in _export("fp16")[1].losses]
    assert "loss_scaling: dynamic" in [loss.what for loss in _export("fp16", activations="bf16")[1].losses]
