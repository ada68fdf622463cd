"""A precision policy as one module that needs nothing but PyTorch; written by ``autoprec export --to python``.

    import precision_policy
    precision_policy.apply(model)        # in place; precision_policy.remove(model) takes it off again

A linear layer runs three matrix products: fprop (input x weight), dgrad (grad_output x weight) and wgrad
(grad_output x input); each has its own precision. FP8 products run on ``torch._scaled_mm`` where the GPU has it and
the shapes allow it; elsewhere the same rounding is emulated, which is exact and slow.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# --- the policy -------------------------------------------------------------------------------------------------
# plan -> recipe of each product; None leaves it as the script wrote it
PLANS: dict[str, dict[str, Any]] = {}
# (regular expression on module names, plan); the first match wins
RULES: list[tuple[str, str]] = []
ACTIVATIONS = "keep"  # autocast dtype around the model: keep, bf16 or fp16
ATTENTION = "keep"  # dtype of scaled_dot_product_attention
PROTECTED: tuple[str, ...] = ()  # computed in fp32 under autocast: softmax, norm, loss, output
EMBEDDING_GRADIENT = 1.0  # share of their gradient that the tables of embeddings get
# --- the mechanics ----------------------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# dtype, and the largest value it holds (OFP8 1.0)
FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
AXES = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}  # which axis of each operand is summed over
BLOCK = 128  # values along an axis that share a scale, as in DeepSeek-V3


def _scale(amax: Tensor, limit: float, recipe: dict[str, Any]) -> Tensor:
    amax = amax.clamp(min=recipe.get("amax_epsilon", 0.0))
    scale = (limit / amax.double()).clamp(max=torch.finfo(torch.float32).max).float()
    scale = torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)
    if recipe.get("power_of_2"):  # drop the mantissa: rounds down to a power of two, exactly
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def _delayed(amax: Tensor, limit: float, recipe: dict[str, Any], own: dict[str, Any], step: int) -> Tensor:
    """The scale from earlier steps' amax (Transformer Engine's DelayedScaling); the first step uses its own.

    ``step`` counts the layer's training forwards: an operand is taken in once per step and keeps its scale within it.
    """

    def following(value: Tensor, previous: Tensor | None) -> Tensor:
        fresh = _scale(value, limit, recipe) * 2.0 ** -recipe.get("margin", 0)
        return fresh if previous is None else torch.where(torch.isfinite(value) & (value > 0), fresh, previous)

    if own.get("step") == step:
        used: Tensor = own["used"]
        return used
    scale = own["scale"] if "scale" in own else following(amax, None)
    history = [*own.get("history", []), amax.detach()][-recipe["amax_history_len"] :]
    latest = history[-1] if recipe["amax_compute_algo"] == "most_recent" else torch.stack(history).amax()
    if step < 0:  # evaluation looks, but does not remember, and what it sees may be larger than all of the history
        return torch.minimum(scale, following(amax, scale))
    own |= {"step": step, "used": scale, "history": history, "scale": following(latest, scale)}
    return scale


def _quantize(
    x: Tensor, recipe: dict[str, Any], operand: str, axis: int, memory: dict[str, Any], step: int
) -> tuple[Tensor, Tensor]:
    """Return FP8 codes of a matrix and the inverse scale that broadcasts over them."""
    dtype, limit = FP8[recipe[operand]]
    granularity = recipe["granularity"]
    if granularity == "block":
        return _quantize_blocks(x, recipe, operand, axis)
    x = x.float()
    if granularity == "row":
        amax = x.abs().amax(axis, keepdim=True) if x.numel() else x.new_zeros(())
    else:
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if recipe["scale"] == "delayed":
        own = memory.setdefault(operand + recipe[operand], {})
        scale = _delayed(amax.clamp(min=recipe.get("amax_epsilon", 0.0)), limit, recipe, own, step)
    else:
        scale = _scale(amax, limit, recipe)
    inverse = torch.where(torch.isfinite(amax), scale.reciprocal(), torch.nan)
    return (x * scale).clamp(-limit, limit).to(dtype), inverse


def _quantize_blocks(x: Tensor, recipe: dict[str, Any], operand: str, axis: int) -> tuple[Tensor, Tensor]:
    """128x128 blocks of the weight, 1x128 tiles of the others along the summed axis (DeepSeek-V3)."""
    dtype, limit = FP8[recipe[operand]]
    square = operand == "weight"
    steps = [BLOCK if square or d == axis else 1 for d in (0, 1)]
    rows, columns = x.shape
    padded = F.pad(x.float(), (0, -columns % steps[1], 0, -rows % steps[0]))
    tiles = padded.reshape(padded.shape[0] // steps[0], steps[0], padded.shape[1] // steps[1], steps[1])
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = _scale(amax, limit, recipe)
    inverse = torch.where(torch.isfinite(amax), scale.reciprocal(), torch.nan).expand_as(tiles)
    codes = (tiles * scale).clamp(-limit, limit).to(dtype)
    return codes.reshape(padded.shape)[:rows, :columns], inverse.reshape(padded.shape)[:rows, :columns]


def _hardware(a: Tensor, b: Tensor, recipe: dict[str, Any]) -> bool:
    if a.device.type != "cuda" or recipe["granularity"] == "block" or any(n % 16 for n in (*a.shape, *b.shape)):
        return False
    return torch.cuda.get_device_capability(a.device) >= ((8, 9) if recipe["granularity"] == "tensor" else (9, 0))


def _product(
    first: Tensor, second: Tensor, gemm: str, recipe: Any, keep: torch.dtype, memory: dict[str, Any], step: int
) -> Tensor:
    """Multiply two matrices, summing over the axes of ``gemm``, in the precision of ``recipe``."""
    axes = AXES[gemm]
    if recipe is None or recipe["format"] != "fp8":
        dtype = keep if recipe is None else DTYPES[recipe["format"]]
        a, b = first.to(dtype), second.to(dtype)
        if recipe is not None and recipe.get("output") == "fp32" and gemm == "fprop":
            a, b = a if axes[0] == 1 else a.t(), b.t() if axes[1] == 1 else b
            # 16-bit operands, FP32 sums; elsewhere than on a GPU the same sums come from a float32 product
            return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
        return torch.mm(a if axes[0] == 1 else a.t(), b.t() if axes[1] == 1 else b)
    names = OPERANDS[gemm]
    a, scale_a = _quantize(first, recipe, names[0], axes[0], memory, step)
    b, scale_b = _quantize(second, recipe, names[1], axes[1], memory, step)
    if _hardware(a, b, recipe):
        left = a if axes[0] == 1 else a.t().contiguous()
        right = (b if axes[1] == 1 else b.t().contiguous()).t()
        if recipe["granularity"] == "row":
            scale_a, scale_b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
        out_dtype = torch.bfloat16 if recipe["granularity"] == "row" else keep
        fast = recipe.get("accumulation") == "fast"
        return torch._scaled_mm(
            left.contiguous(), right, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast
        )
    a, b = a.float() * scale_a, b.float() * scale_b
    return torch.mm(a if axes[0] == 1 else a.t(), b.t() if axes[1] == 1 else b)


def _wide(plan: dict[str, Any]) -> bool:
    return bool(plan["fprop"]) and plan["fprop"].get("output") == "fp32"


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Any, memory: Any, keep: Any, step: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.memory, ctx.keep, ctx.bias, ctx.step = plan, memory, keep, bias, step
        flat = x.reshape(-1, x.shape[-1])
        out = _product(flat, weight, "fprop", plan["fprop"], keep, memory, step)
        out = out if _wide(plan) else out.to(keep)
        out = out if bias is None else out + bias.to(out.dtype)
        return out.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        flat, g = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        rest: tuple[Any, Any, int] = (ctx.keep, ctx.memory, ctx.step)
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(g, weight, "dgrad", ctx.plan["dgrad"], *rest).to(x.dtype).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            grad_w = _product(g, flat, "wgrad", ctx.plan["wgrad"], *rest).to(weight.dtype)
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            grad_b = g.sum(0, dtype=torch.float32).to(ctx.bias.dtype)
        return grad_x, grad_w, grad_b, None, None, None, None, None


class _PlannedLinear:
    """Mixed in front of a linear layer's class while a policy is applied."""

    def forward(self, x: Tensor) -> Any:
        layer: Any = self
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        keep = autocast or x.dtype
        plan = layer._precision_plan
        formats = {None if recipe is None else recipe["format"] for recipe in plan.values()}
        with torch.autocast(device, enabled=False):
            only = next(iter(formats))
            if len(formats) == 1 and only in DTYPES and not _wide(plan):  # autograd does the rest
                dtype = DTYPES[only]
                bias = None if layer.bias is None else layer.bias.to(dtype)
                out = F.linear(x.to(dtype), layer.weight.to(dtype), bias)
                return out if only == "fp32" and autocast else out.to(keep)
            memory, step = layer._precision_memory, -1
            if layer.training:
                if torch._C._current_graph_task_id() == -1:  # not a checkpointed forward that runs again
                    memory["step"] = memory.get("step", 0) + 1
                step = memory["step"]
            return _Planned.apply(x, layer.weight, layer.bias, plan, memory, keep, step)  # type: ignore[no-untyped-call]


