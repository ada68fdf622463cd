"""Readers of exported files: what each layer and everything beside it would run, as the target reads them.

They are independent of the exporters: written from the target's documentation and source, or asking the library itself
where it is one of the packages that the tests install. :mod:`tests.export.real` asks all the others, where they are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from autoprec.export import Export, Request
from autoprec.policy import LayerPlan, OptimizerPolicy
from autoprec.precision.recipes import GEMM_OPERANDS, GEMMS, Gemm, Operands, Recipe, Scaling
from autoprec.support.optional import require
from tests.conformance.exporters import Executed, gemm_label

__all__ = ["UNTOUCHED", "Reading", "fast_fprop", "labels", "load_source", "model_of", "read", "stand_ins", "uniform"]

_OPERAND_USES = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
#: What files say that say nothing but of layers.
UNTOUCHED = {
    **{"activations": "keep", "loss_scaling": "none", "execution": "keep", "communication.gradients": "fp32"},
    **{f"optimizer.{name}": "fp32" for name in OptimizerPolicy.model_fields},
}
_DTYPES = {"None": "keep", "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@dataclass(frozen=True)
class Reading:
    """What a target runs: layer -> GEMM -> label, and what it sets beside the layers (as ``wanted_settings``)."""

    layers: Executed
    settings: dict[str, str] = field(default_factory=lambda: dict(UNTOUCHED))


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


def uniform(label: str) -> dict[str, str]:
    return dict.fromkeys(GEMMS, label)


def labels(plan: LayerPlan, activations: str) -> dict[str, str]:
    return {str(g): gemm_label(r, g, activations) for g, r in zip(GEMMS, plan.recipes, strict=True)}


def fast_fprop(recipe: Recipe) -> LayerPlan:
    """What a library runs whose forward product accumulates fast (torchao and Transformer Engine, by default)."""
    slow = recipe.scaling is not None and recipe.scaling.granularity == "block"
    if recipe.format != "fp8" or slow:
        return LayerPlan.uniform(recipe)
    return LayerPlan(fprop=recipe.model_copy(update={"accumulation": "fast"}), dgrad=recipe, wgrad=recipe)


def _dtype_label(dtype: Any, request: Request) -> str:
    name = _DTYPES[str(dtype)]
    return "high" if name == request.policy.activations else name


def _activations(module: Any) -> dict[str, str]:
    return UNTOUCHED | {"activations": _DTYPES[str(module.ACTIVATIONS)]}


def read_python(done: Export, request: Request) -> Reading:
    """Apply the module to a model and look at what it put on each layer."""
    module = load_source(done.files["precision_policy.py"], "precision_policy")
    return _of_the_plain_module(module, module.apply(model_of(request.layers)), request)


def _of_the_plain_module(module: Any, model: Any, request: Request) -> Reading:
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        plan = getattr(model.get_submodule(name), "_precision_plan", None)
        out[name] = uniform("high") if plan is None else {str(g): _python_label(plan[g], g, request) for g in GEMMS}
    return Reading(out, UNTOUCHED | {"activations": module.ACTIVATIONS})


def _python_label(recipe: Any, gemm: Gemm, request: Request) -> str:
    if recipe is None:
        return "high"
    scaling = {name: recipe[name] for name in Scaling.model_fields if name in recipe}
    operands = {name: recipe[name] for name in Operands.model_fields if name in recipe}
    kept = {name: recipe[name] for name in ("accumulation", "output") if name in recipe}
    document = {"format": recipe["format"], **kept}
    document |= {"scaling": scaling, "operands": operands} if scaling else {}
    return gemm_label(Recipe.model_validate(document), gemm, request.policy.activations)


def _read_float8(model: Any, request: Request) -> Executed:
    """Read a model that torchao converted, from the configuration each of its layers holds."""
    float8 = require("torchao.float8.float8_linear")
    out: dict[str, dict[str, str]] = {}
    for name in request.layers:
        layer = model.get_submodule(name)
        if not isinstance(layer, float8.Float8Linear):
            dtype = getattr(layer, "precision_dtype", None)
            out[name] = uniform("high" if dtype is None else _dtype_label(dtype, request))
        else:
            out[name] = float8_labels(layer.config)
    return out


def float8_labels(held: Any) -> dict[str, str]:
    """What a ``Float8LinearConfig`` runs, GEMM by GEMM."""
    gemms = {
        "fprop": (held.cast_config_input, held.cast_config_weight, held.gemm_config_output),
        "dgrad": (held.cast_config_grad_output, held.cast_config_weight_for_grad_input, held.gemm_config_grad_input),
        "wgrad": (
            held.cast_config_grad_output_for_grad_weight,
            held.cast_config_input_for_grad_weight,
            held.gemm_config_grad_weight,
        ),
    }
    out = {}
    for gemm, (first, second, product) in gemms.items():
        marks = (" pow2" if held.round_scales_to_power_of_2 else "") + (" fast" if product.use_fast_accum else "")
        out[gemm] = _cast_label(first, second) + marks if first.scaling_type.value != "disabled" else "high"
    return out


def _cast_label(*pair: Any) -> str:
    kinds = {"tensor" if cast.scaling_granularity.value == "tensorwise" else "row" for cast in pair}
    a, b = (str(c.target_dtype).removeprefix("torch.float8_").removesuffix("fn") for c in pair)
    return f"fp8 {'/'.join(sorted(kinds))} current {a}*{b}"


def read_torchao(done: Export, request: Request) -> Reading:
    """Convert a model with torchao itself."""
    require("torchao.float8")
    module = load_source(done.files["precision_torchao.py"], "precision_torchao")
    model = module.apply(model_of(request.layers), emulate=True)
    return Reading(_read_float8(model, request), _activations(module))


def read_accelerate(done: Export, request: Request) -> Reading:
    """Convert a model as ``Accelerator.prepare`` does with these kwargs; delayed recipes are read from the YAML."""
    config = yaml.safe_load(done.files["accelerate_config.yaml"])
    mixed = config["mixed_precision"]
    runs = {"activations": {"no": "keep", "fp8": "bf16"}.get(mixed, mixed)}
    settings = UNTOUCHED | runs | {"loss_scaling": "dynamic" if mixed == "fp16" else "none"}
    if config.get("fp8_config", {}).get("backend") == "TE":
        keys = config["fp8_config"]
        delayed = {name: keys[name] for name in ("margin", "amax_history_len", "amax_compute_algo")}
        plan = fast_fprop(te_recipe("delayed", keys["fp8_format"].lower(), **delayed))
        return Reading(dict.fromkeys(request.layers, labels(plan, "bf16")), settings)
    require("accelerate", purpose="reading the exported kwargs")
    from accelerate.utils.ao import convert_model_to_fp8_ao

    module = load_source(done.files["precision_accelerate.py"], "precision_accelerate")
    model = model_of(request.layers)
    if mixed == "fp8":
        module.prepare_model(model, emulate=True)
        handler = module.accelerator_kwargs(emulate=True)["kwargs_handlers"][0]
        convert_model_to_fp8_ao(model, config=handler.config, module_filter_func=handler.module_filter_func)
    else:
        module.prepare_model(model)
    return Reading(_read_float8(model, request), settings)


def te_recipe(kind: str, form: str = "e4m3", **delayed: Any) -> Recipe:
    """What Transformer Engine's built-in recipe computes in, but for its accumulators: see :func:`fast_fprop`."""
    grad = "e5m2" if form == "hybrid" else "e4m3"
    operands = {"input": "e4m3", "weight": "e4m3", "grad_output": grad}
    if kind == "mxfp8":
        return Recipe.model_validate({"format": "mxfp8", "operands": operands})
    scaling = {
        "delayed": {"scale": "delayed", **delayed},
        "tensorwise": {},
        "blockwise": {"granularity": "block", "power_of_2": True},
    }[kind]
    return Recipe.model_validate(
        {"format": "fp8", "scaling": {"granularity": "tensor"} | scaling, "operands": operands}
    )


