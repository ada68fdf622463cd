"""Readers of exported files: what each layer would run, as the target reads them.

Targets that install on any machine are read by the real library (``MissingDependencyError`` where it is absent);
the others by their published schema, with a stand-in for the one class the file names.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from autoprec.export import Export, Request
from autoprec.policy import LayerPlan
from autoprec.policy.levels import level
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm
from autoprec.support.optional import require
from autoprec.testing.exporters import Executed, gemm_label

__all__ = ["READERS", "load_source", "model_of", "stand_ins"]

_OPERAND_USES = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}


def load_source(text: str, name: str) -> Any:
    """Run an exported module's text and return the module."""
    module = ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def stand_ins(**modules: dict[str, Any]) -> Iterator[None]:
    """Put stand-in modules (dots as double underscores) into ``sys.modules`` for the duration."""
    saved = {}
    for name, content in modules.items():
        dotted = name.replace("__", ".")
        module = ModuleType(dotted)
        module.__dict__.update(content)
        module.__path__ = []
        saved[dotted] = sys.modules.get(dotted)
        sys.modules[dotted] = module
    try:
        yield
    finally:
        for dotted, old in saved.items():
            if old is None:
                del sys.modules[dotted]
            else:
                sys.modules[dotted] = old


def model_of(layers: tuple[str, ...], size: int = 32) -> Any:
    """Return a module tree whose linear layers have these names."""
    from torch import nn

    root = nn.Module()
    for name in layers:
        *path, last = name.split(".")
        here: Any = root
        for part in path:
            if part not in here._modules:
                here.add_module(part, nn.Module())
            here = here._modules[part]
        here.add_module(last, nn.Linear(size, size))
    return root


def _uniform(label: str) -> dict[str, str]:
    return dict.fromkeys(GEMMS, label)


def _labels(plan: LayerPlan, activations: str) -> dict[str, str]:
    return {str(g): gemm_label(r, g, activations) for g, r in zip(GEMMS, plan.recipes, strict=True)}


def _dtype_label(dtype: Any, request: Request) -> str:
    name = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}[str(dtype)]
    return "high" if name == request.policy.activations else name


def read_python(done: Export, request: Request) -> Executed:
    """Apply the module to a model and look at what it put on each layer."""
    module = load_source(done.files["precision_policy.py"], "precision_policy")
    model = module.apply(model_of(request.layers))
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        plan = getattr(model.get_submodule(name), "_precision_plan", None)
        out[name] = _uniform("high") if plan is None else _python_labels(plan, request)
    return out


def _python_labels(plan: Any, request: Request) -> dict[str, str]:
    return {str(gemm): _python_label(plan[gemm], gemm, request) for gemm in GEMMS}


def _python_label(recipe: Any, gemm: Gemm, request: Request) -> str:
    if recipe is None:
        return "high"
    if recipe["format"] != "fp8":
        return "high" if recipe["format"] == request.policy.activations else str(recipe["format"])
    a, b = (recipe[operand] for operand in GEMM_OPERANDS[gemm])
    return f"fp8 {recipe['granularity']} {recipe['scale']} {a}*{b}"


def _read_float8(model: Any, request: Request) -> Executed:
    """Read a model that torchao converted, from the configuration each of its layers holds."""
    float8 = require("torchao.float8.float8_linear")
    config = require("torchao.float8.config")
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        layer = model.get_submodule(name)
        if not isinstance(layer, float8.Float8Linear):
            dtype = getattr(layer, "precision_dtype", None)
            out[name] = _uniform("high" if dtype is None else _dtype_label(dtype, request))
            continue
        held = layer.config
        casts = {
            "fprop": (held.cast_config_input, held.cast_config_weight),
            "dgrad": (held.cast_config_grad_output, held.cast_config_weight_for_grad_input),
            "wgrad": (held.cast_config_grad_output_for_grad_weight, held.cast_config_input_for_grad_weight),
        }
        out[name] = {str(gemm): _cast_label(pair, config) for gemm, pair in casts.items()}
    return out


