"""Transformer Engine: what the factory can say of a plan."""

from __future__ import annotations

from autoprec.export import Request, exporter
from autoprec.export.stacks.transformer_engine import nearest_te, slot_specs
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.exporters import POLICIES


def test_te_slots_put_single_gemms_into_rows_and_columns() -> None:
    fp8, bf16 = BUILTIN_RECIPES["fp8_tensorwise"], BUILTIN_RECIPES["bf16"]
    slots = slot_specs(LayerPlan(fprop=fp8, dgrad=fp8, wgrad=bf16))
    assert slots["weight"][0] == slots["weight"][1]
    assert slots["input"][1] is None
    assert slots["grad_output"][1] is None
    assert slots["grad_output"][0] is not None
    assert slots["grad_output"][0]["format"] == "e5m2"


def test_te_replaces_what_it_does_not_have() -> None:
    plan = nearest_te(LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]))
    assert plan.fprop is not None
    assert plan.fprop.scaling is not None
    assert plan.fprop.scaling.granularity == "tensor"
    delayed = LayerPlan(fprop=BUILTIN_RECIPES["fp8_delayed"], dgrad=BUILTIN_RECIPES["fp8_delayed"], wgrad=None)
    near = nearest_te(delayed)
    assert near.fprop is not None
    assert near.fprop.scaling is not None
    assert near.fprop.scaling.scale == "current"


def test_the_file_names_the_oldest_version_that_runs_it() -> None:
    done = exporter("transformer-engine").export(Request(POLICIES["tensorwise everywhere"]))
    assert "# Needs Transformer Engine 2.19 or newer." in done.files["precision_te.py"]
    assert "precision_te.py needs Transformer Engine 2.19 or newer" in done.notes


def test_accumulators_are_written_as_the_policy_has_them() -> None:
    full = exporter("transformer-engine").export(Request(POLICIES["tensorwise everywhere"])).files
    fast = exporter("transformer-engine").export(Request(POLICIES["tensorwise, fast fprop"])).files
    assert 'ACCUMULATORS = {"fprop": True, "dgrad": True, "wgrad": True}' in full["precision_te.py"]
    assert 'ACCUMULATORS = {"fprop": False, "dgrad": True, "wgrad": True}' in fast["precision_te.py"]
