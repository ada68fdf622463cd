"""MS-AMP: the level nearest to a policy, and the layers it must leave alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from autoprec.export import Request, export, exporter
from autoprec.export.stacks.msamp import nearest_level
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.readers import load_source, model_of, stand_ins
from tests.levels import LEVELS


def test_msamp_o2_is_exact_but_for_the_output() -> None:

    done = export(LEVELS["msamp-o2"], "msamp", allow_lossy=True)
    fprop, output = done.losses
    assert fprop.instead == "MS-AMP's own recipe: fast accumulation in fprop"
    assert output.what == "operators.output: fp32"
    assert '"opt_level": "O2"' in done.files["ds_msamp.json"]


@pytest.mark.parametrize("name", ["o1", "o2", "o3"])
def test_a_level_of_our_own_lists_what_the_package_stores_differently(name: str) -> None:
    done = export(LEVELS[f"msamp-{name}-exact"], "msamp", allow_lossy=True)
    assert json.loads(done.files["ds_msamp.json"])["msamp"] == {
        "enabled": True,
        "opt_level": name.upper(),
        "use_te": False,
    }
    lost = {loss.what for loss in done.losses if "e4m3_tensor" in loss.instead or "fp16_tensor" in loss.instead}
    moments = {"optimizer.exp_avg: e4m3", "optimizer.exp_avg_sq: fp16_scaled"} if name != "o1" else set()
    assert lost == {"optimizer.gradients: e4m3"} | moments


def test_transformer_engine_under_msamp() -> None:
    body = LEVELS["te"].model_copy(update={"optimizer": LEVELS["msamp-o2"].optimizer})
    done = export(body, "msamp", allow_lossy=True)
    assert json.loads(done.files["ds_msamp.json"])["msamp"]["use_te"] is True


def test_the_level_is_that_of_the_optimizer_state() -> None:
    assert nearest_level(POLICIES["bf16"])[0] == "O1"
    assert nearest_level(POLICIES["state"])[0] == "O2"
    assert nearest_level(LEVELS["msamp-o1"])[1:] == (
        LEVELS["msamp-o1"].optimizer,
        LEVELS["msamp-o1"].communication,
    )


def test_layers_outside_fp8_are_marked_before_msamp_sees_the_model() -> None:
    done = exporter("msamp").export(Request(POLICIES["delayed"], MODELS["gpt"]))
    seen: list[Any] = []

    def initialize(model: Any, optimizer: Any, opt_level: str) -> tuple[Any, Any]:
        seen.append({n for n, m in model.named_modules() if getattr(m, "use_fp32_linear", False)})
        return model, (optimizer, opt_level)

    with stand_ins(msamp={"initialize": initialize}):
        module = load_source(done.files["precision_msamp.py"], "precision_msamp")
        _, (_, opt_level) = module.initialize(model_of(MODELS["gpt"]), None)
    assert seen == [{"lm_head"}]
    assert opt_level == json.loads(done.files["ds_msamp.json"])["msamp"]["opt_level"] == "O1"


def test_another_recipe_than_its_own_is_lost() -> None:
    done = exporter("msamp").export(Request(POLICIES["rowwise but the ends"], MODELS["gpt"]))
    lost = {loss.match: loss.instead for loss in done.losses if loss.match}
    assert list(lost) == ["*"]
    assert lost["*"].startswith("MS-AMP's own recipe: delayed scaling, fast accumulation in fprop")


def test_the_activations_are_the_modules_autocast() -> None:
    done = exporter("msamp").export(Request(POLICIES["bf16"], MODELS["gpt"]))
    assert not any(loss.what.startswith("activations") for loss in done.losses)
    with stand_ins(msamp={"initialize": None}):
        module = load_source(done.files["precision_msamp.py"], "precision_msamp")
    with module.autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert any("precision_msamp.autocast()" in note for note in done.notes)