def _cast_label(pair: Any, config: Any) -> str:
    if pair[0].scaling_type is config.ScalingType.DISABLED:
        return "high"
    kinds = {"tensor" if c.scaling_granularity is config.ScalingGranularity.TENSORWISE else "row" for c in pair}
    a, b = (str(c.target_dtype).removeprefix("torch.float8_").removesuffix("fn") for c in pair)
    return f"fp8 {'/'.join(sorted(kinds))} current {a}*{b}"


def read_torchao(done: Export, request: Request) -> Executed:
    """Convert a model with torchao itself."""
    require("torchao.float8")
    module = load_source(done.files["precision_torchao.py"], "precision_torchao")
    return _read_float8(module.apply(model_of(request.layers), emulate=True), request)


def read_accelerate(done: Export, request: Request) -> Executed:
    """Convert a model as ``Accelerator.prepare`` does with these kwargs; delayed recipes are read from the YAML."""
    config = yaml.safe_load(done.files["accelerate_config.yaml"])
    if config.get("fp8_config", {}).get("backend") == "TE":
        keys = config["fp8_config"]
        grad = {"HYBRID": "e5m2", "E4M3": "e4m3"}[keys["fp8_format"]]
        label = {"fprop": "e4m3*e4m3", "dgrad": f"{grad}*e4m3", "wgrad": f"{grad}*e4m3"}
        return {name: {g: f"fp8 tensor delayed {label[g]}" for g in GEMMS} for name in request.layers}
    require("accelerate", purpose="reading the exported kwargs")
    from accelerate.utils.ao import convert_model_to_fp8_ao

    module = load_source(done.files["precision_accelerate.py"], "precision_accelerate")
    eight = config["mixed_precision"] == "fp8"
    model = model_of(request.layers)
    if eight:
        module.prepare_model(model, emulate=True)
        handler = module.accelerator_kwargs(emulate=True)["kwargs_handlers"][0]
        convert_model_to_fp8_ao(model, config=handler.config, module_filter_func=handler.module_filter_func)
    else:
        module.prepare_model(model)
    return _read_float8(model, request)


def read_transformer_engine(done: Export, request: Request) -> Executed:
    """Ask the exported factory for every slot, with quantizers that only remember their arguments."""

    def remember(kind: str) -> Any:
        return lambda **kwargs: SimpleNamespace(kind=kind, **kwargs)

    tensor = "transformer_engine__pytorch__tensor__"
    fakes: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine__pytorch": {"Linear": object, "autocast": None},
        "transformer_engine__common": {},
        "transformer_engine__common__recipe": {
            "CustomRecipe": SimpleNamespace,
            "Format": SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"),
        },
        "transformer_engine__pytorch__constants": {
            "DType": SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2", kFloat4E2M1="e2m1")
        },
        "transformer_engine__pytorch__quantization": {"DelayedScalingRequest": remember("delayed")},
        "transformer_engine__pytorch__tensor": {},
        f"{tensor}float8_blockwise_tensor": {"Float8BlockQuantizer": remember("block")},
        f"{tensor}float8_tensor": {"Float8CurrentScalingQuantizer": remember("tensor")},
        f"{tensor}hybrid_tensor": {"HybridQuantizer": remember("hybrid")},
        f"{tensor}identity_tensor": {"IdentityQuantizer": remember("identity")},
        f"{tensor}mxfp8_tensor": {"MXFP8Quantizer": remember("mxfp8")},
        f"{tensor}nvfp4_tensor": {"NVFP4Quantizer": remember("nvfp4")},
    }
    with stand_ins(**fakes):
        module = load_source(done.files["precision_te.py"], "precision_te")
        factory = module.recipe().qfactory
        out: dict[str, dict[str, str]] = {}
        for name in request.layers:
            dtype = module.DTYPES.get(module.plan_of(name))
            if module.plan_of(name) not in module.QUANTIZED:
                out[name] = _uniform("high" if dtype is None else _dtype_label(dtype, request))
                continue
            slots = {
                operand: factory(SimpleNamespace(name=name, tensor_type=operand, module_type="linear"))
                for operand in _OPERAND_USES
            }
            out[name] = {str(gemm): _slot_label(gemm, slots) for gemm in GEMMS}
    return out


