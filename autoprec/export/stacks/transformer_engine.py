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
from autoprec.export.snippets import CASTS_OUTPUT, dtype_table, fill
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

    Args:
        scaling: a key of :data:`SCALINGS`.
        form: ``fp8_format``, in any case: ``HYBRID`` has gradients in E5M2.
        given: keywords of the recipe's class; others than those of delayed scaling and NVFP4 are ignored.

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
    values = {"ACCUMULATORS": literal(full), "QUANTIZED": literal(specs), "OLDEST": _OLDEST}
    values |= {"RULES": rule_table(rules, names), "DTYPES": dtype_table(names, runs)}
    source = fill("transformer_engine", request, **values)
    return {"precision_te.py": header(request, "Transformer Engine") + source}, notes
