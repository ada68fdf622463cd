"""The three GEMMs of a linear layer, each under its own recipe.

A plan whose GEMMs are all plain casts to one native dtype is simply ``F.linear`` on cast operands: autograd does the
rest, and it costs what ``torch.autocast`` costs. Every other plan runs through one ``autograd.Function`` that
quantises each operand once per distinct way of quantising it, keeps 8-bit codes for the backward pass, and multiplies
through the function its backend supplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from autoprec.errors import UnsupportedError
from autoprec.numerics.execution import Execution, autocast_dtype, only_once
from autoprec.numerics.kept import KeptCasts
from autoprec.numerics.operand import QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.plan import DTYPE_NAMES, GemmStep, Multiply, Steps, compile_plan, native_dtype
from autoprec.numerics.quantize import for_backward, quantize, restore, save, spec_of
from autoprec.numerics.rounding import cast_values, fast_bf16_gemm
from autoprec.numerics.sharded import NDIMS, Layout, is_dtensor, layout_of, run_sharded
from autoprec.precision.recipes import GEMM_OPERANDS, GEMMS, Gemm


def in_backward() -> bool:
    """True inside the backward pass: a forward that runs there repeats an earlier one (activation checkpointing)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


Pair = tuple[QuantizedOperand | None, QuantizedOperand | None]


class Casts(Protocol):
    """Quantises an operand for both of its GEMMs at once; None in the place of what torch's operators must cast."""

    def pair(self, x: Tensor, first: Spec | None, second: Spec | None, operand: str) -> Pair:
        """Quantise a matrix for a GEMM that sums along rows, and for one that sums along columns.

        Also called while a graph is traced.

        Args:
            x: ``[rows, columns]``.
            first, second: how, for each of the two GEMMs; None where a GEMM does not need it.
            operand: ``input``, ``weight`` or ``grad_output``.
        """


class Experts(Protocol):
    """Runs a 3-D weight by grouped GEMMs, all experts in one call."""

    def refusal(self, weight: Tensor) -> str:
        """Return why it cannot run a weight ``[E, K, N]``, or nothing."""

    def run(
        self, layer: LinearExecution, input: Tensor, weight: Tensor, ends: Tensor, steps: Steps, out_dtype: torch.dtype
    ) -> Tensor:
        """Return ``[M, N]`` in ``out_dtype``.

        Args:
            layer: whose experts they are.
            input: ``[M, K]``, rows ordered by expert.
            weight: ``[E, K, N]``.
            ends: integers ``[E]``: the row after each expert's last one.
            steps: what each of the three GEMMs runs.
            out_dtype: of the result.
        """