def _slot_label(gemm: Gemm, slots: dict[str, Any]) -> str:
    halves = []
    for operand in GEMM_OPERANDS[gemm]:
        slot = slots[operand]
        if slot.kind == "hybrid":
            first = _OPERAND_USES[operand].index(gemm) == 0
            slot = slot.rowwise_quantizer if first else slot.columnwise_quantizer
        halves.append((operand, slot))
    kinds = {slot.kind for _, slot in halves}
    if len(kinds) > 1:
        return f"operands that do not fit: {sorted(kinds)}"
    kind = kinds.pop()
    if kind in ("mxfp8", "nvfp4"):
        return str(kind)
    if kind == "identity":
        return "high"
    if kind == "delayed":
        forms = ["e5m2" if o == "grad_output" and s.fp8_format == "hybrid" else "e4m3" for o, s in halves]
        return f"fp8 tensor delayed {'*'.join(forms)}"
    return f"fp8 {kind} current {'*'.join(str(slot.fp8_dtype) for _, slot in halves)}"


def read_megatron(done: Export, request: Request) -> Executed:
    """Read as megatron/core/quantization/quant_config.py and TEQuantizationRecipe do."""
    document = yaml.safe_load(done.files["te_precision_config.yaml"])
    flags = dict(line.split(maxsplit=1) for line in done.files["megatron_flags.txt"].splitlines() if " " in line)
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        found = next(m for m in document["matchers"].values() if m["enabled"] and fnmatch.fnmatch(name, m["pattern"]))
        recipe = document["configs"][found["config"]]["training_recipe"]
        if recipe.get("override_quantized_autocast") is False:
            out[name] = _te_labels(flags["--fp8-recipe"], flags["--fp8-format"])
        elif "fp4_quantization_recipe" in recipe:
            out[name] = _uniform(recipe["fp4_quantization_recipe"])
        elif "fp8_quantization_recipe" in recipe:
            out[name] = _te_labels(recipe["fp8_quantization_recipe"], recipe["fp8_format"])
        else:
            out[name] = _uniform("high")
    return out


def _te_labels(recipe: str, form: str) -> dict[str, str]:
    grad = "e5m2" if form == "hybrid" else "e4m3"
    kinds = {"tensorwise": "tensor current", "blockwise": "block current", "delayed": "tensor delayed"}
    if recipe == "mxfp8":
        return _uniform("mxfp8")
    pairs = {"fprop": "e4m3*e4m3", "dgrad": f"{grad}*e4m3", "wgrad": f"{grad}*e4m3"}
    return {gemm: f"fp8 {kinds[recipe]} {pairs[gemm]}" for gemm in GEMMS}


def read_dlfw_inspect(done: Export, request: Request) -> Executed:
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
        if document:
            manager._load_config(document, {"transformer_engine": features, "base": features})
        for name in request.layers:
            found = manager.get_config_for_layer(f"model.{name}").get("transformer_engine", {})
            gemms = found.get("DisableQuantizationGEMM", {}).get("gemms", ())
            off = GEMMS if "DisableQuantizationLayer" in found else gemms
            out[name] = {str(gemm): "high" if gemm in off else main[gemm] for gemm in GEMMS}
    finally:
        manager.reset()
        logging.LOGGER = logger
    return out


def _recipe_in_notes(done: Export) -> dict[str, str]:
    text = next((note for note in done.notes if "te.autocast" in note), "")
    form = "hybrid" if "Format.HYBRID" in text else "e4m3"
    for cls, name in (
        ("DelayedScaling", "delayed"),
        ("Float8CurrentScaling", "tensorwise"),
        ("Float8BlockScaling", "blockwise"),
        ("MXFP8BlockScaling", "mxfp8"),
    ):
        if cls in text:
            return _te_labels(name, form)
    return _uniform("nvfp4" if "NVFP4" in text else "high")