def te_stand_ins() -> dict[str, dict[str, Any]]:
    """Quantizers that only remember their arguments, in the places of Transformer Engine's own."""

    def remember(kind: str) -> Any:
        return lambda **kwargs: SimpleNamespace(kind=kind, **kwargs)

    tensor = "transformer_engine__pytorch__tensor__"
    return {
        "transformer_engine": {},
        "transformer_engine__pytorch": {"Linear": object, "autocast": None},
        "transformer_engine__common": {},
        "transformer_engine__common__recipe": {
            "CustomRecipe": SimpleNamespace,
            "Format": SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"),
            "MMParams": SimpleNamespace,
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


def read_transformer_engine(done: Export, request: Request) -> Reading:
    """Ask the exported factory for every slot, with quantizers that only remember their arguments."""
    with stand_ins(**te_stand_ins()):
        module = load_source(done.files["precision_te.py"], "precision_te")
        made = module.recipe()
        out: dict[str, dict[str, str]] = {}
        for name in request.layers:
            dtype = module.DTYPES.get(module.plan_of(name))
            if module.plan_of(name) not in module.QUANTIZED:
                out[name] = uniform("high" if dtype is None else _dtype_label(dtype, request))
                continue
            slots = {
                operand: made.qfactory(SimpleNamespace(name=name, tensor_type=operand, module_type="linear"))
                for operand in _OPERAND_USES
            }
            out[name] = {str(gemm): _slot_label(gemm, slots, made) for gemm in GEMMS}
    return Reading(out, _activations(module))


def _slot_label(gemm: Gemm, slots: dict[str, Any], made: Any) -> str:
    halves: dict[str, Any] = {}
    for operand in GEMM_OPERANDS[gemm]:
        slot = slots[operand]
        if slot.kind == "hybrid":
            first = _OPERAND_USES[operand].index(gemm) == 0
            slot = slot.rowwise_quantizer if first else slot.columnwise_quantizer
        halves[operand] = slot
    kinds = {slot.kind for slot in halves.values()}
    if len(kinds) > 1:
        return f"operands that do not fit: {sorted(kinds)}"
    kind, slot = kinds.pop(), halves[GEMM_OPERANDS[gemm][0]]
    if kind == "identity":
        return "high"
    if kind == "nvfp4":
        square = halves["weight"].with_2d_quantization if "weight" in halves else False
        stochastic = halves["grad_output"].stochastic_rounding if "grad_output" in halves else False
        marks = {"2d": square, "stochastic": stochastic, "hadamard": all(h.with_rht for h in halves.values())}
        return " ".join(["nvfp4", *(mark for mark, there in marks.items() if there)])
    if kind == "delayed":
        delayed = {name: getattr(slot, name) for name in ("margin", "amax_history_len", "amax_compute_algo")}
        recipe = te_recipe("delayed", slot.fp8_format, **delayed)
    elif kind == "mxfp8":
        return f"mxfp8 {'*'.join(half.fp8_dtype for half in halves.values())}"
    else:
        scaling = {"granularity": kind, "power_of_2": slot.force_pow_2_scales, "amax_epsilon": slot.amax_epsilon}
        formats = {operand: half.fp8_dtype for operand, half in halves.items()}
        recipe = Recipe.model_validate({"format": "fp8", "scaling": scaling, "operands": formats})
    full = getattr(made, f"fp8_gemm_{gemm}").use_split_accumulator or kind == "block"
    return gemm_label(recipe.model_copy(update={"accumulation": "full" if full else "fast"}), gemm)


def read_lightning(done: Export, request: Request) -> Reading:
    """Let Lightning's plugin convert the model."""
    require("lightning", purpose="reading the exported plugin")
    inner = load_source(done.files["precision_policy.py"], "precision_policy")
    with stand_ins(precision_policy=dict(inner.__dict__)):
        plugin = load_source(done.files["precision_lightning.py"], "precision_lightning").PolicyFabricPrecision()
        model = plugin.convert_module(model_of(request.layers))
    return _of_the_plain_module(inner, model, request)


def read(done: Export, request: Request) -> Reading:
    """Read an export by its target's reader.

    Raises:
        MissingDependencyError: the library that it asks is not installed.
    """
    from tests.export import config_readers as configs
    from tests.export import recipe_readers as recipes

    readers: dict[str, Callable[[Export, Request], Reading]] = {
        "python": read_python,
        "torchao": read_torchao,
        "transformer-engine": read_transformer_engine,
        "accelerate": read_accelerate,
        "megatron": configs.read_megatron,
        "dlfw-inspect": configs.read_dlfw_inspect,
        "lightning": read_lightning,
        "msamp": configs.read_msamp,
        "torchtitan": configs.read_torchtitan,
        "torchao-fqn": recipes.read_torchao_fqn,
        "automodel": recipes.read_automodel,
    }
    return readers[done.target](done, request)
