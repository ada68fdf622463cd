"""The nested-autocast recipes are built by Transformer Engine's own classes, where its Python files are installed.

The recipe module needs nothing but pydantic, so it is loaded by path: importing the package asks for CUDA libraries.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from typing import Any

import pytest

from autoprec.export.stacks.transformer_engine import nested_recipe
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES


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
