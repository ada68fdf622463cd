"""Bytes saved for backward under a policy, from the recorded step: what each operator keeps, and in which dtype.

The recorder counted what the script as written saves. Here the forward operators are walked twice, once as recorded
and once under the policy, with the saving rules of autograd (a linear layer keeps its input, GELU its input, ReLU its
output, attention q, k, v and its output, ...) and of this package's quantised layers (8-bit codes of the input); the
difference is added to the count. Values are followed by their sizes, since the record lists no edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoprec.cost.scale import short_dtype
from autoprec.graph.report import GraphReport, Layer, Operator
from autoprec.policy.schema import LayerPlan
from autoprec.recipes import Recipe

__all__ = ["saved_by_rules", "saved_bytes"]

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp64": 8.0}
_SAVES_OUTPUT = ("relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "_softmax", "_log_softmax", "_safe_softmax")
_SAVES_INPUT = ("gelu", "silu", "pow", "softplus", "mish", "elu", "log", "sin", "cos", "hardswish", "native_dropout")
_SAVES_BOTH = ("mul", "div")
#: Results that the float32 list of autocast keeps wide.
_WIDE = ("norm", "softmax", "loss", "embedding", "transcendental", "reduction", "router")
_KEEP = LayerPlan()
#: How far back an operator's inputs are looked for.
_REACH = 64
#: How the recorder names what runs outside every module.
_SCRIPT = "<script>"


@dataclass(slots=True)
class _Value:
    """A tensor produced by a forward operator: how many values, how wide, and whether it counts as saved already."""

    size: int
    width: float
    saved: bool = False
    readers: int = 0


@dataclass(slots=True)
class _Walk:
    """The walk under one policy."""

    plans: Mapping[str, LayerPlan]
    activations: str
    layers: Mapping[str, Layer]
    gpu: bool = False
    recomputed: frozenset[str] = frozenset()
    values: list[_Value] = field(default_factory=list)
    total: float = 0.0
    weights: float = 0.0
    cast_weights: set[str] = field(default_factory=set)
    group_inputs: dict[str, _Value] = field(default_factory=dict)

    def find(self, size: int) -> _Value | None:
        """Return the latest value of this size; its number of readers grows."""
        return next((value for value in reversed(self.values[-_REACH:]) if value.size == size), None)

    def take(self, size: int) -> _Value | None:
        """Return the latest value of this size and remove it from what later operators may read."""
        for index in range(len(self.values) - 1, max(-1, len(self.values) - 1 - _REACH), -1):
            if self.values[index].size == size:
                return self.values.pop(index)
        return None

    def save(self, value: _Value | None, size: int, width: float = 4.0) -> None:
        """Count a value as saved, once; a value nobody produced (the batch) is not counted."""
        if value is None or value.saved or not size:
            return
        value.saved = True
        self.total += value.size * (value.width or width)

    def put(self, size: int, width: float) -> _Value:
        """Remember a result."""
        value = _Value(size, width)
        self.values.append(value)
        return value


def _sizes(operator: Operator) -> list[int]:
    out = []
    for shape in operator.shapes:
        count = 1
        for extent in shape:
            count *= extent
        out.append(count)
    return out


def _out_size(operator: Operator, sizes: list[int]) -> int:
    """Return how many values the operator produced: its bytes beyond its inputs."""
    known = 0.0
    for size, dtype in zip(sizes, operator.dtypes, strict=False):
        known += size * (8.0 if dtype == "int64" else 1.0 if dtype == "bool" else _BYTES.get(short_dtype(dtype), 4.0))
    width = _width(operator)
    return max(0, round((operator.bytes - known) / width))


def _width(operator: Operator) -> float:
    floats = [dtype for dtype in operator.dtypes if dtype in _BYTES]
    return _BYTES[floats[0]] if floats else 4.0


def _codes(recipe: Recipe, size: float, other: float) -> float:
    """Return bytes of the codes and scales of an operand of ``size`` values with ``other`` values per scale."""
    if recipe.format == "nvfp4":
        return size * (0.5 + 1.0 / 16)
    if recipe.format == "mxfp8":
        return size * (1.0 + 1.0 / 32)
    granularity = recipe.scaling.granularity if recipe.scaling else "tensor"
    if granularity == "block":
        return size * (1.0 + 4.0 / 128)
    return size + (4.0 * size / other if granularity == "row" else 4.0)


def _linear(walk: _Walk, operator: Operator, layer: Layer, sizes: list[int]) -> None:
    gemm = next((g for g in layer.gemms if g.role == "fprop"), layer.gemms[0])
    weight_size = gemm.k * gemm.n if layer.kind != "conv" else layer.parameters
    input_size = gemm.m * gemm.k if layer.kind != "conv" else sizes[0]
    plan = walk.plans.get(layer.name, _KEEP)
    shared = walk.group_inputs.get(layer.group)
    value = shared if shared is not None and shared.size == input_size else walk.take(input_size)
    if value is not None:
        walk.group_inputs[layer.group] = value
    script = short_dtype(layer.dtype)
    kept = script if walk.activations == "keep" else walk.activations
    forms = [kept if (r := plan.recipe(g)) is None else r.format for g in ("fprop", "dgrad", "wgrad")]
    roles = layer.roles()
    planned = any((r := plan.recipe(g)) is not None and r.scaled for g in ("fprop", "dgrad", "wgrad"))
    if planned:
        _planned(walk, plan, value, gemm.m, input_size, weight_size, roles)
    else:
        width = _BYTES.get(forms[0], 4.0)
        if "wgrad" in roles:
            if value is None or value.width != width:
                if value is not None or width != _BYTES[script]:
                    walk.total += input_size * width  # a cast copy, which no other layer shares
            else:
                walk.save(value, input_size)
        # a convolution's backward keeps its weight even where its input needs no gradient
        if (
            ("dgrad" in roles or layer.kind == "conv")
            and width < _BYTES[script]
            and layer.weight not in walk.cast_weights
        ):
            walk.cast_weights.add(layer.weight)
            walk.weights += weight_size * width
    produced = _out_size(operator, sizes) if layer.kind == "conv" else gemm.m * gemm.n
    walk.put(produced, _BYTES.get(kept, 4.0))


def _planned(
    walk: _Walk,
    plan: LayerPlan,
    value: _Value | None,
    tokens: int,
    input_size: int,
    weight_size: int,
    roles: tuple[str, ...],
) -> None:
    """Count what a quantised layer keeps: codes of the input for wgrad, codes of the weight where dgrad reuses them."""
    if "wgrad" in roles:
        recipe = plan.wgrad
        if recipe is not None and recipe.scaled:
            walk.total += _codes(recipe, input_size, float(tokens))
        elif value is not None:
            width = 4.0 if recipe is None or recipe.format in ("fp32", "tf32") else 2.0
            if value.width <= width:
                walk.save(value, input_size)
            else:
                walk.total += input_size * width
    dgrad = plan.dgrad
    if "dgrad" not in roles or dgrad is None or not dgrad.scaled:
        return
    per_tensor = dgrad.scaling is not None and dgrad.scaling.granularity in ("tensor", "block")
    if walk.gpu or (per_tensor and dgrad == plan.fprop):
        walk.weights += _codes(dgrad, weight_size, 128.0)


def _other(walk: _Walk, operator: Operator, sizes: list[int]) -> None:
    name = operator.op.rpartition("::")[2].rstrip("_")
    produced, width = _out_size(operator, sizes), _width(operator)
    low = _BYTES.get(walk.activations, 0.0)
    if operator.cls == "attention" and name.startswith("_scaled_dot_product"):
        inner = low or width
        for size in sizes[:3]:
            fused = walk.take(size) or walk.find(3 * size)
            walk.save(fused or _Value(size, inner), size)
        result = walk.put(sizes[0] if sizes else 0, inner)
        walk.save(result, result.size)
        walk.total += max(0, produced - result.size) * width
        return
    if operator.cls == "norm" and any(part in name for part in ("layer_norm", "batch_norm", "group_norm")):
        value = walk.find(sizes[0])
        if value is not None and value.width < 4.0:  # widened for the norm
            walk.total += sizes[0] * 4.0
            walk.take(sizes[0])
        else:
            walk.save(value, sizes[0])
        walk.total += max(0, produced - sizes[0]) * 4.0
        walk.put(sizes[0], 4.0)
        return
    biggest = max(sizes, default=0)
    # a norm written out in operators reads its input twice; only its mean is done with what it read
    read = walk.find if operator.cls == "norm" and name not in ("mean", "sum") else walk.take
    inputs = [read(size) for size in sizes[:2] if size == biggest and size > 1]
    present = [value for value in inputs if value is not None]
    if operator.module == _SCRIPT:  # outside the model, whose output a policy returns in fp32
        present = [value if value.width >= 4.0 or not low else _Value(value.size, 4.0) for value in present]
    wide = operator.cls in _WIDE or not low or not present or any(value.width > low for value in present)
    result_width = width if not low else (4.0 if wide else low)
    if name in _SAVES_INPUT or name in _SAVES_BOTH:
        for value in present:
            walk.save(value, value.size)
    if name == "native_dropout":
        walk.total += biggest
    result = walk.put(produced or biggest, result_width)
    if name in _SAVES_OUTPUT:
        walk.save(result, result.size)


def saved_by_rules(
    report: GraphReport, plans: Mapping[str, LayerPlan], activations: str, *, gpu: bool = False
) -> tuple[float, float]:
    """Return the bytes that the rules alone say a step saves: activations, and copies of weights.

    On a GPU a quantised layer keeps its 8-bit (transposed) weight from forward to backward, whatever the scaling; the
    emulation quantises the weight again where its scales lie along the contraction.
    """
    by_weight = {layer.weight: layer for layer in report.layers}
    by_name = {layer.name: layer for layer in report.layers}
    # checkpointing runs these modules again in the backward pass: their forward saves nothing
    again = frozenset(row.module for row in report.operators if row.phase == "recompute")
    walk = _Walk(plans, activations, by_name, gpu, again)
    for operator in report.operators:
        if operator.phase != "forward" or operator.cls in ("view", "allocation") or not operator.shapes:
            continue
        sizes = _sizes(operator)
        layer = by_weight.get(operator.weight) or by_name.get(operator.module)
        kept = walk.total, walk.weights
        if operator.cls in ("gemm", "conv") and layer is not None and layer.gemms:
            _linear(walk, operator, layer, sizes)
        else:
            _other(walk, operator, sizes)
        if operator.module in walk.recomputed:
            walk.total, walk.weights = kept
    return walk.total, walk.weights


def saved_bytes(
    report: GraphReport,
    plans: Mapping[str, LayerPlan],
    activations: str = "keep",
    *,
    gpu: bool = False,
    script: float | None = None,
) -> tuple[int, int]:
    """Return the modelled bytes saved for backward, and how many of them are copies of weights.

    What was counted for the script, plus what the policy changes; (0, 0) when nothing was counted.

    Args:
        report: the recorded step.
        plans: layer -> plan; layers not named keep the script's dtype.
        activations: autocast dtype around the model, or keep.
        gpu: see :func:`saved_by_rules`.
        script: what the rules say of the script as written, where the caller knows it already.
    """
    counted = report.memory.get("saved_for_backward", 0)
    if not counted:
        return 0, 0
    values, weights = saved_by_rules(report, plans, activations, gpu=gpu)
    before = sum(saved_by_rules(report, {}, "keep", gpu=gpu)) if script is None else script
    return max(0, round(counted + values + weights - before)), round(weights)
