"""Grouped GEMMs in FP8: the tokens of all experts, sorted by expert, times one weight each, through one torch call.

``torch._scaled_grouped_mm`` (E4M3, bfloat16 results) multiplies rows ``ends[e - 1]`` to ``ends[e]`` by the weight of
expert ``e``: on compute capability 9.0 with a scale for each row of either operand, as below, on 10.0 in MXFP8
(``experts.mx``). Every expert is quantised as a layer of its own, as the loop of
:meth:`~autoprec.numerics.execution.Execution.grouped` does it, bit for bit:

======  =============================  ============================  ==========================
GEMM    first operand, scales          second operand, scales        result
======  =============================  ============================  ==========================
fprop   tokens ``[M, K]``, ``[M]``     ``[E, N, K]``, ``[E, N]``     ``[M, N]``
dgrad   gradients ``[M, N]``, ``[M]``  ``[E, K, N]``, ``[E, K]``     ``[M, K]``
wgrad   ``[N, T]``, ``[E N]``          ``[K, T]``, ``[E K]``         ``[E, N, K]``
======  =============================  ============================  ==========================

Only wgrad sums over tokens: its operands are transposed, and each expert's part is padded with zeros to a multiple of
16, at least 16, because the kernel takes no empty sum. ``T`` is an upper bound, ``M`` rounded up plus 16 for each
expert, so that the host never waits for the sizes; what lies beyond the last expert is not read. Rows of tokens beyond
``ends[-1]`` belong to no expert: as in ``torch._grouped_mm``, what is returned for them is not defined.

Written after torch's ``GroupedBlas.cpp``, ``GroupMMCommon.cuh`` and meta registration (2.11, 2.13) and torchao 0.18's
``prototype/moe_training``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoprec.backends.experts.mx import (
    mx_columns,
    mx_matrices,
    mx_product,
    mx_rows,
    padded_ends,
    padded_rows,
    padded_width,
)
from autoprec.backends.scaled_mm import MULTIPLE
from autoprec.numerics.execution import only_once
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import Spec
from autoprec.numerics.plan import GemmStep, Steps
from autoprec.numerics.quantize import quantize
from autoprec.numerics.rounding import encode, number
from autoprec.numerics.scaling import inverse_of, scale_of
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import grouped_refusal
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS

#: scheme of operands -> a recipe with it
_OF_SCHEME = {"row": BUILTIN_RECIPES["fp8_rowwise"], "mx": BUILTIN_RECIPES["mxfp8"]}
#: scheme of operands -> what its contraction dimensions must be a multiple of; of MXFP8 values that share a scale
_SIDES = {"row": MULTIPLE, "mx": 32}
#: The libraries that bring MXFP8's grouped kernel into torch: MSLK, and FBGEMM before torch 2.11.
_HAS_MX = ("USE_MSLK", "USE_FBGEMM_GENAI")


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


Columns = tuple[Tensor, Tensor, Tensor]


def _columns(x: Tensor, ends: Tensor, spec: Spec) -> Columns:
    """Quantise groups of rows for GEMMs that sum over each of them.

    Args:
        x: ``[rows, columns]``, any strides.
        ends: int32 ``[E]``, not falling: where the groups end.
        spec: the format and the rule of scales.

    Returns:
        Codes ``[columns, T]``, inverse scales float32 ``[E, columns]``, and where the groups end in ``T``, int32.
    """
    count, rows = ends.shape[0], x.shape[0]
    padded, width = padded_ends(ends, MULTIPLE), padded_width(rows, count, MULTIPLE)
    at = torch.arange(rows, dtype=torch.int32, device=x.device)
    index = torch.searchsorted(ends, at, right=True).unsqueeze(1).expand(rows, x.shape[1])
    # bits of magnitudes: as integers NaN is the largest, so that a maximum carries it; a last cell is for no group
    cells = torch.zeros(count + 1, x.shape[1], dtype=torch.int32, device=x.device)
    found = cells.scatter_reduce(0, index, x.float().view(torch.int32) & 0x7FFFFFFF, "amax")
    amax, rule = found[:-1].view(torch.float32), spec.rule
    scale = scale_of(amax, number(spec.format), power_of_2=rule.power_of_2, epsilon=rule.epsilon)
    source, held, group = padded_rows(ends, padded, width)
    values = x.float()[source] * scale[group]
    codes = encode(torch.where(held.unsqueeze(1), values, 0.0), spec.format, bounded=True)
    return codes.t().contiguous(), inverse_of(scale, amax), padded


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast where that changes something: Dynamo of torch 2.11 loses the gradient of an output cast to what it is."""
    return x if x.dtype is dtype else x.to(dtype)


