"""Quantise one operand of one GEMM, and read it back: the unit every recipe is made of.

An operand is a 2-D tensor and the axis over which the GEMM sums (its *contraction axis*). Tensor scales, row scales
(one per slice along that axis) multiply the result of the GEMM; block, MX and NVFP4 scales lie inside the sum and
multiply the values. What is kept for the backward pass is the codes and the scales, nothing wider.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoprec.numerics.grouped import grouped_values, quantize_grouped
from autoprec.numerics.operand import CONTRACTION, QuantizedOperand, QuantizerState, ScaleRule, Spec
from autoprec.numerics.rounding import decode, encode, hashed_noise, number, round_tf32
from autoprec.numerics.scaling import amax_of, inverse_of, scale_of
from autoprec.numerics.sharded import reduced
from autoprec.precision.recipes import GEMM_OPERANDS, Gemm, Operand, Recipe


def spec_of(recipe: Recipe, gemm: Gemm, operand: Operand) -> Spec:
    """Return how ``recipe`` quantises ``operand`` of ``gemm``.

    Args:
        recipe: of the GEMM.
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        operand: ``input``, ``weight`` or ``grad_output``.
    """
    axis = CONTRACTION[gemm][GEMM_OPERANDS[gemm].index(operand)]
    name = recipe.operand_format(operand)
    stochastic = recipe.stochastic_rounding and operand == "grad_output"
    if recipe.scaling is not None:
        granularity = recipe.scaling.granularity
        square = granularity == "block" and operand == "weight"
        axis = -1 if granularity == "tensor" or square else axis
        return Spec(granularity, name, axis, ScaleRule.of(recipe.scaling), square, stochastic=stochastic)
    if recipe.format == "mxfp8":
        return Spec("mx", name, axis)
    if recipe.format == "nvfp4":
        square, turned = recipe.weight_2d and operand == "weight", recipe.hadamard and gemm == "wgrad"
        return Spec("nvfp4", name, -1 if square else axis, None, square, turned, stochastic)
    return Spec("cast", name)


def _cast(x: Tensor, spec: Spec) -> QuantizedOperand:
    if spec.format == "tf32":
        return QuantizedOperand(round_tf32(x.float()), None, spec, x.shape[0], x.shape[1])
    return QuantizedOperand(x.to(spec.dtype), None, spec, x.shape[0], x.shape[1])


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x * scale`` as a float32 tensor of its own."""
    return x * scale if x.dtype is torch.float32 else x.to(torch.float32).mul_(scale)


def _tensor(
    x: Tensor, spec: Spec, state: QuantizerState, operand: str, update: bool, values: bool, evaluates: bool
) -> QuantizedOperand:
    scaling, limit = spec.rule, number(spec.format)
    amax = amax_of(x)
    if scaling.amax_epsilon:
        amax = amax.clamp(min=scaling.epsilon)
    delayed = scaling.scale == "delayed"
    if delayed:
        scale = state.delayed_scale(operand, spec, amax, update=update, evaluates=evaluates)
    else:
        amax = reduced(amax, state.groups.get(operand, ()))
        scale = scale_of(amax, limit, power_of_2=scaling.power_of_2)
    codes = _codes(_scaled(x, scale), spec, amax, state, bounded=not delayed, values=values)
    return QuantizedOperand(codes, inverse_of(scale, amax).reshape(1, 1), spec, x.shape[0], x.shape[1])


def _row(x: Tensor, spec: Spec, state: QuantizerState, values: bool) -> QuantizedOperand:
    scaling, limit = spec.rule, number(spec.format)
    amax = amax_of(x, spec.axis)
    scale = scale_of(amax, limit, power_of_2=scaling.power_of_2, epsilon=scaling.epsilon)
    codes = _codes(_scaled(x, scale), spec, amax, state, bounded=True, values=values)
    return QuantizedOperand(codes, inverse_of(scale, amax), spec, x.shape[0], x.shape[1])


def _codes(scaled: Tensor, spec: Spec, amax: Tensor, state: QuantizerState, *, bounded: bool, values: bool) -> Tensor:
    """Return the codes of scaled values (float32, which are overwritten)."""
    if spec.dtype is not torch.int8:
        return encode(scaled, spec.format, bounded=bounded, in_place=values)
    # NaN has no integer code, and gets whatever the cast gives: the NaN inverse of its scale carries it
    if not spec.stochastic:
        return scaled.round_().to(torch.int8)
    if torch.compiler.is_compiling():
        noise = hashed_noise(scaled, amax.max())
    else:
        stream = state.generator(scaled.device)
        noise = torch.rand(scaled.shape, generator=stream, dtype=torch.float32, device=scaled.device)
    limit = number(spec.format)
    return scaled.add_(noise).floor_().clamp_(-limit, limit).to(torch.int8)


