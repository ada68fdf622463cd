"""What an exporter is asked and what it collects: ordered rules, plans of known layers, losses."""

from __future__ import annotations

from autoprec.export import Export, Request
from autoprec.export.base import Exporter, Losses
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
    done = Export("x", {}, tuple(losses.found))
    assert done.lossy == ["layers '*head': fp8; instead: bf16", "activations: fp16; instead: bf16"]


def test_an_exporter_is_what_a_module_writes_and_loses() -> None:
    def write(request: Request, losses: Losses) -> tuple[dict[str, str], list[str]]:
        losses.add("fp8", "bf16")
        losses.kept["operators.norm: fp32"] = "the stack"
        return {"a.txt": request.name}, ["a note"]

    done = Exporter("mine", write).export(Request(POLICIES["bf16"], name="p.yaml"))
    assert (done.target, done.files, done.notes) == ("mine", {"a.txt": "p.yaml"}, ("a note",))
    assert done.lossy == ["fp8; instead: bf16"]
    assert done.kept == {"operators.norm: fp32": "the stack"}