def _widened(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Cast every floating-point tensor in a nest of tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        changed = {key: _widened(item, dtype) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (tuple, list)):
        changed_items = [_widened(item, dtype) for item in value]
        return type(value)(*changed_items) if hasattr(value, "_fields") else type(value)(changed_items)
    return value


_PROTECTED_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "softmax": (F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
    "norm": (F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm, torch.layer_norm),
    "loss": (F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.kl_div, F.binary_cross_entropy_with_logits),
}


class _Shrink(torch.autograd.Function):
    """The first input; of the gradient it gets EMBEDDING_GRADIENT, and the second, if any, all."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, beside: Tensor | None) -> Tensor:
        ctx.alone = beside is None
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad * EMBEDDING_GRADIENT, None if ctx.alone else grad


def _look_up(func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(enumerate(args)) | kwargs
    table, bag = 1 if len(args) > 1 else "weight", 8 if len(args) > 8 else "per_sample_weights"
    if not (given[table].requires_grad and torch.is_grad_enabled()):
        return func(*args, **kwargs)

    def run(changed: dict[Any, Tensor]) -> Any:
        named = {key: value for key, value in changed.items() if isinstance(key, str)}
        return func(*(changed[i] for i in range(len(args))), **named)

    factors, beside = given.get(bag), None
    if factors is not None and factors.requires_grad:  # their gradient is not the embedding's
        beside = run(given | {table: given[table].detach()})
        given = given | {bag: factors.detach()}
    return _Shrink.apply(run(given), beside)  # type: ignore[no-untyped-call]


class _Operators(TorchFunctionMode):
    """Inside the model's forward: protected operators in float32, attention in its own dtype, look-ups' gradients."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.wide = {function for kind in PROTECTED for function in _PROTECTED_FUNCTIONS.get(kind, ())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        under = torch.is_autocast_enabled(self.device)
        if func in (F.embedding, F.embedding_bag) and EMBEDDING_GRADIENT != 1.0:
            return _look_up(func, args, kwargs)
        if func is F.scaled_dot_product_attention and ATTENTION != "keep":
            query = args[0] if args else kwargs["query"]
            dtype = DTYPES[ATTENTION]
            with torch.autocast(self.device, enabled=False):
                out = func(*_widened(args, dtype), **_widened(kwargs, dtype))
            return out if under else out.to(query.dtype)
        if under and func in self.wide:
            with torch.autocast(self.device, enabled=False):
                return func(*_widened(args), **_widened(kwargs))
        return func(*args, **kwargs)


# Dynamo compiles this for each operator after a break in a loop, and confuses one with another (torch 2.13).
_FRAMES: Any = torch._C._dynamo.eval_frame
_FRAMES.set_code_exec_strategy(
    _Operators.__torch_function__.__code__,
    _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.DEFAULT),
)