@dataclass(slots=True)
class LinearExecution(Execution):
    """Runs one linear layer under its plan.

    Attributes:
        multiply: who multiplies, per GEMM; missing means emulated.
        emulates_casts: a plan in bfloat16 runs as float32 GEMMs of bfloat16 values on a CPU without bfloat16 units,
            where bfloat16 GEMMs take 3 to 40 times as long; for trials whose time is modelled.
        quantizers: delayed scales and the private random stream.
        casts: casts an operand for both of its GEMMs at once; None, or what it leaves out: torch's operators do.
        experts: runs grouped GEMMs; None, or what it refuses: one expert after another.
        gathered: FSDP2 gathers the weight before each pass and frees it afterwards: the backward pass casts it again,
            as codes kept from forward to backward would be all that it has saved.
        traced: what ``torch.compile`` traced (the compiled graph does not report back).
        native: dtype of a plan autograd runs by itself, by device type.
        compiled: steps of any other plan, by device type and the script's dtype.
        layouts: how a sharded weight lies, by the input's number of dimensions.
        kept: casts of the weight that a micro-batch leaves to the next; none in compiled graphs and under FSDP2.
    """

    multiply: Mapping[Gemm, Multiply] = field(default_factory=dict)
    quantizers: QuantizerState = field(default_factory=QuantizerState)
    casts: Casts | None = None
    experts: Experts | None = None
    emulates_casts: bool = False
    gathered: bool = False
    traced: dict[str, str] | None = None
    native: dict[str, torch.dtype | None] = field(default_factory=dict)
    compiled: dict[tuple[str, torch.dtype], Steps] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    kept: KeptCasts = field(default_factory=KeptCasts)

    def __post_init__(self) -> None:
        self.native = {device: native_dtype(self.plan, device) for device in ("cpu", "cuda")}
        for device, native in self.native.items():
            if native is None:  # all that Dynamo may read: a dictionary that grows later would be traced again
                for dtype in DTYPE_NAMES:
                    self.compiled[device, dtype] = compile_plan(self.plan, dtype, device, self.multiply)

    @property
    def executed(self) -> dict[str, str]:
        """What the last forward and backward ran, by GEMM; a compiled graph has all it was traced with."""
        return {**(self.traced or {}), **self.ran}

    def delayed_operands(self) -> dict[str, tuple[str, Spec]]:
        """Return the operands with delayed scaling, by the GEMM and operand that they are first quantised for."""
        found: dict[tuple[str, Spec], str] = {}
        for gemm in GEMMS:
            recipe = self.plan.recipe(gemm)
            if recipe is not None and recipe.scaling is not None and recipe.scaling.scale == "delayed":
                for operand in GEMM_OPERANDS[gemm]:
                    found.setdefault((operand, spec_of(recipe, gemm, operand)), f"{gemm}.{operand}")
        return {name: key for key, name in found.items()}

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Return delayed histories ``[length]`` and scales ``[]``, float32, and the random stream's state, uint8."""
        found = {
            f"{name}.{part}": value
            for name, key in self.delayed_operands().items()
            for part, value in self.quantizers.history(*key).state(device).items()
        }
        if any(recipe is not None and recipe.stochastic_rounding for recipe in self.plan.recipes):
            found["random"] = self.quantizers.generator(device).get_state().to(device)  # beside all that has a size
        return found

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from :meth:`state`; operands that it does not name begin anew.

        Args:
            state: tensors by name, of the shapes that :meth:`state` returned; a history may have another length.
            device: on which the layer runs.
        """
        for name, key in self.delayed_operands().items():
            parts = {part: state.get(f"{name}.{part}") for part in ("history", "scale", "seen")}
            held = {part: value for part, value in parts.items() if value is not None}
            if len(held) == len(parts):
                self.quantizers.history(*key).load_state(held, device)
        stream = self.quantizers.generator(device) if "random" in state else None
        if stream is not None and state["random"].numel() == stream.get_state().numel():
            stream.set_state(state["random"].cpu())

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return ``input @ weight.T + bias``.

        Args:
            input: ``[..., in_features]``, any floating dtype, any strides, possibly empty.
            weight: ``[out_features, in_features]``.
            bias: ``[out_features]`` or None.
            training: let delayed scaling learn from this call.

        Returns:
            ``[..., out_features]`` in the dtype the script would see: autocast's if it is active, else the input's;
            float32 where an fp32 recipe runs under autocast, and where a recipe has ``output: fp32``.
        """
        self.called = True
        device = input.device.type
        if device == "meta":  # shapes alone are asked for
            return F.linear(input, weight, bias)
        autocast = autocast_dtype(device)
        if device not in self.native:
            self.native[device] = native_dtype(self.plan, device)
        if autocast is not None and input.dtype is torch.float64:
            with torch.autocast(device, enabled=False):  # which leaves float64 alone, so we do
                return self(input, weight, bias, training=training)
        native = self.native[device]
        if native is not None:
            return self._native(input, weight, bias, native, autocast)
        if is_dtensor(weight):
            return self._sharded(input, weight, bias, training)
        _refuse_layout(self.name, input)
        keep = autocast or input.dtype
        steps = self._steps(device, keep)
        wide = steps.fprop.wide or (steps.wide_output and autocast is not None)
        out_dtype = torch.promote_types(keep, torch.float32) if wide else keep
        if not torch.compiler.is_compiling():
            self.idle = input.numel() == 0
        if input.numel() == 0:
            return _cast_linear(input, weight, bias, out_dtype)  # nothing to quantise, nothing to learn from
        grad = torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            self.traced = steps.labels
            if steps.delayed and training and grad:
                self.quantizers.traced = True
        if autocast is None:
            return _run(input, weight, bias, self, steps, out_dtype, training, grad)
        with torch.autocast(device, enabled=False):
            return _run(input, weight, bias, self, steps, out_dtype, training, grad)

    def know_layout(self, weight: Any) -> None:
        """Find out how a sharded weight lies: before a graph is traced, which cannot; raises UnsupportedError."""
        self.layouts = {ndim: layout_of(weight, ndim, self.name) for ndim in NDIMS}
        self.quantizers.groups = self.layouts[2].groups

    def _sharded(self, input: Tensor, weight: Any, bias: Tensor | None, training: bool) -> Tensor:
        if torch.compiler.is_compiling() and not self.layouts:
            return self._sharded_eagerly(input, weight, bias, training)
        if not torch.compiler.is_compiling() and not (self.layouts and self.layouts[2].fits(weight)):
            self.know_layout(weight)
        layout = self.layouts.get(input.ndim) or layout_of(weight, input.ndim, self.name)
        return run_sharded(partial(self, training=training), input, weight, bias, layout, name=self.name)

    @_disable_dynamo
    def _sharded_eagerly(self, input: Tensor, weight: Any, bias: Tensor | None, training: bool) -> Tensor:
        return self._sharded(input, weight, bias, training)

    def grouped(self, input: Tensor, weight: Tensor, ends: Tensor, *, training: bool = True) -> Tensor:
        """Return ``input[group] @ weight[group]`` for all groups of rows, in one grouped GEMM where there is one.

        Args:
            input: ``[M, K]``, rows ordered by group.
            weight: ``[E, K, N]``.
            ends: integers ``[E]``: the row after each group's last one.
            training: whether a backward pass may follow, and histories learn.
        """
        if input.device.type == "meta":
            return input.new_empty((input.shape[0], weight.shape[2]))
        why = "" if self.experts is None else self.experts.refusal(weight)
        if self.experts is None or why or input.shape[0] == 0:
            if weight.device.type != "cpu" and input.shape[0]:
                why = why or f"backend '{self.backend}' has no grouped GEMM"
                self.uncompiled = f"one expert after another, and the host waits for their sizes: {why}"
            return Execution.grouped(self, input, weight, ends, training=training)
        _refuse_transforms(self.name, input)
        self.called = True
        steps = self._steps(input.device.type, input.dtype)
        if torch.compiler.is_compiling():
            self.traced = steps.labels
        return self.experts.run(self, input, weight, ends, steps, input.dtype)

    def mark(self, gemm: Gemm, label: str) -> None:
        """Write down what ran a GEMM; inside a compiled graph nothing is written."""
        if not torch.compiler.is_compiling():
            self.ran[gemm] = label

    def _steps(self, device: str, keep: torch.dtype) -> Steps:
        steps = self.compiled.get((device, keep))
        if steps is None:
            steps = self.compiled[device, keep] = compile_plan(self.plan, keep, device, self.multiply)
        return steps

    def _native(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, autocast: torch.dtype | None
    ) -> Tensor:
        emulated = self.emulates_casts and dtype is torch.bfloat16 and not fast_bf16_gemm(input.device.type)
        if autocast is dtype and not emulated:
            out = F.linear(input, weight, bias)
        elif autocast is None:
            out = _cast_linear(input, weight, bias, dtype, emulated).to(input.dtype)
        else:
            with torch.autocast(input.device.type, enabled=False):
                out = _cast_linear(input, weight, bias, dtype, emulated)
            out = out if dtype is torch.float32 else out.to(autocast)
        label = DTYPE_NAMES[dtype]
        labels: dict[str, str] = dict.fromkeys(GEMMS, label)
        if torch.compiler.is_compiling():
            self.traced = labels
        else:
            key = (dtype, autocast, input.dtype)
            self.record(out, key, labels, dgrad=input.requires_grad, wgrad=weight.requires_grad)
        return out