def _scaled(spec: Spec) -> bool:
    return spec.scheme != "cast"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refused_here(schemes: str) -> str:
    """Return why the GPU in use lacks a grouped kernel; Dynamo takes the answer, the question it cannot trace."""
    here = torch.cuda.get_device_capability()
    why = next(filter(None, (grouped_refusal(_OF_SCHEME[scheme], here) for scheme in schemes.split())), "")
    if why or "mx" not in schemes.split() or any(name in torch.__config__.show() for name in _HAS_MX):
        return why
    return f"torch {torch.__version__} is built without MSLK, whose kernel groups MXFP8"


class GroupedProducts:
    """Runs a layer whose 3-D weight a grouped GEMM multiplies by, on an NVIDIA GPU.

    Args:
        plan: the layer's.
    """

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        # asked here, because Dynamo of torch 2.11 cannot look into recipes
        recipes = [recipe for gemm in GEMMS if (recipe := plan.recipe(gemm)) is not None]
        self.refused = next(filter(None, (grouped_refusal(recipe, None) for recipe in recipes)), "")
        kinds = {"mx" if recipe.format == "mxfp8" else "row" for recipe in recipes if recipe.scaled}
        self.schemes = " ".join(sorted(kinds))
        self.multiple = max((_SIDES.get(kind, 1) for kind in kinds), default=1)

    def refusal(self, weight: Tensor) -> str:
        """Return why torch has no grouped GEMM for a weight ``[E, K, N]`` where it lies, or nothing."""
        if not _on_gpu(weight):
            return f"no grouped kernels on {weight.device.type}"
        if self.refused or not self.schemes:
            return self.refused
        if weight.shape[1] % self.multiple or weight.shape[2] % self.multiple:
            sides = f"{weight.shape[1]} x {weight.shape[2]}"
            return f"a weight of {sides} is not a multiple of {self.multiple} on both sides"
        why: str = _refused_here(self.schemes)
        return why

    def run(
        self, layer: LinearExecution, input: Tensor, weight: Tensor, ends: Tensor, steps: Steps, out_dtype: torch.dtype
    ) -> Tensor:
        """Return ``input[M, K] @ weight[E, K, N]``, group by group, as ``[M, N]`` in ``out_dtype``.

        Args:
            layer: whose experts they are.
            input: ``[M, K]``, rows ordered by expert.
            weight: ``[E, K, N]``.
            ends: integers ``[E]``: the row after each expert's last one.
            steps: what each of the three GEMMs runs.
            out_dtype: of the result.
        """
        grad = torch.is_grad_enabled()
        ends = ends.to(torch.int32)
        out: Tensor = _Experts.apply(input, weight, ends, self, layer, steps, out_dtype, grad)  # type: ignore[no-untyped-call]
        return out

    def rows(self, x: Tensor, ends: Tensor, spec: Spec, operand: str) -> tuple[Tensor, Tensor]:
        """Quantise a 2-D tensor along its rows: codes of its shape, inverse scales ``[rows]`` or E8M0 in tiles.

        Args:
            x: ``[rows, columns]``.
            ends: integers ``[E]``: the row after each group's last one.
            spec: how it is quantised.
            operand: ``input``, ``weight`` or ``grad_output``.
        """
        if spec.scheme == "mx":
            return mx_rows(x, ends, spec, operand)
        return self._rows(x, replace(spec, axis=1), operand)

    def _rows(self, x: Tensor, spec: Spec, operand: str) -> tuple[Tensor, Tensor]:
        made = quantize(x, spec, operand=operand)
        if made.scale is None:
            raise ValueError("rows have scales")
        return made.codes.contiguous(), made.scale.reshape(-1)

    def columns(self, x: Tensor, ends: Tensor, spec: Spec) -> Columns:
        """Quantise ``[M, columns]`` for sums over each group: codes, inverse scales (E8M0 in tiles) and padded ends.

        Args:
            x: ``[M, columns]``, rows ordered by group.
            ends: integers ``[E]``: the row after each group's last one.
            spec: how it is quantised.
        """
        if spec.scheme == "mx":
            return mx_columns(x, ends, spec)
        return _columns(x, ends, spec)

    def matrices(self, weight: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
        """Quantise ``[E, outer, sum]``: codes of that shape, contiguous along the sum, inverses ``[E, outer]``.

        MX scales come in tiles, ``[E, ...]``.
        """
        if spec.scheme == "mx":
            return mx_matrices(weight, spec)
        count, outer, summed = weight.shape
        turned = weight.transpose(1, 2)
        if turned.is_contiguous() and not torch.compiler.is_compiling():  # as groups of rows, of a multiple of 16
            ends = torch.arange(summed, count * summed + 1, summed, dtype=torch.int32, device=weight.device)
            codes, inverse, _ = _columns(turned.reshape(count * summed, outer), ends, spec)
            return codes[:, : count * summed].view(outer, count, summed).transpose(0, 1), inverse
        codes, inverse = self._rows(weight.reshape(count * outer, summed), replace(spec, axis=1), "weight")
        return codes.view(count, outer, summed), inverse.view(count, outer)


def _product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], ends: Tensor, step: GemmStep, dtype: torch.dtype
) -> Tensor:
    """Multiply codes and inverse scales; the second operand comes as ``[..., outer, sum]``."""
    if step.first.scheme == "mx":
        return _as(mx_product(a, b, ends), dtype)
    first, second = a[1].reshape(-1), b[1].reshape(-1) if b[0].ndim == 2 else b[1]
    out: Tensor = torch._scaled_grouped_mm(
        a[0], b[0].transpose(-2, -1), first, second, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=step.fast
    )
    return _as(out, dtype)


