"""The plain module carries the tables of the policy, and names what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autoprec.export import Request, export, exporter
from autoprec.export.base import Losses
from autoprec.export.stacks.python import standalone_source
from autoprec.precision.recipes import GEMMS
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.readers import load_source, stand_ins
from tests.export.toys import one_rule, toy_model


@pytest.mark.parametrize("case", POLICIES)
def test_the_tables_are_the_policys(case: str) -> None:
    request = Request(POLICIES[case], MODELS["moe"])
    module = load_source(standalone_source(request, Losses()), "precision_policy")
    assert request.policy.activations == module.ACTIVATIONS
    assert request.policy.operators.attention == module.ATTENTION
    for name, plan in request.plans().items():
        found = module.PLANS.get(module.plan_of(name))
        assert (found is None) == plan.keeps
        if found is not None:
            assert [found[gemm] is None for gemm in GEMMS] == [recipe is None for recipe in plan.recipes]


def test_an_fp8_recipe_is_written_with_its_scaling_and_operands() -> None:
    module = load_source(standalone_source(Request(POLICIES["delayed"]), Losses()), "precision_policy")
    recipe = module.PLANS["fp8_delayed"]["dgrad"]
    assert (recipe["granularity"], recipe["scale"], recipe["amax_history_len"]) == ("tensor", "delayed", 16)
    assert (recipe["input"], recipe["weight"], recipe["grad_output"]) == ("e4m3", "e4m3", "e5m2")


def test_a_format_that_the_module_does_not_know_is_lost() -> None:
    losses = Losses()
    module = load_source(
        standalone_source(Request(POLICIES["microscaling"], MODELS["vit"]), losses), "precision_policy"
    )
    assert module.PLANS["mxfp8"] == {gemm: {"format": "bf16"} for gemm in GEMMS}
    assert {loss.match for loss in losses.found} == {"*qkv", "*"}
    assert all("the module knows fp32, bf16, fp16 and fp8" in loss.instead for loss in losses.found)


def test_loss_scaling_is_left_to_the_training_loop() -> None:
    assert "loss_scaling: dynamic" in [
        loss.what for loss in exporter("python").export(Request(POLICIES["fp16"])).losses
    ]


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


def test_under_lightning_the_policy_travels_as_the_plain_module() -> None:
    request = Request(POLICIES["mixed"], MODELS["gpt"])
    files = exporter("lightning").export(request).files
    assert files["precision_policy.py"] == exporter("python").export(request).files["precision_policy.py"]
