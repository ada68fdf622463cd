"""Readers of exported configuration files, and of modules whose library is a stand-in here."""

from __future__ import annotations

import ast
import fnmatch
import json
from types import SimpleNamespace
from typing import Any

import yaml

from autoprec.export import Export, Request
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Recipe
from autoprec.support.optional import require
from tests.export.readers import (
    UNTOUCHED,
    Reading,
    _activations,
    fast_fprop,
    labels,
    load_source,
    model_of,
    stand_ins,
    te_recipe,
    uniform,
)
from tests.levels import LEVELS

__all__ = [
    "nearest_named",
    "read_dlfw_inspect",
    "read_megatron",
    "read_msamp",
    "read_torchtitan",
]

_NVFP4 = BUILTIN_RECIPES["nvfp4"]


def read_megatron(done: Export, request: Request) -> Reading:
    """Read as megatron/core/quantization/quant_config.py and TEQuantizationRecipe do."""
    document = yaml.safe_load(done.files["te_precision_config.yaml"])
    lines = done.files["megatron_flags.txt"].splitlines()
    flags = dict((*line.split(maxsplit=1), "")[:2] for line in lines)
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        found = next(m for m in document["matchers"].values() if m["enabled"] and fnmatch.fnmatch(name, m["pattern"]))
        recipe = document["configs"][found["config"]]["training_recipe"]
        out[name] = megatron_labels(recipe, flags, request.policy.activations)
    return Reading(out, megatron_settings(flags))


def megatron_labels(recipe: dict[str, Any], flags: dict[str, str], activations: str) -> dict[str, str]:
    """What a layer runs under a TEQuantizationRecipe."""
    if recipe.get("override_quantized_autocast") is False:
        delayed = {
            "margin": int(flags["--fp8-margin"]),
            "amax_history_len": int(flags["--fp8-amax-history-len"]),
            "amax_compute_algo": flags["--fp8-amax-compute-algo"],
        }
        return labels(fast_fprop(te_recipe(flags["--fp8-recipe"], flags["--fp8-format"], **delayed)), activations)
    if "fp4_quantization_recipe" in recipe:
        return labels(LayerPlan.uniform(_NVFP4), activations)
    if "fp8_quantization_recipe" in recipe:
        made = te_recipe(recipe["fp8_quantization_recipe"], recipe["fp8_format"])
        return labels(fast_fprop(made), activations)
    return uniform("high")


def megatron_settings(flags: dict[str, str]) -> dict[str, str]:
    """What Megatron's flags set beside the layers."""
    low = "--grad-reduce-in-bf16" in flags or flags.get("--main-grads-dtype") == "bf16"
    moments = {"fp8": "e4m3", "bf16": "bf16", "fp32": "fp32"}
    return UNTOUCHED | {
        "activations": "fp16" if "--fp16" in flags else "bf16",
        "loss_scaling": "dynamic" if "--fp16" in flags else "none",
        "optimizer.weights": {"fp16": "fp16_scaled"}.get(flags.get("--main-params-dtype", ""), "fp32"),
        "optimizer.exp_avg": moments[flags.get("--exp-avg-dtype", "fp32")],
        "optimizer.exp_avg_sq": {"fp16": "fp16_scaled"}.get(flags.get("--exp-avg-sq-dtype", ""), "fp32"),
        "optimizer.gradients": "bf16" if low else "fp32",
        "communication.gradients": "bf16" if low else "fp32",
    }


def read_dlfw_inspect(done: Export, request: Request) -> Reading:
    """Let nvdlfw_inspect's own parser find the section of every layer; the rest runs the recipe named in the notes."""
    manager = require("nvdlfw_inspect.config_manager", purpose="reading the exported YAML").ConfigManager
    logging: Any = require("nvdlfw_inspect.logging")
    logger, logging.LOGGER = logging.LOGGER, SimpleNamespace(log_message=lambda *_args, **_kwargs: None)
    document = yaml.safe_load(done.files["dlfw_inspect.yaml"])
    main = _recipe_in_notes(done)
    features = SimpleNamespace(features={"DisableQuantizationLayer", "DisableQuantizationGEMM"})
    out: dict[str, dict[str, str]] = {}
    manager.reset()
    try:
        manager._load_config(document, {"transformer_engine": features, "base": features})
        for name in request.layers:
            found = manager.get_config_for_layer(f"model.{name}").get("transformer_engine", {})
            gemms = found.get("DisableQuantizationGEMM", {}).get("gemms", ())
            off = GEMMS if "DisableQuantizationLayer" in found else gemms
            out[name] = {str(gemm): "high" if gemm in off else main[gemm] for gemm in GEMMS}
    finally:
        manager.reset()
        logging.LOGGER = logger
    return Reading(out)