def operand_values(operand: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """Return the values ``[rows, columns]`` that the GEMM multiplies: group scales applied, ``operand.scale`` not."""
    if operand.groups is not None:
        return grouped_values(operand, dtype)
    return operand.codes.to(dtype) if operand.spec.scheme == "cast" else decode(operand.codes, dtype)


def dequantize(operand: QuantizedOperand) -> Tensor:
    """Return what is left of the operand after quantisation, ``[rows, columns]`` in float32.

    A Hadamard transform is not undone.
    """
    if operand.groups is not None and operand.scale is not None:
        # group and tensor scale are combined first, as torchao's NVFP4 tensors do
        combined = replace(operand, scale=None, groups=operand.groups.float() * operand.scale.reshape(()))
        return grouped_values(combined, torch.float32)
    values = operand_values(operand, torch.float32)
    return values if operand.scale is None else values * operand.scale


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    operand: str = "input",
    state: QuantizerState | None = None,
    update: bool = True,
    values: bool = False,
    evaluates: bool = False,
) -> QuantizedOperand:
    """Quantise a 2-D tensor for one GEMM.

    Args:
        x: ``[rows, columns]``, float32, bfloat16 or float16; any strides; may be empty.
        operand: input, weight or grad_output: delayed scaling keeps a history for each.
        state: delayed scales and random stream of the layer; a fresh one when None.
        update: let delayed scaling note this tensor's amax.
        evaluates: not for a training step: delayed scaling saturates nothing.
        values: on a CPU, keep rounded values as float32 instead of 8-bit codes: they are multiplied in float32 anyway.

    All-zero tensors stay zero. A NaN or infinity makes everything it shares a scale with NaN.
    """
    if spec.scheme == "cast":
        return _cast(x, spec)
    state = QuantizerState() if state is None else state
    values = values and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if spec.scheme == "tensor":
        return _tensor(x, spec, state, operand, update, values, evaluates)
    if spec.scheme == "row":
        return _row(x, spec, state, values)
    return quantize_grouped(x, spec, state, values, groups=state.groups.get(operand, ()))


def for_backward(
    x: Tensor, ready: QuantizedOperand, spec: Spec, operand: str, options: dict[str, Any] | None
) -> QuantizedOperand | Tensor:
    """Choose what to save of an operand: the codes at hand, codes for the other axis, or the tensor itself.

    Args:
        x: ``[rows, columns]``, of a floating dtype.
        ready: how it was quantised for the forward pass.
        spec: how the backward pass needs it.
        operand: ``input`` or ``weight``.
        options: of :func:`quantize`; None where the tensor lives anyway (a Parameter), which is quantised when the
            backward pass needs it.
    """
    if ready.spec == spec:
        return ready
    if options is None or (spec.scheme == "cast" and x.dtype is spec.dtype and spec.format != "tf32"):
        return x
    return quantize(x, spec, operand=operand, **options)


def save(ctx: Any, *parts: QuantizedOperand | Tensor | None) -> None:
    """Save tensors through autograd (so that hooks, versions and memory accounting see them), the rest on ``ctx``.

    Args:
        ctx: of an ``autograd.Function``.
        parts: matrices ``[rows, columns]``, quantised or not; None is None again.
    """
    tensors: list[Tensor | None] = []
    made: list[tuple[Spec, int, int] | None] = []
    for part in parts:
        if isinstance(part, QuantizedOperand):
            # rounded values kept in float32 are exact in bfloat16, at half the memory
            wide = part.codes.dtype is torch.float32 and part.spec.scheme != "cast"
            tensors += [part.codes.to(torch.bfloat16) if wide else part.codes, part.scale, part.groups]
            made.append((part.spec, part.rows, part.columns))
        else:
            tensors += [part, None, None]
            made.append(None)
    ctx.parts = tuple(made)
    ctx.save_for_backward(*tensors)


def restore(ctx: Any) -> list[QuantizedOperand | Tensor | None]:
    """Return what :func:`save` was given, in the backward pass: matrices ``[rows, columns]``."""
    tensors = ctx.saved_tensors
    found: list[QuantizedOperand | Tensor | None] = []
    for index, meta in enumerate(ctx.parts):
        codes, scale, groups = tensors[3 * index : 3 * index + 3]
        if meta is None:
            found.append(codes)
        else:
            found.append(QuantizedOperand(codes, scale, meta[0], meta[1], meta[2], groups))
    return found