class _Experts(torch.autograd.Function):
    """fprop, dgrad and wgrad of all experts; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        ends: Tensor,
        products: GroupedProducts,
        layer: LinearExecution,
        steps: Steps,
        out_dtype: torch.dtype,
        grad: bool,
    ) -> Tensor:
        step = steps.fprop
        if _scaled(step.first):
            a = products.rows(input, ends, step.first, "input")
            out = _product(a, products.matrices(weight.transpose(1, 2), step.second), ends, step, out_dtype)
        else:
            first, second = _as(input, step.first.dtype), _as(weight, step.second.dtype)
            out = _as(torch._grouped_mm(first, second, offs=ends), out_dtype)
        layer.mark("fprop", step.label)
        if grad:
            kept: tuple[Tensor | None, ...] = (None, None, None)
            if ctx.needs_input_grad[1]:
                spec = steps.wgrad.second
                kept = products.columns(input, ends, spec) if _scaled(spec) else (_as(input, spec.dtype), None, None)
            ctx.save_for_backward(*kept, weight if ctx.needs_input_grad[0] else None, ends)
            ctx.how = products, layer, steps
            ctx.kinds = input.dtype, weight.dtype, weight.stride(2) == 1
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        products, layer, steps = ctx.how
        with torch.no_grad():
            grads = _gradients(ctx, grad_output, products, layer, steps)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            grads = only_once(grads, layer.name)
        return *grads, None, None, None, None, None, None


def _gradients(
    ctx: Any, g: Tensor, products: GroupedProducts, layer: LinearExecution, steps: Steps
) -> tuple[Tensor | None, Tensor | None]:
    x, x_inverse, padded, weight, ends = ctx.saved_tensors
    x_dtype, w_dtype, turned = ctx.kinds
    grad_input = grad_weight = None
    if weight is not None:
        step = steps.dgrad
        if _scaled(step.first):
            a = products.rows(g, ends, step.first, "grad_output")
            grad_input = _product(a, products.matrices(weight, step.second), ends, step, x_dtype)
        else:
            first, second = _as(g, step.first.dtype).contiguous(), _as(weight, step.second.dtype).transpose(1, 2)
            grad_input = _as(torch._grouped_mm(first, second, offs=ends), x_dtype)
        layer.mark("dgrad", step.label)
    if x is not None:
        step = steps.wgrad
        if _scaled(step.first):
            # the gradient is laid out as the weight is stored
            mine, other = products.columns(g, ends, step.first)[:2], (x, x_inverse)
            a, b = (other, mine) if turned else (mine, other)
            found = _product(a, b, padded, step, w_dtype)
        else:
            g = _as(g, step.first.dtype).contiguous()
            first, second = (x, g) if turned else (g, x)
            found = _as(torch._grouped_mm(first.t(), second, offs=ends), w_dtype)
        grad_weight = found if turned else found.transpose(1, 2)
        layer.mark("wgrad", step.label)
    return grad_input, grad_weight