def _run(*args: Any) -> Tensor:
    if torch.compiler.is_compiling():
        input, layer, steps = args[0], args[3], args[4]
        if steps.delayed and layer.quantizers.prepared != input.device:
            # scales that lie elsewhere are outside the graph: the layer runs as in eager mode
            opaque: Tensor = _run_eagerly(*args)
            return opaque
    else:
        _refuse_transforms(args[3].name, args[0])
    if type(args[0]) is Tensor:
        # the mode that computes norms in float32 would see each operator of a cast: a third of the host's time, and
        # half of what Dynamo takes to trace
        with torch._C.DisableTorchFunction():
            plain: Tensor = _PlannedLinear.apply(*args)  # type: ignore[no-untyped-call]
            return plain
    out: Tensor = _PlannedLinear.apply(*args)  # type: ignore[no-untyped-call]
    return out


def _refuse_transforms(name: str, input: Tensor) -> None:
    """Raise inside grad, vmap or jvp of ``torch.func``, and where forward-mode AD differentiates the input."""
    if torch.compiler.is_compiling():
        return
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    forwards = forward_ad._current_level >= 0
    if inside or (forwards and forward_ad.unpack_dual(input).tangent is not None):  # type: ignore[no-untyped-call]
        raise UnsupportedError(
            "the transforms of torch.func (grad, vmap, jvp, ...) do not go through a layer in scaled formats",
            where=f"layer '{name}'",
            fix="keep this layer as the script wrote it or in bf16, or take gradients with backward()",
        )