def read_lightning(done: Export, request: Request) -> Executed:
    """Let Lightning's plugin convert the model."""
    require("lightning", purpose="reading the exported plugin")
    inner = load_source(done.files["precision_policy.py"], "precision_policy")
    with stand_ins(precision_policy=dict(inner.__dict__)):
        plugin = load_source(done.files["precision_lightning.py"], "precision_lightning").PolicyFabricPrecision()
        model = plugin.convert_module(model_of(request.layers))
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        plan = getattr(model.get_submodule(name), "_precision_plan", None)
        out[name] = _uniform("high") if plan is None else _python_labels(plan, request)
    return out


def read_deepspeed(done: Export, request: Request) -> Executed:
    """Read as DeepSpeed's get_torch_autocast and get_communication_data_type do."""
    config = json.loads(done.files["ds_config.json"])
    assert set(config) <= {"torch_autocast", "communication_data_type"}
    section = config.get("torch_autocast")
    if section:
        assert section["enabled"] is True
        assert section["dtype"] in ("bfloat16", "float16")
        assert all(isinstance(module, str) for module in section["lower_precision_safe_modules"])
    assert config.get("communication_data_type", "fp32") in ("fp16", "bf16", "fp32")
    return {name: _uniform("high") for name in request.layers}


def read_msamp(done: Export, request: Request) -> Executed:
    """Run the module with a stand-in for ``msamp.initialize`` and see which layers it may replace."""
    section = json.loads(done.files["ds_msamp.json"])["msamp"]
    assert section["opt_level"] in ("O1", "O2", "O3")
    model = model_of(request.layers)
    with stand_ins(msamp={"initialize": lambda *_args, **_kwargs: None}):
        load_source(done.files["precision_msamp.py"], "precision_msamp").initialize(model, None)
    own = _labels(LayerPlan.uniform(level("msamp-o1").recipe), request.policy.activations)
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        left_alone = getattr(model.get_submodule(name), "use_fp32_linear", False)
        out[name] = _uniform("high") if left_alone else own
    return out


def read_axolotl(done: Export, request: Request) -> Executed:
    """Read as axolotl's schema does: whole-model switches."""
    config = yaml.safe_load(done.files["axolotl_precision.yaml"])
    assert set(config) <= {"fp8", "fp8_enable_fsdp_float8_all_gather", "torch_compile", "bf16", "fp16"}
    own = _labels(LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]), request.policy.activations)
    return {name: own if config.get("fp8") else _uniform("high") for name in request.layers}


def read_torchtitan(done: Export, request: Request) -> Executed:
    """Run the config function with a stand-in converter and apply torchtitan's substring filter."""
    fields = {"recipe_name", "filter_fqns", "emulate", "model_compile_enabled"}

    class Converter:
        @staticmethod
        def Config(**kwargs: Any) -> Any:  # noqa: N802
            assert set(kwargs) <= fields
            return SimpleNamespace(**kwargs)

    names = ("torchtitan", "torchtitan__components", "torchtitan__components__quantization")
    fakes: dict[str, dict[str, Any]] = {name: {} for name in names}
    fakes["torchtitan__components__quantization__float8"] = {"Float8LinearConverter": Converter}
    with stand_ins(**fakes):
        converters = load_source(done.files["precision_torchtitan.py"], "precision_torchtitan").converters()
    if not converters:
        return {name: _uniform("high") for name in request.layers}
    recipe = BUILTIN_RECIPES[{"tensorwise": "fp8_tensorwise", "rowwise": "fp8_rowwise"}[converters[0].recipe_name]]
    labels = _labels(LayerPlan.uniform(recipe), request.policy.activations)
    skip = converters[0].filter_fqns
    return {name: _uniform("high") if any(s in name for s in skip) else labels for name in request.layers}


READERS: dict[str, Callable[[Export, Request], Executed]] = {
    "python": read_python,
    "torchao": read_torchao,
    "transformer-engine": read_transformer_engine,
    "accelerate": read_accelerate,
    "megatron": read_megatron,
    "dlfw-inspect": read_dlfw_inspect,
    "lightning": read_lightning,
    "deepspeed": read_deepspeed,
    "msamp": read_msamp,
    "axolotl": read_axolotl,
    "torchtitan": read_torchtitan,
}
