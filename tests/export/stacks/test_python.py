"""The plain module carries the tables of the policy, and names what it does not know."""

from __future__ import annotations

import pytest

from autoprec.export import Request, exporter
from autoprec.export.base import Losses
from autoprec.export.stacks.python import standalone_source
from autoprec.precision.recipes import GEMMS
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.readers import load_source


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