_CLASSES: dict[type, type] = {}
# what torch asks before it takes that kernel, and before it makes a nested tensor of padding for it
_KERNEL = ((nn.TransformerEncoderLayer, "activation_relu_or_gelu"), (nn.TransformerEncoder, "use_nested_tensor"))


def plan_of(name: str) -> str:
    """The plan of a layer by its module name; ``keep`` when no rule names it."""
    return next((plan for pattern, plan in RULES if re.fullmatch(pattern, name, re.DOTALL)), "keep")


def _left_out(name: str, module: nn.Module) -> bool:
    """Whether a rule is about a layer that is not nn.Linear, and asks for what the activations are not."""
    kinds = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    if not isinstance(module, kinds) and type(module).__name__ != "Conv1D":
        return False
    plan = PLANS.get(plan_of(f"{name}.in_proj_weight" if isinstance(module, nn.MultiheadAttention) else name))
    return plan is not None and any(r is None or r["format"] != ACTIVATIONS for r in plan.values())


def apply(model: nn.Module) -> nn.Module:
    """Make the model run under the policy, in place, and return it. Parameters and state_dict keys stay."""
    remove(model)
    for name, module in model.named_modules():
        plan = PLANS.get(plan_of(name))
        if isinstance(module, nn.Linear) and plan is not None:
            cls = type(module)
            if cls not in _CLASSES:
                _CLASSES[cls] = type(cls.__name__, (_PlannedLinear, cls), {})
            module.__class__ = _CLASSES[cls]
            module.__dict__ |= {"_precision_plan": plan, "_precision_memory": {}}
    for module in model.modules():  # in evaluation torch's encoder would run its layers in one kernel, as written
        for kind, name in _KERNEL:
            if isinstance(module, kind) and any(isinstance(part, _PlannedLinear) for part in module.modules()):
                module.__dict__["_precision_kernel"] = {name: module.__dict__[name]}
                module.__dict__[name] = 0
    left = [name for name, module in model.named_modules() if _left_out(name, module)]
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        warnings.warn(f"only nn.Linear is converted, and a rule is about {shown}: left as they are", stacklevel=2)
    if ACTIVATIONS != "keep" or ATTENTION != "keep" or EMBEDDING_GRADIENT != 1.0:
        inner = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            parameter = next(model.parameters(), None)
            device = "cpu" if parameter is None else parameter.device.type
            low = ACTIVATIONS != "keep"
            around = torch.autocast(device, DTYPES[ACTIVATIONS]) if low else contextlib.nullcontext()
            with around, _Operators(device):
                out = inner(*args, **kwargs)
            return _widened(out) if low and "output" in PROTECTED else out

        model.__dict__ |= {"forward": forward, "_precision_activations": True}
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take the policy off again."""
    if model.__dict__.pop("_precision_activations", None):
        del model.__dict__["forward"]
    for module in model.modules():
        module.__dict__ |= module.__dict__.pop("_precision_kernel", {})
        if isinstance(module, _PlannedLinear):
            module.__class__ = type(module).__mro__[2]
            del module.__dict__["_precision_plan"], module.__dict__["_precision_memory"]
    return model
