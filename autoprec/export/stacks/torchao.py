"""``--to torchao``: repeated ``convert_to_float8_training``, one call per distinct FP8 plan.

torchao's constraints (``Float8LinearConfig.__post_init__``): both operands of a GEMM are FP8 or neither is; one dtype
per operand; scales are computed from the tensor at hand, per tensor or per row. A ``CastConfig`` must never be shared:
torchao fills in its dtype in place, so every one is written out with an explicit dtype.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, name_plans, rule_table
from autoprec.export.settings import IN_FORWARD, SCALER, report_settings
from autoprec.export.snippets import CASTS_OUTPUT, dtype_table, fill
from autoprec.export.summary import changes, current_scaling, fast_forward, fitted, lose
from autoprec.export.words import Words
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Gemm, Operand, Recipe

_GEMM_FIELDS: dict[Gemm, str] = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}
#: operand -> (field, GEMM it is first used in), (field, GEMM it is used in again)
_CASTS: dict[Operand, tuple[tuple[str, Gemm], tuple[str, Gemm]]] = {
    "input": (("input", "fprop"), ("input_for_grad_weight", "wgrad")),
    "weight": (("weight", "fprop"), ("weight_for_grad_input", "dgrad")),
    "grad_output": (("grad_output", "dgrad"), ("grad_output_for_grad_weight", "wgrad")),
}


_ROW = fast_forward(BUILTIN_RECIPES["fp8_rowwise"])
#: What torchao's recipe names run (``Float8LinearConfig.from_recipe_name``).
NAMED = Words(
    "torchao's {} recipe",
    {
        "tensorwise": fast_forward(BUILTIN_RECIPES["fp8_tensorwise"]),
        "rowwise": _ROW,
        "rowwise_with_gw_hp": LayerPlan(fprop=_ROW.fprop, dgrad=_ROW.dgrad, wgrad=None),
    },
    {"rowwise_with_gw_hp": "one scale per tensor for dgrad's weight"},
)


def nearest_float8(plan: LayerPlan, activations: str = "bf16") -> LayerPlan:
    """Return the nearest plan that torchao runs under such activations: of one dtype for each operand."""
    near = fitted(plan, _nearest_recipe, activations)
    first = next(iter(near.scaled), None)
    alike: dict[str, Any] = {
        gemm: recipe.model_copy(update={"operands": first.operands, "scaling": first.scaling})
        for gemm, recipe in zip(GEMMS, near.recipes, strict=True)
        if recipe in near.scaled and first is not None and not _agrees(recipe, first)
    }
    return near.model_copy(update=alike)


def _nearest_recipe(recipe: Recipe) -> Recipe:
    if recipe.format != "fp8" or recipe.scaling is None:
        return BUILTIN_RECIPES["bf16"]
    scaling = current_scaling(recipe.scaling).model_copy(update={"amax_epsilon": 0.0})
    if scaling.granularity == "block":
        scaling = scaling.model_copy(update={"granularity": "row"})
    return recipe.model_copy(update={"scaling": scaling})


def _agrees(a: Recipe, b: Recipe) -> bool:
    """Say whether torchao can hold both in one layer: the same dtype per operand, one rounding of scales."""
    same_power = (a.scaling and a.scaling.power_of_2) == (b.scaling and b.scaling.power_of_2)
    return a.operands == b.operands and bool(same_power)


def _cast(recipe: Recipe | None, operand: Operand, fallback: Recipe) -> str:
    source = recipe if recipe is not None and recipe.scaled else fallback
    dtype = f"torch.float8_{source.operand_format(operand)}" + (
        "fn" if source.operand_format(operand) == "e4m3" else ""
    )
    if recipe is None or not recipe.scaled or recipe.scaling is None:
        return f"CastConfig(scaling_type=ScalingType.DISABLED, target_dtype={dtype})"
    granularity = "AXISWISE" if recipe.scaling.granularity == "row" else "TENSORWISE"
    return f"CastConfig(scaling_granularity=ScalingGranularity.{granularity}, target_dtype={dtype})"


def gathers_float8(plan: LayerPlan) -> bool:
    """Say whether FSDP2 can gather this layer's weight in FP8: both its products take it with one scale per tensor."""
    both = (plan.fprop, plan.dgrad)
    return all(r is not None and r.scaling is not None and r.scaling.granularity == "tensor" for r in both)


def float8_config(plan: LayerPlan) -> str:
    """Return the source of a ``Float8LinearConfig`` for a plan that fits."""
    scaled = plan.scaled[0]
    lines = []
    for operand, uses in _CASTS.items():
        for field, gemm in uses:
            lines.append(f"cast_config_{field}={_cast(plan.recipe(gemm), operand, scaled)}")
    for gemm, field in _GEMM_FIELDS.items():
        recipe = plan.recipe(gemm)
        fast = recipe is not None and recipe.scaled and recipe.accumulation == "fast"
        lines.append(f"gemm_config_{field}=Float8GemmConfig(use_fast_accum={fast})")
    power = scaled.scaling is not None and scaled.scaling.power_of_2
    lines.append(f"round_scales_to_power_of_2={power}")
    lines += ["pad_inner_dim=True", "emulate=emulate"]
    if gathers_float8(plan):
        lines.append("enable_fsdp_float8_all_gather=gather_float8")
    return "Float8LinearConfig(\n" + "".join(f"            {line},\n" for line in lines) + "        )"


def torchao_source(request: Request, losses: Losses) -> str:
    """Return the module that converts a model with torchao."""
    rules, activations = request.rules(), request.policy.activations
    names = name_plans(request.policy, rules)
    runs = {rule.plan: nearest_float8(rule.plan, activations) for rule in rules}
    lose(losses, request, lambda plan, _: changes(plan, runs[plan], activations))
    eight = {names[plan]: float8_config(one) for plan, one in runs.items() if one.scaled}
    configs = "{\n" + "".join(f'        "{name}": {source},\n' for name, source in eight.items()) + "    }"
    values = {"RULES": rule_table(rules, names), "DTYPES": dtype_table(names, runs), "CONFIGS": configs}
    return header(request, "torchao") + fill("torchao", request, **values)


def write(request: Request, losses: Losses) -> Written:
    """Return ``precision_torchao.py`` with ``apply(model)`` and ``autocast()``."""
    source = torchao_source(request, losses)
    kept = {"output": CASTS_OUTPUT, "attention": IN_FORWARD}
    report_settings(request, losses, SCALER, kept=kept)
    notes = ("import precision_torchao; precision_torchao.apply(model); with precision_torchao.autocast(): ...",)
    return {"precision_torchao.py": source}, notes
