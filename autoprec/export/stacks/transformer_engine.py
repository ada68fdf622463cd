"""``--to transformer-engine``: a CustomRecipe factory (TE >= 2.19).

The factory answers, for every slot of every layer, how it is quantised: per layer and per GEMM, under one autocast
around the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autoprec.errors import FileError
from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, literal, name_plans, rule_table
from autoprec.export.settings import IN_FORWARD, SCALER, report_settings
from autoprec.export.snippets import CASTS_OUTPUT, dtype_table, fill, shared
from autoprec.export.summary import changes, current_scaling, fast_forward, fitted, lose
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm, Operand, Recipe

#: The oldest Transformer Engine that the file runs on: Identity- and HybridQuantizer.
_OLDEST = "2.19"


def _nearest_recipe(recipe: Recipe, mixed: bool = False) -> Recipe:
    """Return what TE runs instead of a scaled recipe; delayed scaling is not offered in a layer of ``mixed`` ones."""
    if recipe.format == "int8":
        return BUILTIN_RECIPES["bf16"]
    if recipe.format != "fp8" or recipe.scaling is None or recipe.operands is None:
        return recipe
    change: dict[str, Any] = {"granularity": "tensor"} if recipe.scaling.granularity == "row" else {}
    if recipe.scaling.scale == "delayed":
        pair = (recipe.operands.input, recipe.operands.weight, recipe.operands.grad_output)
        if mixed or pair not in (("e4m3", "e4m3", "e4m3"), ("e4m3", "e4m3", "e5m2")):
            return recipe.model_copy(update={"scaling": current_scaling(recipe.scaling)})
        change |= {"power_of_2": False, "amax_epsilon": 0.0}
    near = {"scaling": recipe.scaling.model_copy(update=change)}
    full = {"accumulation": "full"} if recipe.scaling.granularity == "block" else {}
    return recipe.model_copy(update=near | full)


def nearest_te(plan: LayerPlan, activations: str = "bf16") -> LayerPlan:
    """Return the nearest plan that the factory expresses under such activations."""
    # accumulators are not a part of how an operand is quantised
    kinds = {recipe and recipe.model_copy(update={"accumulation": "full"}) for recipe in plan.recipes}
    return fitted(plan, lambda recipe: _nearest_recipe(recipe, len(kinds) > 1), activations)


def builtin_plan(recipe: Recipe) -> LayerPlan:
    """Return what Transformer Engine's built-in recipe nearest to a recipe runs in a whole layer.

    What it has no recipe for runs in bf16.
    """
    near = _nearest_recipe(recipe) if recipe.scaled else recipe
    if not near.scaled:
        return LayerPlan.uniform(BUILTIN_RECIPES["bf16"])
    if near.operands is None:
        return LayerPlan.uniform(near)
    operands = near.operands.model_copy(update={"input": "e4m3", "weight": "e4m3"})
    near = near.model_copy(update={"operands": operands})
    if near.scaling is not None:
        rounded = {"power_of_2": near.scaling.granularity == "block", "amax_epsilon": 0.0}
        near = near.model_copy(update={"scaling": near.scaling.model_copy(update=rounded)})
    return fast_forward(near)


def _accumulators(plans: Collection[LayerPlan]) -> dict[Gemm, bool]:
    """Return GEMM -> full accumulation, of which one recipe object has one word: in full where layers differ."""
    found = {
        gemm: [r for plan in plans if (r := plan.recipe(gemm)) is not None and r.format == "fp8"] for gemm in GEMMS
    }
    return {gemm: not used or any(r.accumulation == "full" for r in used) for gemm, used in found.items()}


def _accumulating(plan: LayerPlan, full: Mapping[Gemm, bool]) -> LayerPlan:
    pairs = zip(GEMMS, plan.recipes, strict=True)
    return plan.model_copy(
        update={gemm: r.model_copy(update={"accumulation": "full"}) for gemm, r in pairs if r and full[gemm]}
    )


#: How Transformer Engine scales -> the class of its recipe, and the recipe of ours that it runs.
SCALINGS = {
    "delayed": ("DelayedScaling", BUILTIN_RECIPES["fp8_delayed"]),
    "tensor": ("Float8CurrentScaling", BUILTIN_RECIPES["fp8_tensorwise"]),
    "block": ("Float8BlockScaling", BUILTIN_RECIPES["fp8_block"]),
    "mxfp8": ("MXFP8BlockScaling", BUILTIN_RECIPES["mxfp8"]),
    "nvfp4": ("NVFP4BlockScaling", BUILTIN_RECIPES["nvfp4"]),
}
#: Keywords of the classes: where delayed scaling leaves one out, and what switches a part of an NVFP4 recipe off.
_DELAYED = {"margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"}
_OFF = {"disable_rht": "hadamard", "disable_stochastic_rounding": "stochastic_rounding",
        "disable_2d_quantization": "weight_2d"}  # fmt: skip
#: scaling -> the keywords that are read.
KEYWORDS = {"delayed": tuple(_DELAYED), "nvfp4": tuple(_OFF)}


def scaling_of(recipe: Recipe) -> str:
    """Return which of :data:`SCALINGS` a recipe that Transformer Engine runs has."""
    if recipe.scaling is None:
        return recipe.format
    return "delayed" if recipe.scaling.scale == "delayed" else recipe.scaling.granularity


def keywords(recipe: Recipe) -> dict[str, Any]:
    """Return the keywords of Transformer Engine's class for a recipe, beside the formats."""
    if recipe.format == "nvfp4":
        return {word: not getattr(recipe, field) for word, field in _OFF.items()}
    if scaling_of(recipe) == "delayed":
        return {word: getattr(recipe.scaling, word) for word in _DELAYED}
    return {}


