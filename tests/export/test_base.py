"""What an exporter is asked and what it collects: ordered rules, plans of known layers, losses."""

from __future__ import annotations

from autoprec.export import Export, Request
from autoprec.export.base import Losses, state_losses
from autoprec.policy import LayerPlan
from tests.conformance.exporters import MODELS, POLICIES


def test_rules_that_match_no_known_layer_are_left_out() -> None:
    request = Request(POLICIES["mixed"], ("mlp.up",))
    assert [rule.match for rule in request.rules()] == ["*mlp*", "*"]


def test_without_layer_names_every_rule_stays_and_no_plan_is_known() -> None:
    request = Request(POLICIES["delayed"])
    assert [rule.match for rule in request.rules()] == ["*head", "*"]
    assert request.plans() == {}


def test_the_plans_of_known_layers_are_those_of_the_first_rule_that_matches() -> None:
    policy = POLICIES["delayed"]
    plans = Request(policy, MODELS["gpt"]).plans()
    assert list(plans) == list(MODELS["gpt"])
    assert plans["lm_head"] == LayerPlan.uniform(policy.recipes["bf16"])
    assert plans["transformer.h.0.mlp.c_fc"] == LayerPlan.uniform(policy.recipes["fp8_delayed"])


def test_a_loss_is_listed_once_and_names_its_layers() -> None:
    losses = Losses()
    losses.add("fp8", "bf16", "*head")
    losses.add("fp8", "bf16", "*head")
    losses.add("activations: fp16", "bf16")
    done = Export("x", {}, losses.done())
    assert done.lossy == ["layers '*head': fp8; instead: bf16", "activations: fp16; instead: bf16"]


def test_state_that_a_target_does_not_carry_is_lost_part_by_part() -> None:
    request = Request(POLICIES["state"])

    def lost(**carried: bool) -> list[str]:
        losses = Losses()
        state_losses(request, losses, **carried)
        return [loss.what for loss in losses.done()]

    state = ["optimizer.weights: fp16_scaled", "optimizer.exp_avg: e4m3", "optimizer.exp_avg_sq: fp16_scaled"]
    assert lost() == [*state, "communication.gradients: fp8"]
    assert lost(communication=False) == state
