"""Everything of a step that no policy decides per layer: attention, norms, pointwise, optimizer, launches.

Traffic is what the recorder counted (unique inputs and outputs of each operator), scaled to the asked shapes;
compiled code fuses pointwise chains, so it moves less and launches less. Exchanges of tensor parallelism go over the
links of the hardware table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoprec.cost.rates import Rates
from autoprec.cost.saved import FLOAT_BYTES
from autoprec.cost.scale import CostScale, in_block, short_dtype
from autoprec.graph.report import GraphReport, NewtonSchulz, Operator, StepProduct
from autoprec.policy.sections import OptimizerPolicy
from autoprec.precision.hardware import Target

#: Categories of the breakdown, beside gemm, quantise, optimizer, communication and launch.
OTHER = ("attention", "product", "norm", "pointwise", "other")
#: Categories that multiply matrices.
PRODUCTS = ("attention", "product")
_CATEGORY = {
    "attention": "attention",
    "softmax": "attention",
    "gemm": "product",
    "conv": "product",
    "product": "product",
    "norm": "norm",
    "follow": "pointwise",
    "pointwise": "pointwise",
    "transcendental": "pointwise",
    "cast": "pointwise",
    "output": "pointwise",
}
_ALONE = {"attention": "product", "softmax": "softmax_alone"}
#: Bytes per value where not 4.
_BYTES = FLOAT_BYTES | {"e4m3": 1.0, "e5m2": 1.0}
#: Share of traffic, and below of kernels, that is left when a compiler fuses pointwise chains and norms.
_FUSED_TRAFFIC = {"pointwise": 0.45, "norm": 0.6, "attention": 0.9, "product": 0.9, "other": 0.8}
#: Of kernels.
_FUSED_KERNELS = {"pointwise": 0.3, "norm": 0.5, "attention": 1.0, "product": 1.0, "other": 0.6}
#: Bytes per value of what is stored, scales included: those of ``optim/codecs.py`` (a test compares them).
_WEIGHT_BYTES = {"fp32": 4.0, "fp16_scaled": 2.0, "bf16_stochastic": 2.0, "bf16_kahan": 4.0, "e4m3_master": 3.0}
#: Of gradients and first moments: e4m3 has an fp32 scale for each block of 128.
GRADIENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "e4m3": 1.03125, "e4m3_tensor": 1.0}
#: Of second moments: int8_block has an fp32 scale for each block of 256.
_EXP_AVG_SQ_BYTES = {"fp32": 4.0, "fp16_scaled": 2.0, "fp16_tensor": 2.0, "int8_block": 1.015625}


def category(cls: str) -> str:
    """Return the category of the breakdown for an operator class."""
    return _CATEGORY.get(cls, "other")


def rest_operators(report: GraphReport) -> dict[int, Operator]:
    """Return the operators that are not a GEMM of a layer and touch memory, by position.

    Products of two activations, and softmaxes, in a module that does not attend get the classes ``product`` and
    ``softmax_alone``: the graph calls every product without a weight attention.
    """
    attending = {row.module for row in report.operators if row.attends}
    weights = {layer.weight for layer in report.layers}
    names = {layer.name for layer in report.layers}
    out = {}
    for index, operator in enumerate(report.operators):
        if operator.exchanges and operator.op.endswith(("::wait_tensor", "::_wrap_tensor_autograd")):
            continue  # no work of their own: the collective before them has it
        own = operator.cls in ("gemm", "conv") and (operator.weight in weights or operator.module in names)
        if own or operator.cls == "view" or not (operator.bytes or operator.flops):
            continue
        if operator.cls in _ALONE and attending.isdisjoint((operator.module, operator.module.rpartition(".")[0])):
            operator = replace(operator, cls=_ALONE[operator.cls])
        out[index] = operator
    return out


@dataclass(frozen=True, slots=True)
class RestCost:
    """Seconds by category, and how many kernels (compiled or not) and eager operators they are."""

    seconds: dict[str, float]
    kernels: float
    operators: float


def growth(operator: Operator, scale: CostScale) -> tuple[float, float]:
    """Return the factors of FLOPs and of bytes from the recorded operator to the scaled model."""
    depth = scale.depth if in_block(operator.module) else 1.0
    kind = category(operator.cls)
    if kind in PRODUCTS and operator.cls != "softmax":
        return scale.tokens * scale.seq * scale.width * depth, scale.tokens * scale.width * depth
    if operator.cls == "softmax":
        return scale.tokens * scale.seq * depth, scale.tokens * scale.seq * depth
    if operator.cls in ("loss", "output"):  # over the vocabulary, which does not widen
        return scale.tokens, scale.tokens
    return scale.tokens * scale.width * depth, scale.tokens * scale.width * depth


def exchange_seconds(operator: Operator, target: Target) -> float:
    """Return the least seconds of a collective between the ranks that share a layer, at a link's full speed.

    A rank sends ``2 (n - 1) / n`` of what ``n`` ranks reduce, and what a gather adds or a scatter leaves out. How many
    they are was not recorded, so a reduction is charged as that of two ranks, which is the least: the tensor once.
    """
    row = operator
    sizes = [
        sum(
            math.prod(shape) * _BYTES.get(short_dtype(dtype), 4.0) for shape, dtype in zip(shapes, dtypes, strict=False)
        )
        for shapes, dtypes in ((row.shapes, row.dtypes), (row.out_shapes, row.out_dtypes))
    ]
    sent = abs(sizes[0] - sizes[1]) or sizes[0]
    return sent / target.links["scale_up"] if target.links else 0.0


def rest_cost(
    target: Target,
    rates: Rates,
    operators: Iterable[Operator],
    scale: CostScale,
    *,
    activations: str = "keep",
    attention: str = "keep",
    compiled: bool = True,
) -> RestCost:
    """Return the time of what is not a layer's GEMM, on a GPU.

    Args:
        target: the device.
        rates: what kernels reach of its peaks.
        operators: of the step, without the products of layers.
        scale: of a larger model.
        activations: dtype of autocast around the model; ``keep`` is the script's.
        attention: dtype that a policy gives attention; ``keep`` follows the others.
        compiled: whether the step's operators are fused.
    """
    seconds = dict.fromkeys(OTHER, 0.0)
    kernels = count = 0.0
    speed = target.bandwidth * rates.bandwidth
    for operator in operators:
        kind = category(operator.cls)
        more_flops, more_bytes = growth(operator, scale)
        moved = operator.bytes * more_bytes
        around = activations
        if kind == "attention" and attention != "keep":
            around = "keep" if attention == "fp32" else attention
        wide = not operator.dtypes or short_dtype(operator.dtypes[0]) == "fp32"
        if around != "keep" and wide and kind in ("pointwise", *PRODUCTS) and operator.cls != "softmax":
            moved *= 0.5
        if compiled:
            moved *= _FUSED_TRAFFIC[kind]
        time = exchange_seconds(operator, target) * more_bytes if operator.exchanges else moved / speed
        if operator.exchanges and around != "keep" and wide:
            time *= 0.5
        if kind in PRODUCTS and operator.cls != "softmax":
            family = "bf16" if around != "keep" or not wide else "tf32"
            peak = target.peak(family) or target.peak("fp32") or target.peak("bf16")
            time = max(time, operator.flops * more_flops / (peak * rates.attention))
        seconds[kind] += time
        depth = scale.depth if in_block(operator.module) else 1.0
        kernels += depth * (_FUSED_KERNELS[kind] if compiled else 1.0)
        count += depth
    return RestCost(seconds, kernels, count)


def optimizer_bytes(policy: OptimizerPolicy, second: float = 1.0) -> tuple[float, float]:
    """Return bytes per parameter stored (weights and states) and moved by one Adam step (reads and writes).

    ``second``: share of the parameters that have a second moment, see :func:`second_moments`.
    """
    stored = _WEIGHT_BYTES[policy.weights] + GRADIENT_BYTES[policy.exp_avg]
    stored += second * _EXP_AVG_SQ_BYTES[policy.exp_avg_sq]
    return stored, 2.0 * stored + GRADIENT_BYTES[policy.gradients]


def beside_bytes(policy: OptimizerPolicy, second: float = 1.0, *, moments: bool = True) -> float:
    """Return the bytes per parameter that storage adds to a model in 16 bits.

    Exact weights lie beside the parameters, which stay; moments that are not stored have the parameters' dtype.

    Args:
        policy: what is stored how.
        second: share of the parameters that have a second moment, see :func:`second_moments`.
        moments: whether there are any.
    """
    weights = 0.0 if policy.weights == "fp32" else _WEIGHT_BYTES[policy.weights]
    if not moments:
        return weights
    first, other = min(2.0, GRADIENT_BYTES[policy.exp_avg]), min(2.0, _EXP_AVG_SQ_BYTES[policy.exp_avg_sq])
    return weights + first - 2.0 + second * (other - 2.0)


def scaled_newton_schulz(report: GraphReport, scale: CostScale) -> list[NewtonSchulz]:
    """Return what Muon multiplies at scaled shapes: both sides of its matrices grow, and blocks repeat."""
    return [
        replace(
            one,
            rows=max(1, round(one.rows * scale.width)),
            columns=max(1, round(one.columns * scale.width)),
            matrices=max(1, round(one.matrices * scale.depth)),
        )
        for one in report.newton_schulz
    ]


def scaled_products(report: GraphReport, scale: CostScale) -> list[StepProduct]:
    """Return what optimizers' steps multiply at scaled shapes: all sides grow, and blocks repeat."""

    def grown(size: int) -> int:
        return max(1, round(size * scale.width))

    return [
        replace(one, m=grown(one.m), k=grown(one.k), n=grown(one.n), calls=max(1, round(one.calls * scale.depth)))
        for one in report.step_products()
    ]


def second_moments(found: Iterable[NewtonSchulz], parameters: float) -> float:
    """Return the share of the parameters that have a second moment under Adam: those that are not Muon's."""
    muon = sum(one.rows * one.columns * one.matrices for one in found)
    return max(0.0, 1.0 - muon / parameters) if parameters else 1.0
