"""A policy in Transformer Engine's words: one quantizer per slot of a layer (TE 2.19 and newer).

TE drops what its constructors do not know without a word, so each field is passed by the name its class declares, and
what TE has no field for is refused here. The signatures are checked by tests that run TE's own Python.
"""

from __future__ import annotations

from typing import Any

import torch

from autoprec.errors import UnsupportedError
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import GEMMS, Gemm, Operand, Recipe, Scaling

#: GEMMs that read an operand along its rows and along its columns; see te.Linear's quantizer slots.
SLOT_GEMMS: dict[Operand, tuple[Gemm, Gemm]] = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
}


def delayed_scaling(recipe: Recipe | None) -> Scaling | None:
    """Return the scaling of a recipe with delayed scales, the one that remembers something between steps; else None."""
    scaling = None if recipe is None else recipe.scaling
    return scaling if scaling is not None and scaling.scale == "delayed" else None


def refusal(recipe: Recipe) -> str:
    """Return what of a scaled recipe Transformer Engine has no word for, or an empty string."""
    scaling, operands = recipe.scaling, recipe.operands
    if recipe.format == "int8" or (scaling is not None and scaling.granularity == "row"):
        return f"Transformer Engine has no {recipe.describe()} recipe"
    if scaling is None or operands is None:
        return ""
    if scaling.scale == "delayed":
        if scaling.power_of_2 or scaling.amax_epsilon:
            return "Transformer Engine's delayed scaling has no power_of_2 and no amax_epsilon"
        if (operands.input, operands.weight) != ("e4m3", "e4m3"):
            return "Transformer Engine's delayed scaling has E4M3 input and weight"
    if scaling.granularity == "block" and recipe.accumulation != "full":
        return "Transformer Engine multiplies blocks with full accumulation only"
    return ""


def accumulation(plan: LayerPlan) -> tuple[bool, bool, bool]:
    """Return TE's ``use_split_accumulator`` of fprop, dgrad and wgrad: full accumulation, unless the recipe says fast.

    TE's own default for fprop is fast.
    """
    split = [(recipe := plan.recipe(gemm)) is None or recipe.accumulation == "full" for gemm in GEMMS]
    return split[0], split[1], split[2]


class QuantizerFactory:
    """Answers Transformer Engine's question "which quantizer for this slot of this layer?" from the policy's plans.

    A fresh object per policy: TE rebuilds quantizers only when the factory is another one.
    """

    def __init__(self, te: Any, recipes: Any, device: torch.device) -> None:
        self.te, self.recipes, self.device = te, recipes, device
        self.plans: dict[str, LayerPlan] = {}

    def __call__(self, role: Any) -> Any:
        """Return the quantizer of a slot; never None, which TE takes for an error."""
        plan = self.plans.get(getattr(role, "name", "") or "") if role is not None else None
        operand = getattr(role, "tensor_type", "")
        if plan is None or operand not in SLOT_GEMMS:
            return self.te.IdentityQuantizer()
        row, column = (plan.recipe(gemm) for gemm in SLOT_GEMMS[operand])
        if row == column:
            return self._quantizer(row, operand)
        parts = self._quantizer(row, operand), self._quantizer(column, operand)
        return self.te.HybridQuantizer(rowwise_quantizer=parts[0], columnwise_quantizer=parts[1])

    def _quantizer(self, recipe: Recipe | None, operand: Operand) -> Any:
        if recipe is None or not recipe.scaled:
            return self.te.IdentityQuantizer(dtype=torch.bfloat16 if recipe is not None else None)
        kinds = self.te.DType
        dtype = kinds.kFloat8E5M2 if recipe.operand_format(operand) == "e5m2" else kinds.kFloat8E4M3
        if recipe.format == "mxfp8":
            return self.te.MXFP8Quantizer(fp8_dtype=dtype)
        if recipe.format == "nvfp4":
            transform = recipe.hadamard and operand != "weight"
            return self.te.NVFP4Quantizer(
                with_rht=transform,
                with_post_rht_amax=transform,
                stochastic_rounding=recipe.stochastic_rounding and operand == "grad_output",
                with_2d_quantization=recipe.weight_2d and operand == "weight",
            )
        scaling = recipe.scaling
        if scaling is None:
            return self.te.IdentityQuantizer()
        if scaling.scale == "delayed":
            formats = self.recipes.Format  # HYBRID is E4M3 forward and E5M2 backward
            return self.te.DelayedScalingRequest(
                fp8_format=formats.HYBRID if recipe.operand_format("grad_output") == "e5m2" else formats.E4M3,
                margin=scaling.margin,
                amax_history_len=scaling.amax_history_len,
                amax_compute_algo=scaling.amax_compute_algo,
            )
        options = {"force_pow_2_scales": scaling.power_of_2, "amax_epsilon": scaling.amax_epsilon}
        if scaling.granularity == "block":
            dim = 2 if operand == "weight" else 1
            return self.te.Float8BlockQuantizer(
                fp8_dtype=dtype, rowwise=True, columnwise=True, block_scaling_dim=dim, **options
            )
        return self.te.Float8CurrentScalingQuantizer(fp8_dtype=dtype, device=self.device, **options)


def with_accumulation(recipes: Any, made: Any, plan: LayerPlan) -> Any:
    """Give a recipe object the accumulation its plan asks for; te.Linear reads these attributes where they exist.

    Args:
        recipes: ``transformer_engine.common.recipe``.
        made: a recipe of it; is changed.
        plan: a recipe per GEMM.
    """
    for gemm, split in zip(GEMMS, accumulation(plan), strict=True):
        setattr(made, f"fp8_gemm_{gemm}", recipes.MMParams(use_split_accumulator=split))
    return made


def check_pairs(plan: LayerPlan, name: str) -> None:
    """Refuse plans whose slots TE cannot build: delayed scaling has no form for one direction.

    Raises:
        UnsupportedError: naming the layer.
    """
    if any(map(delayed_scaling, plan.recipes)) and len(set(plan.recipes)) > 1:
        raise UnsupportedError(
            "Transformer Engine cannot mix delayed scaling with another recipe in one layer",
            where=f"layer '{name}'",
            fix="use current scaling for this layer, or one recipe for its three GEMMs",
        )
