"""The ``torchao`` backend: its float8 training function, and its MXFP8 product, called from the layer's own forward.

``convert_to_float8_training`` would replace modules (losing hooks and subclasses) and ``quantize_`` would replace
Parameters (losing the optimizer); the autograd functions beneath them need neither. What torchao cannot express is
refused: delayed scaling (removed in 0.7), two formats for one operand, mixed power-of-two flags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoprec.backends.base import Backend, misaligned
from autoprec.backends.library import LibraryExecution, wants_bf16
from autoprec.errors import MissingDependencyError, UnsupportedError
from autoprec.numerics.execution import Execution
from autoprec.numerics.rounding import STORAGE
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import GEMM_OPERANDS, GEMMS, Gemm, Recipe
from autoprec.support.optional import require

_NO_BLOCKS = "torchao's products have no scales in blocks"


def _float8_refusal(recipe: Recipe, device: str) -> str:
    scaling = recipe.scaling
    if (recipe.format == "bf16" and recipe.output == "keep") or recipe.format == "mxfp8":
        return ""
    if recipe.format != "fp8" or scaling is None:
        return f"torchao trains no {recipe.describe()} GEMM"
    if scaling.scale == "delayed":
        return "torchao has no delayed scaling any more"
    if scaling.granularity == "block":
        return _NO_BLOCKS
    if scaling.amax_epsilon:
        return "torchao has no amax_epsilon"
    if recipe.accumulation != "full" and not device.startswith("cuda"):
        return "torchao's emulation ignores fast accumulation"
    return ""


def _plan_refusal(plan: LayerPlan) -> str:
    """Return why torchao cannot run a plan as a whole, or an empty string."""
    recipes = {gemm: plan.recipe(gemm) for gemm in GEMMS}
    formats = {None if r is None else r.format for r in recipes.values()}
    if "mxfp8" in formats:
        rest = [g for g, r in recipes.items() if r is None or r.format != "mxfp8"]
        return "" if rest in ([], ["wgrad"]) else "torchao's MXFP8 product takes MXFP8 in fprop and dgrad"
    eight = {gemm: r for gemm, r in recipes.items() if r is not None and r.format == "fp8"}
    if not eight:
        return "no GEMM of it is 8-bit: nothing for torchao to do"
    if any(r.scaling is not None and r.scaling.granularity == "block" for r in eight.values()):
        return _NO_BLOCKS
    if len({r.scaling.power_of_2 for r in eight.values() if r.scaling is not None}) > 1:
        return "torchao rounds all scales of a layer to powers of two, or none"
    chosen: dict[str, str] = {}
    for gemm, recipe in eight.items():
        for operand in GEMM_OPERANDS[gemm]:
            if chosen.setdefault(operand, recipe.operand_format(operand)) != recipe.operand_format(operand):
                return f"torchao casts {operand} to one format in both of its GEMMs"
    return ""


def float8_config(plan: LayerPlan, *, emulate: bool) -> Any:
    """Return torchao's ``Float8LinearConfig`` for a plan.

    Raises:
        UnsupportedError: torchao cannot express it.
        MissingDependencyError: torchao is not installed.
    """
    refusal = _plan_refusal(plan)
    if refusal:
        raise UnsupportedError(refusal, where="backend 'torchao'", fix="use backend 'native' or 'emulated'")
    config = require("torchao.float8.config", purpose="backend 'torchao'")
    formats = {"input": "e4m3", "weight": "e4m3", "grad_output": "e4m3"}
    for gemm in GEMMS:
        recipe = plan.recipe(gemm)
        if recipe is not None and recipe.format == "fp8":
            formats |= {operand: recipe.operand_format(operand) for operand in GEMM_OPERANDS[gemm]}

    def cast(gemm: Gemm, operand: str) -> Any:
        recipe = plan.recipe(gemm)
        target = STORAGE[formats[operand]]
        if recipe is None or recipe.format != "fp8" or recipe.scaling is None:
            return config.CastConfig(scaling_type=config.ScalingType.DISABLED, target_dtype=target)
        granular = config.ScalingGranularity
        chosen = granular.AXISWISE if recipe.scaling.granularity == "row" else granular.TENSORWISE
        return config.CastConfig(scaling_granularity=chosen, target_dtype=target)

    eight = [r for gemm in GEMMS if (r := plan.recipe(gemm)) is not None and r.scaling is not None]
    fast = {gemm: (r := plan.recipe(gemm)) is not None and r.accumulation == "fast" for gemm in GEMMS}
    return config.Float8LinearConfig(
        cast_config_input=cast("fprop", "input"),
        cast_config_weight=cast("fprop", "weight"),
        cast_config_grad_output=cast("dgrad", "grad_output"),
        cast_config_input_for_grad_weight=cast("wgrad", "input"),
        cast_config_weight_for_grad_input=cast("dgrad", "weight"),
        cast_config_grad_output_for_grad_weight=cast("wgrad", "grad_output"),
        gemm_config_output=config.Float8GemmConfig(use_fast_accum=fast["fprop"]),
        gemm_config_grad_input=config.Float8GemmConfig(use_fast_accum=fast["dgrad"]),
        gemm_config_grad_weight=config.Float8GemmConfig(use_fast_accum=fast["wgrad"]),
        round_scales_to_power_of_2=bool(eight and eight[0].scaling is not None and eight[0].scaling.power_of_2),
        emulate=emulate,
    )


class TorchaoBackend(Backend):
    """torchao's float8 and MXFP8 training products."""

    name = "torchao"
    ran_on = frozenset({(9, 0)})

    def available(self, device: str) -> Capability:
        """Say whether torchao is installed, and what runs its products on a device."""
        try:
            require("torchao.float8", purpose="backend 'torchao'")
        except MissingDependencyError as error:
            return Capability(False, error.what)
        how = "its own emulation" if device == "cpu" else "its kernels"
        return Capability(True, f"torchao runs on {device} with {how}")

    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Say whether torchao runs one GEMM under a recipe; 0 stands for a size not known yet."""
        refusal = _float8_refusal(recipe, device)
        if refusal:
            return Capability(False, refusal)
        multiple = 32 if recipe.format == "mxfp8" else 16 if device.startswith("cuda") and recipe.scaled else 1
        if why := misaligned(gemm, m, k, n, multiple):
            return Capability(False, why)
        if device.startswith("cuda") and recipe.scaled:
            need = (10, 0) if recipe.format == "mxfp8" else (8, 9)
            cc = torch.cuda.get_device_capability(device)
            if cc < need:
                return Capability(False, f"{recipe.describe()} needs compute capability {need[0]}.{need[1]}")
        return Capability(True, f"torchao {recipe.describe()}")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> Execution:
        """Return an execution that calls torchao's product.

        Raises:
            UnsupportedError: torchao cannot express the plan.
        """
        del seed
        refusal = _plan_refusal(plan)
        if refusal:
            raise UnsupportedError(refusal, where=f"layer '{name}'", fix="use backend 'native' or 'emulated'")
        weight = next(module.parameters(recurse=False), None)
        emulate = weight is None or weight.device.type == "cpu"
        compute = torch.bfloat16 if wants_bf16(plan) else None
        mx = plan.fprop is not None and plan.fprop.format == "mxfp8"
        product = _mx_product(plan, emulate) if mx else _float8_product(plan, emulate)
        note = "torchao's emulation" if emulate else ""
        rows = 32 if mx else 1 if emulate else 16
        return LibraryExecution(plan, product, plan.labels, rows, compute=compute, backend=self.name, note=note)


def _float8_product(plan: LayerPlan, emulate: bool) -> Any:
    config = float8_config(plan, emulate=emulate)
    linear = require("torchao.float8.float8_linear", purpose="backend 'torchao'")
    tensor = require("torchao.float8.float8_training_tensor", purpose="backend 'torchao'")
    mm = tensor.LinearMMConfig(
        *(
            tensor.ScaledMMConfig(emulate, gemm.use_fast_accum, False, config.pad_inner_dim)
            for gemm in (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        )
    )

    def product(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = linear.matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), mm, config)
        return out

    return product


def _mx_product(plan: LayerPlan, emulate: bool) -> Any:
    mx = require("torchao.prototype.moe_training.mxfp8_linear", purpose="MXFP8 through torchao")
    modes = require("torchao.prototype.mx_formats.config", purpose="MXFP8 through torchao")
    kernels = require("torchao.quantization.quantize_.common.kernel_preference", purpose="MXFP8 through torchao")
    kernel = kernels.KernelPreference.EMULATED if emulate else kernels.KernelPreference.AUTO
    high = plan.wgrad is None or plan.wgrad.format != "mxfp8"

    def product(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = mx._to_mxfp8_then_scaled_mm(x, weight.to(x.dtype), kernel, modes.ScaleCalculationMode.RCEIL, high)
        return out

    return product
