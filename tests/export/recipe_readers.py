"""Readers of the formats that name a recipe for each layer: torchao's FqnToConfig by torchao, the others as they do."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from autoprec.export import Export, Request
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS
from autoprec.support.optional import require
from tests.export.config_readers import nearest_named
from tests.export.readers import UNTOUCHED, Reading, fast_fprop, labels, load_source, model_of, te_recipe, uniform

__all__ = ["read_automodel", "read_torchao_fqn"]

_MX = BUILTIN_RECIPES["mxfp8"]


def read_torchao_fqn(done: Export, request: Request) -> Reading:
    """torchao reads its JSON and converts a model; what it put in the place of a weight says the rest."""
    require("torchao.core.config")
    module = load_source(done.files["precision_torchao_fqn.py"], "precision_torchao_fqn")
    model: Any = model_of(request.layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fqn_to_config.json"
        path.write_text(done.files["fqn_to_config.json"], encoding="utf-8")
        module.apply(model, path)
    return Reading({name: _of_a_weight(model.get_submodule(name), request) for name in request.layers})


def _of_a_weight(layer: Any, request: Request) -> dict[str, str]:
    kind = type(layer.weight.data).__name__
    activations = request.policy.activations
    if type(layer).__name__ == "NVFP4Linear":
        return labels(LayerPlan.uniform(BUILTIN_RECIPES["nvfp4"]), activations)
    if kind.startswith("Int8MixedPrecision"):
        asked = (layer.weight.config.output, layer.weight.config.grad_input, layer.weight.config.grad_weight)
        return {gemm: "int8" if on else "high" for gemm, on in zip(GEMMS, asked, strict=True)}
    if kind.startswith("Float8Training"):
        return nearest_named(layer.weight.data.config.float8_linear_recipe, activations)
    if kind.startswith("MXFP8Training"):
        own = labels(LayerPlan.uniform(_MX), activations)
        return own | ({"wgrad": "high"} if layer.weight.data.config.wgrad_with_hp else {})
    assert kind == "Tensor", kind
    return uniform("high")


def read_automodel(done: Export, request: Request) -> Reading:
    """Read as FP8Config's filter, BackendConfig and the constructors of its layers do."""
    document = yaml.safe_load(done.files["automodel_precision.yaml"])
    assert set(document) <= {"fp8", "model"}
    assert set(document["model"]) <= {"torch_dtype", "backend"}
    eight, backend = document.get("fp8", {}), document["model"].get("backend", {})
    assert set(eight) <= {"enabled", "recipe_name", "filter_fqns"}
    assert set(backend) <= {"linear", "experts", "dispatcher", "te_fp8"}
    te: dict[str, str] = {}
    if "te_fp8" in backend:
        assert "te" in (backend["linear"], backend["experts"]), "BackendConfig refuses that"
        kinds = {"current": ("tensorwise", "hybrid"), "block": ("blockwise", "e4m3"), "mxfp8": ("mxfp8", "e4m3")}
        te = labels(fast_fprop(te_recipe(*kinds[backend["te_fp8"]["recipe"]])), "bf16")
    out = {}
    for name in request.layers:
        parts = name.split(".")
        runs = uniform("high")
        if eight.get("enabled") and not any(part in name for part in eight["filter_fqns"]):
            runs = nearest_named(eight["recipe_name"], "bf16")
        elif "experts" in parts[:-1] and backend.get("experts") == "torch_mm_mxfp8":
            runs = labels(LayerPlan(fprop=_MX, dgrad=_MX), "bf16")
        elif parts[-1] not in ("gate", "router") and backend.get("experts" if "experts" in parts else "linear") == "te":
            assert "experts" not in parts or backend["dispatcher"] == "deepep"
            runs = te
        out[name] = runs
    return Reading(out, UNTOUCHED | {"activations": "bf16"})
