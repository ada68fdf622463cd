"""Transformer Engine: what the factory and the nested autocasts can say of a plan.

The recipes of the nested form are built by Transformer Engine's own classes, where its Python files are installed.
The recipe module needs nothing but pydantic, so it is loaded by path: importing the package asks for CUDA libraries.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from typing import Any

import pytest

from autoprec.export import Request, exporter
from autoprec.export.stacks.transformer_engine import nearest_te, nested_recipe, slot_specs
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
    plan, changes = nearest_te(LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]))
    assert plan.fprop is not None
    assert plan.fprop.scaling is not None
    assert plan.fprop.scaling.granularity == "tensor"
    assert changes
    delayed = LayerPlan(fprop=BUILTIN_RECIPES["fp8_delayed"], dgrad=BUILTIN_RECIPES["fp8_delayed"], wgrad=None)
    near, _ = nearest_te(delayed)
    assert near.fprop is not None
    assert near.fprop.scaling is not None
    assert near.fprop.scaling.scale == "current"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fp8_delayed", "DelayedScaling(fp8_format=recipe.Format.HYBRID, margin=0, amax_history_len=16"),
        ("fp8_tensorwise", "Float8CurrentScaling(fp8_format=recipe.Format.HYBRID"),
        ("fp8_block", "Float8BlockScaling(fp8_format=recipe.Format.E4M3"),
        ("mxfp8", "MXFP8BlockScaling("),
        ("nvfp4", "NVFP4BlockScaling(disable_rht=False"),
    ],
)
def test_nested_recipes(name: str, source: str) -> None:
    assert source in nested_recipe(LayerPlan.uniform(BUILTIN_RECIPES[name]))[0]


def test_forward_only_fp8_uses_backward_override() -> None:
    fp8, bf16 = BUILTIN_RECIPES["fp8_tensorwise"], BUILTIN_RECIPES["bf16"]
    source, coarser = nested_recipe(LayerPlan(fprop=fp8, dgrad=bf16, wgrad=bf16))
    assert 'backward_override="high_precision"' in source
    assert coarser == ""


@pytest.fixture(scope="module")
def recipes() -> Any:
    package = importlib.util.find_spec("transformer_engine")
    if package is None or not package.submodule_search_locations:
        pytest.skip("transformer-engine is not installed (pip install --no-deps transformer-engine)")
    path = f"{package.submodule_search_locations[0]}/common/recipe/__init__.py"
    spec = importlib.util.spec_from_file_location("te_recipe_for_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["fp8_delayed", "fp8_tensorwise", "fp8_tensorwise_e4m3", "fp8_block", "mxfp8", "nvfp4"]
)
def test_te_builds_the_recipe_with_the_fields_we_name(recipes: Any, name: str) -> None:
    recipe = BUILTIN_RECIPES[name]
    source, _ = nested_recipe(LayerPlan.uniform(recipe))
    made = eval(source, {"recipe": recipes})
    # Transformer Engine drops unknown keywords silently: each one we write must be a field
    written = [part.split("=")[0].strip() for part in source[source.index("(") + 1 : -1].split(",")]
    assert set(written) <= {f.name for f in dataclasses.fields(made)}
    if recipe.operands is not None and recipe.format == "fp8":
        hybrid = recipe.operands.grad_output == "e5m2"
        assert made.fp8_format == (recipes.Format.HYBRID if hybrid else recipes.Format.E4M3)
    if recipe.scaling is not None and recipe.scaling.scale == "delayed":
        assert made.amax_history_len == recipe.scaling.amax_history_len


def test_each_file_names_the_oldest_version_that_runs_it() -> None:
    done = exporter("transformer-engine").export(Request(POLICIES["tensorwise everywhere"]))
    assert "# Needs Transformer Engine 2.19 or newer." in done.files["precision_te.py"]
    assert "# Needs Transformer Engine 2.9 or newer." in done.files["precision_te_nested.py"]
    assert "precision_te.py needs Transformer Engine 2.19 or newer" in done.notes


def test_accumulators_are_written_as_the_policy_has_them() -> None:
    full = exporter("transformer-engine").export(Request(POLICIES["tensorwise everywhere"])).files
    fast = exporter("transformer-engine").export(Request(POLICIES["tensorwise, fast fprop"])).files
    assert 'ACCUMULATORS = {"fprop": True, "dgrad": True, "wgrad": True}' in full["precision_te.py"]
    assert 'ACCUMULATORS = {"fprop": False, "dgrad": True, "wgrad": True}' in fast["precision_te.py"]
    assert "accumulating(recipe.Float8CurrentScaling(" in fast["precision_te_nested.py"]
