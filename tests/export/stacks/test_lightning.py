"""Lightning: the exported plugins convert the submodule they are told to."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autoprec.export import Request, export, exporter
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.readers import load_source, stand_ins
from tests.export.toys import one_rule, toy_model


@pytest.mark.parametrize("plugin", ["PolicyFabricPrecision", "PolicyTrainerPrecision"])
def test_a_plugin_converts_the_model_inside_the_lightning_module(plugin: str) -> None:
    done = export(one_rule("fp8_rowwise"), "lightning")
    inner = load_source(done.files["precision_policy.py"], "precision_policy")
    base = {"Precision": type("Precision", (), {})}
    lightning: dict[str, dict[str, Any]] = {"lightning": {}}
    for kind in ("fabric", "pytorch"):
        lightning |= {f"lightning__{kind}": {}, f"lightning__{kind}__plugins": {}}
        lightning[f"lightning__{kind}__plugins__precision"] = base
    with stand_ins(precision_policy=dict(inner.__dict__), **lightning):
        module = load_source(done.files["precision_lightning.py"], "precision_lightning")
    outer = nn.Module()
    outer.model, outer.other = toy_model(), nn.Linear(4, 4)
    assert getattr(module, plugin)(prefix="model").convert_module(outer) is outer
    assert type(outer.model[0]) is not nn.Linear
    assert type(outer.model[2]) is nn.Linear, "no rule names it"
    assert type(outer.other) is nn.Linear


def test_the_policy_travels_as_the_plain_module() -> None:
    request = Request(POLICIES["mixed"], MODELS["gpt"])
    files = exporter("lightning").export(request).files
    assert files["precision_policy.py"] == exporter("python").export(request).files["precision_policy.py"]