def read_recipe(scaling: str, form: str = "HYBRID", given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the document of the recipe that Transformer Engine runs under a format and the keywords of its class.

    Raises:
        FileError: a format that does not train.
    """
    made, given = SCALINGS[scaling][1].to_dict(), given or {}
    if scaling == "nvfp4":
        return made | {field: not given.get(word, False) for word, field in _OFF.items()}
    if form.upper() not in ("HYBRID", "E4M3"):
        raise FileError(f"fp8_format {form.upper()} is not trainable", fix="use HYBRID or E4M3")
    made["operands"]["grad_output"] = "e5m2" if form.upper() == "HYBRID" else "e4m3"
    if scaling == "delayed":
        made["scaling"] |= _DELAYED | {word: given[word] for word in _DELAYED if word in given}
    return made


def fp8_format(recipe: Recipe) -> str:
    """Return Transformer Engine's word for the formats of a recipe's operands: ``HYBRID`` has E5M2 gradients."""
    return "HYBRID" if recipe.operand_format("grad_output") == "e5m2" else "E4M3"


def _slot(recipe: Recipe | None, gemm: Gemm, operand: Operand) -> dict[str, Any] | None:
    """Return how one operand of one GEMM is quantised, as the exported factory reads it; None is high precision."""
    if recipe is None or not recipe.scaled:
        return None
    if recipe.format == "nvfp4":
        return {
            "kind": "nvfp4",
            "hadamard": recipe.hadamard and gemm == "wgrad",
            "stochastic": recipe.stochastic_rounding and operand == "grad_output",
            "square": recipe.weight_2d and operand == "weight",
        }
    kind = scaling_of(recipe)
    if kind == "delayed":
        return {"kind": kind, "hybrid": fp8_format(recipe) == "HYBRID", **keywords(recipe)}
    out: dict[str, Any] = {"kind": kind, "format": recipe.operand_format(operand)}
    if recipe.scaling is not None:
        out |= {"power_of_2": recipe.scaling.power_of_2, "amax_epsilon": recipe.scaling.amax_epsilon}
    return out | ({"square": operand == "weight"} if kind == "block" else {})


def slot_specs(plan: LayerPlan) -> dict[str, list[dict[str, Any] | None]]:
    """Return operand -> [how for its first GEMM, how for its second]: row and column of TE's HybridQuantizer."""
    out: dict[str, list[dict[str, Any] | None]] = {}
    for gemm in GEMMS:
        for operand in GEMM_OPERANDS[gemm]:
            out.setdefault(operand, []).append(_slot(plan.recipe(gemm), gemm, operand))
    return {operand: out[operand] for operand in ("input", "weight", "grad_output")}


_FACTORY = '''# Needs Transformer Engine @OLDEST@ or newer.
import contextlib
import re
import warnings

import torch
import torch.overrides
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import CustomRecipe, Format, MMParams
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import DelayedScalingRequest
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

# (regular expression on module names, plan); the first match wins
RULES = @RULES@
# plan -> operand -> how it is quantised for its two products (None: high precision):
#   input: fprop, wgrad; weight: fprop, dgrad; grad_output: dgrad, wgrad
QUANTIZED = @QUANTIZED@
@SETTINGS@
ACCUMULATORS = @ACCUMULATORS@  # product -> accumulate in full
FORMATS = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}

@PLAN_OF@

def quantizer(spec):
    """The quantizer of one operand of one product."""
    if spec is None:
        return IdentityQuantizer()
    kind = spec["kind"]
    if kind == "delayed":
        return DelayedScalingRequest(
            fp8_format=Format.HYBRID if spec["hybrid"] else Format.E4M3,
            margin=spec["margin"],
            amax_history_len=spec["amax_history_len"],
            amax_compute_algo=spec["amax_compute_algo"],
        )
    if kind == "tensor":
        return Float8CurrentScalingQuantizer(
            fp8_dtype=FORMATS[spec["format"]],
            device=torch.device("cuda"),
            force_pow_2_scales=spec["power_of_2"],
            amax_epsilon=spec["amax_epsilon"],
        )
    if kind == "block":
        return Float8BlockQuantizer(
            fp8_dtype=FORMATS[spec["format"]],
            rowwise=True,
            columnwise=True,
            amax_epsilon=spec["amax_epsilon"],
            force_pow_2_scales=spec["power_of_2"],
            block_scaling_dim=2 if spec["square"] else 1,
        )
    if kind == "mxfp8":
        return MXFP8Quantizer(fp8_dtype=FORMATS[spec["format"]])
    return NVFP4Quantizer(
        fp4_dtype=DType.kFloat4E2M1,
        with_rht=spec["hadamard"],
        with_post_rht_amax=spec["hadamard"],
        with_2d_quantization=spec["square"],
        stochastic_rounding=spec["stochastic"],
        with_random_sign_mask=True,
    )


def recipe():
    """A fresh recipe. Keep the object for the whole run: Transformer Engine compares recipes by their factory."""

    def factory(role):
        specs = QUANTIZED.get(plan_of(role.name)) if role is not None and role.name else None
        if specs is None or role.tensor_type not in specs:
            return IdentityQuantizer()
        row, column = specs[role.tensor_type]
        if row == column:
            return quantizer(row)
        return HybridQuantizer(rowwise_quantizer=quantizer(row), columnwise_quantizer=quantizer(column))

    return accumulating(CustomRecipe(qfactory=factory), ACCUMULATORS)


def accumulating(made, full):
    """Say per product whether it accumulates in full; Transformer Engine's own fprop does not, on Hopper."""
    for gemm, split in full.items():
        setattr(made, f"fp8_gemm_{gemm}", MMParams(use_split_accumulator=split))
    return made


def swap(model):
    """Replace, in place, every nn.Linear that has an FP8 or FP4 product by te.Linear around the same Parameters.

    An optimizer built before keeps working. In and out features and tokens per call must be multiples of 16
    (32 for MXFP8, 128 for block scaling).
    """
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            plan = plan_of(name)
            if not isinstance(child, nn.Linear):
                continue
            if plan in QUANTIZED:
                new = te.Linear(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    params_dtype=child.weight.dtype,
                    device="meta",
                    name=name,
                )
                new.weight = child.weight
                if child.bias is not None:
                    new.bias = child.bias
                setattr(parent, child_name, new.train(child.training))
            elif plan in DTYPES and not hasattr(child, "precision_dtype"):
                run_in(child, DTYPES[plan])
    warn_of_left_out(model)
    return attend(model)

@MECHANICS@

def context(fixed):
    """Run the forward pass inside; call backward outside. ``fixed`` is what recipe() returned, once."""
    return te.autocast(enabled=True, recipe=fixed)
'''


def write(request: Request, losses: Losses) -> Written:
    """Return ``precision_te.py``."""
    rules = request.rules()
    names = name_plans(request.policy, rules)
    activations = request.policy.activations
    near = {rule.plan: nearest_te(rule.plan, activations) for rule in rules}
    full = _accumulators(near.values())
    runs = {plan: _accumulating(one, full) for plan, one in near.items()}
    lose(losses, request, lambda plan, _: changes(plan, runs[plan], activations))
    specs = {names[plan]: slot_specs(one) for plan, one in runs.items() if one.scaled}
    notes = [
        "precision_te.swap(model); fixed = precision_te.recipe(); with precision_te.context(fixed): ...",
        f"precision_te.py needs Transformer Engine {_OLDEST} or newer",
    ]
    report_settings(request, losses, SCALER, kept={"output": CASTS_OUTPUT, "attention": IN_FORWARD})
    values = {"ACCUMULATORS": literal(full), "QUANTIZED": literal(specs), "OLDEST": _OLDEST, **shared(request)}
    source = fill(_FACTORY, **values, RULES=rule_table(rules, names), DTYPES=dtype_table(names, runs))
    return {"precision_te.py": header(request, "Transformer Engine") + source}, notes