def _recipe_in_notes(done: Export) -> dict[str, str]:
    """What the recipe runs that the notes say the script must have; its arguments are read as Python."""
    text = next((note for note in done.notes if "te.autocast(recipe=" in note), "")
    if not text:
        return uniform("high")
    call = next(
        node for node in ast.walk(ast.parse(text[text.index("te.autocast") :])) if isinstance(node, ast.keyword)
    )
    made = call.value
    assert isinstance(made, ast.Call)
    given = {k.arg or "": ast.unparse(k.value).strip("'") for k in made.keywords}
    name, form = ast.unparse(made.func), "hybrid" if "HYBRID" in given.get("fp8_format", "") else "e4m3"
    if name.endswith("NVFP4BlockScaling"):
        words = {"hadamard": "disable_rht", "stochastic_rounding": "disable_stochastic_rounding"}
        words |= {"weight_2d": "disable_2d_quantization"}
        flags = {field: given.get(word) != "True" for field, word in words.items()}
        return labels(LayerPlan.uniform(_NVFP4.model_copy(update=flags)), "bf16")
    kinds = {"DelayedScaling": "delayed", "Float8CurrentScaling": "tensorwise", "Float8BlockScaling": "blockwise"}
    kind = kinds.get(name.removeprefix("recipe."), "mxfp8")
    delayed = {k: v if k == "amax_compute_algo" else int(v) for k, v in given.items() if k in _DELAYED}
    return labels(fast_fprop(te_recipe(kind, form, **delayed)), "bf16")


_DELAYED = ("margin", "amax_history_len", "amax_compute_algo")


def read_msamp(done: Export, request: Request) -> Reading:
    """Run the module with a stand-in for ``msamp.initialize`` and see which layers it may replace."""
    section = json.loads(done.files["ds_msamp.json"])["msamp"]
    model = model_of(request.layers)
    with stand_ins(msamp={"initialize": lambda *_args, **_kwargs: None}):
        module = load_source(done.files["precision_msamp.py"], "precision_msamp")
        module.initialize(model, None)
    runs = LEVELS[f"msamp-{section['opt_level'].lower()}"]
    own = labels(fast_fprop(runs.recipes["fp8_msamp"]), request.policy.activations)
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        left_alone = getattr(model.get_submodule(name), "use_fp32_linear", False)
        out[name] = uniform("high") if left_alone else own
    state = {f"optimizer.{name}": value for name, value in runs.optimizer.model_dump().items()}
    return Reading(out, _activations(module) | state | {"communication.gradients": runs.communication.gradients})


def nearest_named(name: str, activations: str) -> dict[str, str]:
    """What torchao's recipe of this name runs, read from its documentation."""
    found = labels(
        fast_fprop(BUILTIN_RECIPES["fp8_tensorwise" if name == "tensorwise" else "fp8_rowwise"]), activations
    )
    if name == "rowwise_with_gw_hp":
        found |= {"dgrad": found["dgrad"].replace("fp8 row", "fp8 row/tensor"), "wgrad": "high"}
    return found


def read_torchtitan(done: Export, request: Request) -> Reading:
    """Run the config function with stand-in converters and apply torchtitan's substring filters, one by one."""
    fields = {
        "Float8Linear": {"recipe_name", "filter_fqns", "emulate"},
        **{
            "MXFP8Linear": {"fqns"},
            "NVFP4Linear": {"fqns"},
            "Float8GroupedExperts": set(),
            "MXFP8GroupedExperts": set(),
        },
    }

    def converter(name: str) -> Any:
        def config(**kwargs: Any) -> Any:
            assert set(kwargs) <= fields[name] | {"model_compile_enabled"}
            return SimpleNamespace(name=name, **kwargs)

        return SimpleNamespace(Config=config)

    fakes: dict[str, dict[str, Any]] = {name: {} for name in ("torchtitan", "torchtitan__components")}
    fakes["torchtitan__components__quantization"] = {f"{name}Converter": converter(name) for name in fields}
    with stand_ins(**fakes):
        converters = load_source(done.files["precision_torchtitan.py"], "precision_torchtitan").converters()
    out = {name: uniform("high") for name in request.layers}
    for one in converters:
        for name in request.layers:
            if _converts(one, name):
                out[name] = _converted(one, request.policy.activations)
    return Reading(out, UNTOUCHED | {"activations": "bf16"})


def _converts(one: Any, name: str) -> bool:
    grouped = any(part in ("experts", "inner_experts", "routed_experts", "expert") for part in name.split("."))
    if "GroupedExperts" in one.name or grouped:
        return grouped and "GroupedExperts" in one.name
    if one.name == "Float8Linear":
        return not any(part in name for part in one.filter_fqns)
    return not one.fqns or any(part in name for part in one.fqns)


def _converted(one: Any, activations: str) -> dict[str, str]:
    if one.name.startswith("Float8"):
        return nearest_named(getattr(one, "recipe_name", "rowwise"), activations)
    recipe: Recipe = BUILTIN_RECIPES["mxfp8" if one.name.startswith("MXFP8") else "nvfp4"]
    return labels(LayerPlan.uniform(recipe), activations)
