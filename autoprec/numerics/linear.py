"""The three GEMMs of a linear layer, each under its own recipe.

A plan whose GEMMs are all plain casts to one native dtype is simply ``F.linear`` on cast operands: autograd does the
rest, and it costs what ``torch.autocast`` costs. Every other plan runs through one ``autograd.Function`` that
quantises each operand once per distinct way of quantising it, keeps 8-bit codes for the backward pass, and multiplies
through the function its backend supplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.gemm import emulated_multiply
from autoprec.numerics.operand import CONTRACTION, QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.quantize import quantize, spec_of
from autoprec.policy import LayerPlan
from autoprec.recipes import GEMM_OPERANDS, GEMMS, KEEP, Gemm, Recipe

__all__ = ["GemmStep", "LinearExecution", "Multiply", "Steps", "compile_plan", "describe_plan", "native_dtype"]

#: Multiplies two quantised operands: (a, b, contraction axes, out dtype, fast=...) -> product.
Multiply = Callable[..., Tensor]

_NATIVE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def native_dtype(plan: LayerPlan, device_type: str) -> torch.dtype | None:
    """Return the dtype in which autograd can run the whole plan by itself, or None when it cannot.

    FP16 GEMMs on a CPU are 20 to 100 times slower than float32 ones, so there they are emulated.
    """
    formats = {None if (r := plan.recipe(gemm)) is None else r.format for gemm in GEMMS}
    if len(formats) != 1:
        return None
    found = _NATIVE.get(formats.pop() or "")
    return None if found is torch.float16 and device_type == "cpu" else found


@dataclass(frozen=True, slots=True)
class GemmStep:
    """One GEMM of a compiled plan: how its two operands are quantised, and who multiplies them."""

    first: Spec
    second: Spec
    axes: tuple[int, int]
    fast: bool
    label: str
    multiply: Multiply = emulated_multiply


@dataclass(frozen=True, slots=True)
class Steps:
    """A plan compiled for one compute dtype of the script (what ``keep`` GEMMs run in)."""

    fprop: GemmStep
    dgrad: GemmStep
    wgrad: GemmStep
    wide_output: bool


def _step(recipe: Recipe | None, gemm: Gemm, keep_dtype: torch.dtype, multiply: Multiply) -> GemmStep:
    axes = CONTRACTION[gemm]
    if recipe is None:
        spec = Spec("cast", _NAMES.get(keep_dtype, "fp32"))
        return GemmStep(spec, spec, axes, False, KEEP)
    first, second = (spec_of(recipe, gemm, operand) for operand in GEMM_OPERANDS[gemm])
    return GemmStep(first, second, axes, recipe.accumulation == "fast", recipe.describe(), multiply)


def compile_plan(plan: LayerPlan, keep_dtype: torch.dtype, multiply: Mapping[Gemm, Multiply]) -> Steps:
    """Compile a plan for the dtype in which the script would have run the layer."""
    steps = {g: _step(plan.recipe(g), g, keep_dtype, multiply.get(g, emulated_multiply)) for g in GEMMS}
    wide = plan.fprop is not None and plan.fprop.format in ("fp32", "tf32")
    return Steps(steps["fprop"], steps["dgrad"], steps["wgrad"], wide)


def describe_plan(plan: LayerPlan) -> str:
    """Return a plan in a few words: one recipe, or one per GEMM where they differ."""
    names = {gemm: KEEP if (r := plan.recipe(gemm)) is None else r.describe() for gemm in GEMMS}
    if len(set(names.values())) == 1:
        return names["fprop"]
    return ", ".join(f"{gemm}: {name}" for gemm, name in names.items())


def _in_backward() -> bool:
    """True inside the backward pass: a forward that runs there repeats an earlier one (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


@dataclass(slots=True)
class LinearExecution:
    """Runs one layer under its plan, and remembers what ran.

    Attributes:
        plan: what was asked for.
        multiply: who multiplies, per GEMM; missing means emulated.
        executed: what the last forward and backward really ran, by GEMM; empty until then.
        backend: name of the backend that runs it.
        note: why something else than the plan runs, if so.
        calls: forwards run.
    """

    plan: LayerPlan
    backend: str = "emulated"
    multiply: Mapping[Gemm, Multiply] = field(default_factory=dict)
    state: QuantizerState = field(default_factory=QuantizerState)
    executed: dict[str, str] = field(default_factory=dict)
    note: str = ""
    calls: int = 0
    native: dict[str, torch.dtype | None] = field(default_factory=dict)
    compiled: dict[torch.dtype, Steps] = field(default_factory=dict)
    watched: Any = None

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return ``input @ weight.T + bias``.

        Args:
            input: ``[..., in_features]``, any floating dtype, any strides, possibly empty.
            weight: ``[out_features, in_features]``.
            bias: ``[out_features]`` or None.
            training: let delayed scaling learn from this call.

        Returns:
            ``[..., out_features]`` in the dtype the script would see: autocast's if it is active, else the input's;
            float32 where an fp32 recipe runs under autocast.
        """
        self.calls += 1
        device = input.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if device not in self.native:
            self.native[device] = native_dtype(self.plan, device)
        native = self.native[device]
        if native is not None:
            return self._native(input, weight, bias, native, autocast)
        keep = autocast or input.dtype
        steps = self.compiled.get(keep)
        if steps is None:
            steps = self.compiled[keep] = compile_plan(self.plan, keep, self.multiply)
        out_dtype = torch.float32 if steps.wide_output and autocast is not None else keep
        grad = torch.is_grad_enabled()
        self.executed["fprop"] = steps.fprop.label
        if autocast is None:
            return _run(input, weight, bias, self, steps, out_dtype, training and grad, grad)
        with torch.autocast(device, enabled=False):
            return _run(input, weight, bias, self, steps, out_dtype, training and grad, grad)

    def describe(self) -> str:
        """Return what ``print(model)`` shows of this layer's policy."""
        return describe_plan(self.plan)

    def _native(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, autocast: torch.dtype | None
    ) -> Tensor:
        if autocast is dtype:
            out = F.linear(input, weight, bias)
        elif autocast is None:
            out = _cast_linear(input, weight, bias, dtype).to(input.dtype)
        else:
            with torch.autocast(input.device.type, enabled=False):
                out = _cast_linear(input, weight, bias, dtype)
            out = out if dtype is torch.float32 else out.to(autocast)
        label = _NAMES[dtype]
        key = (dtype, autocast, input.dtype)
        if self.watched != key and not torch.compiler.is_compiling():
            self.executed["fprop"] = label
            if out.requires_grad:
                self._watch(out, label, key, input.requires_grad, weight.requires_grad)
        return out

    def _watch(self, out: Tensor, label: str, key: Any, dgrad: bool, wgrad: bool) -> None:
        """See the first backward through this layer; autograd runs it in the dtype of the graph just built."""

        def seen(_grad: Tensor) -> None:
            self.watched = key
            if dgrad:
                self.executed["dgrad"] = label
            if wgrad:
                self.executed["wgrad"] = label

        out.register_hook(seen)  # type: ignore[no-untyped-call]


def _run(*args: Any) -> Tensor:
    out: Tensor = _PlannedLinear.apply(*args)  # type: ignore[no-untyped-call]
    return out


def _cast_linear(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class _PlannedLinear(torch.autograd.Function):
    """fprop, dgrad and wgrad under separate recipes; see :class:`LinearExecution`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LinearExecution,
        steps: Steps,
        out_dtype: torch.dtype,
        update: bool,
        keep_for_backward: bool,
    ) -> Tensor:
        recompute = _in_backward()
        options: dict[str, Any] = {"state": layer.state, "update": update and not recompute, "recompute": recompute}
        x = input.reshape(-1, input.shape[-1])
        a = quantize(x, steps.fprop.first, operand="input", **options)
        b = quantize(weight, steps.fprop.second, operand="weight", **options)
        out = steps.fprop.multiply(a, b, steps.fprop.axes, out_dtype, fast=steps.fprop.fast)
        if bias is not None:
            out += bias
        if keep_for_backward:
            need_dgrad, need_wgrad = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
            saved_x = _for_backward(x, a, steps.wgrad.second, "input", options) if need_wgrad else None
            saved_w = _for_backward(weight, b, steps.dgrad.second, "weight", None) if need_dgrad else None
            _save(ctx, saved_x, saved_w)
            ctx.layer, ctx.steps = layer, steps
            ctx.shapes = (input.shape, input.dtype, weight.dtype, None if bias is None else bias.dtype)
        return out.reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        steps: Steps = ctx.steps
        layer: LinearExecution = ctx.layer
        x, w = _restore(ctx)
        shape, x_dtype, w_dtype, bias_dtype = ctx.shapes
        g = grad_output.reshape(-1, grad_output.shape[-1])
        options: dict[str, Any] = {"operand": "grad_output", "state": layer.state}
        grad_input = grad_weight = grad_bias = d = None
        if w is not None:
            step = steps.dgrad
            d = quantize(g, step.first, **options)
            if isinstance(w, Tensor):
                w = quantize(w, step.second, operand="weight", state=layer.state, update=False)
            grad_input = step.multiply(d, w, step.axes, x_dtype, fast=step.fast).reshape(shape)
            layer.executed["dgrad"] = step.label
        if x is not None:
            step = steps.wgrad
            if d is None or d.spec != step.first or step.first.stochastic:
                d = quantize(g, step.first, **options)
            if isinstance(x, Tensor):
                x = quantize(x, step.second, operand="input", state=layer.state, update=False)
            grad_weight = step.multiply(d, x, step.axes, w_dtype, fast=step.fast)
            layer.executed["wgrad"] = step.label
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _for_backward(
    x: Tensor, ready: QuantizedOperand, spec: Spec, operand: str, options: dict[str, Any] | None
) -> QuantizedOperand | Tensor:
    """Choose what to keep of an operand: the codes at hand, codes for the other axis, or the tensor itself.

    ``options`` None means that the tensor lives anyway (a Parameter): it is quantised when the backward pass needs it.
    """
    if ready.spec == spec:
        return ready
    if options is None or (spec.scheme == "cast" and x.dtype is spec.dtype and spec.format != "tf32"):
        return x
    return quantize(x, spec, operand=operand, **options)


def _save(ctx: Any, *parts: QuantizedOperand | Tensor | None) -> None:
    """Keep tensors through autograd (so that hooks, versions and memory accounting see them), the rest on ``ctx``."""
    tensors: list[Tensor | None] = []
    ctx.parts = []
    for part in parts:
        if isinstance(part, QuantizedOperand):
            tensors += [part.codes, part.scale, part.groups]
            ctx.parts.append((part.spec, part.rows, part.columns))
        else:
            tensors += [part, None, None]
            ctx.parts.append(None)
    ctx.save_for_backward(*tensors)


def _restore(ctx: Any) -> list[QuantizedOperand | Tensor | None]:
    tensors = ctx.saved_tensors
    found: list[QuantizedOperand | Tensor | None] = []
    for index, meta in enumerate(ctx.parts):
        codes, scale, groups = tensors[3 * index : 3 * index + 3]
        if meta is None:
            found.append(codes)
        else:
            found.append(QuantizedOperand(codes, scale, meta[0], meta[1], meta[2], groups))
    return found
