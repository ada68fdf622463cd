"""A layer's plan compiled into steps: per GEMM, how both operands are quantised and who multiplies them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autoprec.numerics.gemm import emulated_multiply, product_dtype
from autoprec.numerics.operand import CONTRACTION, QuantizedOperand, Spec
from autoprec.numerics.quantize import spec_of
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import GEMM_OPERANDS, GEMMS, KEEP, Gemm, Operand, Recipe

#: What kernels of a library multiply in as it is: plain casts.
NATIVE: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Names of the dtypes a script can compute in.
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True)
class GemmStep:
    """One GEMM of a compiled plan.

    Attributes:
        first, second: how the operands are quantised.
        axes: their contraction axes.
        product: dtype in which an emulated product is computed.
        fast: limited-precision accumulation.
        wide: the FP32 sums are returned, not rounded to the operands' 16 bits.
        label: what the audit says when it has run.
        multiply: who multiplies.
    """

    first: Spec
    second: Spec
    axes: tuple[int, int]
    product: torch.dtype
    fast: bool
    wide: bool
    label: str
    multiply: Multiply

    @property
    def values(self) -> bool:
        """True where operands are widened to float32 before they are multiplied, so that 8-bit codes save nothing."""
        return self.product is torch.float32 and self.multiply is multiply_emulated


#: Multiplies two quantised operands of a step into a tensor of a dtype.
Multiply = Callable[[QuantizedOperand, QuantizedOperand, GemmStep, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class Steps:
    """A plan compiled for one device type and compute dtype of the script (what ``keep`` GEMMs run in).

    ``wide_output`` is true when fprop is asked to return float32, which autocast would not narrow either;
    ``stateful`` when a step remembers something between calls (delayed scales, a random stream). ``delayed`` are the
    operands with delayed scales.
    """

    fprop: GemmStep
    dgrad: GemmStep
    wgrad: GemmStep
    wide_output: bool
    stateful: bool
    delayed: tuple[tuple[Operand, Spec], ...]

    @property
    def labels(self) -> dict[str, str]:
        """GEMM -> what it runs as, in the words of an audit."""
        return {"fprop": self.fprop.label, "dgrad": self.dgrad.label, "wgrad": self.wgrad.label}


def multiply_emulated(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, out_dtype: torch.dtype) -> Tensor:
    """Multiply as steps do that no hardware runs.

    Args:
        a, b: quantised operands, 2-D.
        step: which axes are summed, and in which dtype.
        out_dtype: of the product.

    Returns:
        ``[M, N]`` in ``out_dtype``.
    """
    return emulated_multiply(a, b, step.axes, out_dtype, product=step.product, fast=step.fast, wide=step.wide)


def _step(recipe: Recipe | None, gemm: Gemm, keep_dtype: torch.dtype, multiply: Multiply, device_type: str) -> GemmStep:
    axes = CONTRACTION[gemm]
    if recipe is None:
        first = second = Spec("cast", DTYPE_NAMES.get(keep_dtype, "fp32"))
        label, fast, wide = KEEP, False, False
    else:
        first, second = (spec_of(recipe, gemm, operand) for operand in GEMM_OPERANDS[gemm])
        label, fast, wide = recipe.describe(), recipe.accumulation == "fast", recipe.output == "fp32"
    product = product_dtype(first, second, device_type, wide=wide)
    return GemmStep(first, second, axes, product, fast, wide, label, multiply)


def compile_plan(
    plan: LayerPlan, keep_dtype: torch.dtype, device_type: str, multiply: Mapping[Gemm, Multiply] | None = None
) -> Steps:
    """Compile a plan for the dtype the script would have run the layer in; GEMMs not in ``multiply`` are emulated.

    Layers with equal plans share their steps.

    Args:
        plan: a recipe per GEMM.
        keep_dtype: the script's dtype of the layer.
        device_type: ``cpu`` or ``cuda``.
        multiply: GEMM -> the backend's function.
    """
    return _compiled(plan, keep_dtype, device_type, tuple((multiply or {}).items()))


@lru_cache(maxsize=4096)
def _compiled(
    plan: LayerPlan, keep_dtype: torch.dtype, device_type: str, multiply: tuple[tuple[Gemm, Multiply], ...]
) -> Steps:
    who = dict(multiply)
    steps = {g: _step(plan.recipe(g), g, keep_dtype, who.get(g, multiply_emulated), device_type) for g in GEMMS}
    wide = plan.fprop is not None and plan.fprop.wide_output
    pairs = [zip(GEMM_OPERANDS[g], (steps[g].first, steps[g].second), strict=True) for g in GEMMS]
    used = list(dict.fromkeys(itertools.chain(*pairs)))
    delayed = tuple(pair for pair in used if pair[1].rule.scale == "delayed")
    stateful = bool(delayed) or any(spec.stochastic for _, spec in used)
    return Steps(steps["fprop"], steps["dgrad"], steps["wgrad"], wide, stateful, delayed)


def native_dtype(plan: LayerPlan, device_type: str) -> torch.dtype | None:
    """Return the dtype in which autograd can run the whole plan by itself, or None when it cannot.

    FP16 GEMMs on a CPU are 20 to 100 times slower than float32 ones, so there they are emulated.
    """
    formats = {None if recipe is None else recipe.format for recipe in plan.recipes}
    if len(formats) != 1 or any(recipe is not None and recipe.output == "fp32" for recipe in plan.recipes):
        return None
    found = NATIVE.get(formats.pop() or "")
    return None if found is torch.float16 and device_type == "cpu" else found