def _refuse_layout(name: str, input: Tensor) -> None:
    """Raise for an input that has no rows and columns to scale: sparse, or a nested tensor."""
    if input.layout is not torch.strided:
        raise UnsupportedError(
            f"a {str(input.layout).removeprefix('torch.')} input has no rows that scaled formats could be applied to",
            where=f"layer '{name}'",
            fix="keep this layer as the script wrote it, or give it a dense tensor (nested ones have values())",
        )


@_disable_dynamo
def _run_eagerly(*args: Any) -> Any:
    if args[4].delayed:
        args[3].quantizers.prepare(args[4].delayed, args[0].device)
    return _PlannedLinear.apply(*args)  # type: ignore[no-untyped-call]


def _cast_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, emulated: bool = False
) -> Tensor:
    if emulated:
        bias = None if bias is None else cast_values(bias, dtype)
        return F.linear(cast_values(input, dtype), cast_values(weight, dtype), bias).to(dtype)
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
        training: bool,
        grad: bool,
    ) -> Tensor:
        update = training and steps.stateful and (grad or layer.quantizers.learns())
        x = input.reshape(-1, input.shape[-1])
        needs = [grad and need for need in ctx.needs_input_grad[:2]]
        how = {"update": update, "evaluates": not training}
        a = saved_x = None
        options: dict[str, Any] = how | {"state": layer.quantizers, "values": steps.fprop.values}
        if layer.casts is not None:
            across = steps.wgrad.second if needs[1] else None
            a, saved_x = layer.casts.pair(x, steps.fprop.first, across, "input")
        if a is None:
            a = quantize(x, steps.fprop.first, operand="input", **options)
        second = steps.dgrad.second if needs[0] and not layer.gathered else None
        b, saved_w = _weight(layer, weight, steps.fprop.second, second, options, keeps=training and grad)
        out = steps.fprop.multiply(a, b, steps.fprop, out_dtype)
        layer.mark("fprop", steps.fprop.label)
        if bias is not None:
            out += bias
        if grad:
            kept_x: QuantizedOperand | Tensor | None = saved_x
            kept_w: QuantizedOperand | Tensor | None = saved_w
            if needs[1] and saved_x is None:
                kept_x = for_backward(x, a, steps.wgrad.second, "input", how | {"state": layer.quantizers})
            if needs[0] and saved_w is None:
                kept_w = weight if layer.gathered else for_backward(weight, b, steps.dgrad.second, "weight", None)
            save(ctx, kept_x, kept_w)
            ctx.layer, ctx.steps = layer, steps
            ctx.shapes = (input.shape, input.dtype, weight.dtype, None if bias is None else bias.dtype)
        # a view of it could not be changed in place, as residuals and in-place activations do
        return torch.ops.aten._unsafe_view(out, [*input.shape[:-1], weight.shape[0]])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            grads = _PlannedLinear.gradients(ctx, grad_output)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return grads
        return only_once(grads, ctx.layer.name)

    @staticmethod
    def gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        """Return what :meth:`backward` does: dgrad, wgrad and the bias's gradient, then None for each other input."""
        steps: Steps = ctx.steps
        layer: LinearExecution = ctx.layer
        x, w = restore(ctx)
        shape, x_dtype, w_dtype, bias_dtype = ctx.shapes
        if steps.stateful and not torch.compiler.is_compiling():
            layer.quantizers.passed_back = True
        g = grad_output.reshape(-1, grad_output.shape[-1])
        options: dict[str, Any] = {"operand": "grad_output", "state": layer.quantizers}
        grad_input = grad_weight = grad_bias = d = e = None
        wanted = steps.dgrad.first if w is not None else None, steps.wgrad.first if x is not None else None
        if layer.casts is not None:
            d, e = layer.casts.pair(g, *wanted, "grad_output")
        if w is not None:
            step = steps.dgrad
            if d is None:
                d = quantize(g, step.first, values=step.values, **options)
            if isinstance(w, Tensor):
                w = _weight_again(layer, w, step)
            grad_input = step.multiply(d, w, step, x_dtype).reshape(shape)
            layer.mark("dgrad", step.label)
        if x is not None:
            step = steps.wgrad
            if e is None and d is not None and d.spec == step.first and not step.first.stochastic:
                e = d
            if e is None:
                e = quantize(g, step.first, values=step.values, **options)
            if isinstance(x, Tensor):
                x = quantize(x, step.second, operand="input", state=layer.quantizers, update=False, values=step.values)
            grad_weight = step.multiply(e, x, step, w_dtype)
            layer.mark("wgrad", step.label)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _weight(
    layer: LinearExecution,
    weight: Tensor,
    first: Spec,
    second: Spec | None,
    options: Mapping[str, Any],
    *,
    keeps: bool,
) -> tuple[QuantizedOperand, QuantizedOperand | None]:
    """Cast a weight for fprop, and for dgrad where both are cast at once; ``keeps``: for further micro-batches, too."""
    keeps = keeps and not layer.gathered and not torch.compiler.is_compiling()
    if keeps:
        layer.kept.begin(weight)
        kept = layer.kept.get(weight, first)
        if kept is not None:
            return kept, layer.kept.get(weight, second)
    b, saved = (None, None) if layer.casts is None else layer.casts.pair(weight, first, second, "weight")
    if b is None:
        b = quantize(weight, first, operand="weight", **options)
    if keeps:
        layer.kept.keep(weight, b, saved)
    return b, saved


def _weight_again(layer: LinearExecution, weight: Tensor, step: GemmStep) -> QuantizedOperand:
    """Cast a weight for dgrad, where fprop's cast does not serve."""
    compiling = torch.compiler.is_compiling()
    found = None if compiling else layer.kept.get(weight, step.second)
    if found is None and layer.casts is not None:
        found = layer.casts.pair(weight, None, step.second, "weight")[1]
    if found is None:
        options: dict[str, Any] = {"state": layer.quantizers, "update": False, "values": step.values}
        found = quantize(weight, step.second, operand="weight", **options)
    if not compiling and not layer.gathered:
        layer.kept.keep(weight, found)
    return found
