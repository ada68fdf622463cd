"""Bytes saved for backward under a policy, from the recorded step: what each operator keeps, and in which dtype.

The recorder says which tensors the script as written saves. Here the forward operators are walked under a policy: each
tensor gets the dtype it would have (autocast's rules), and who saves it (autograd's rules for common operators: a
linear layer its input, GELU its input, softmax its output, a product both operands). Tensors that somebody still saves
count at their new width; layers that quantise add 8-bit codes in place of their input, and operators that convert
their input add the converted copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod

from autoprec.cost.scale import short_dtype
from autoprec.graph.report import GraphReport, Layer, Operator
from autoprec.graph.trace import SCRIPT
from autoprec.policy.schema import LayerPlan
from autoprec.policy.space import WIDE_OPERATORS
from autoprec.precision.recipes import Recipe

#: Bytes per value of the floating-point dtypes that a script computes in.
FLOAT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp64": 8.0}
_SAVES_OUTPUT = (
    "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "_softmax", "_log_softmax", "_safe_softmax", "mkldnn_rnn_layer"
)  # fmt: skip
_SAVES_INPUT = ("gelu", "silu", "pow", "softplus", "mish", "elu", "log", "sin", "cos", "hardswish")
_SAVES_BOTH = ("mul", "div")
_NORMS = ("layer_norm", "batch_norm", "group_norm")
#: Results that stay wide under autocast whatever a policy says: its float32 list on a GPU, and on a CPU.
_WIDE_ON_GPU = ("norm", "softmax", "loss", "embedding", "transcendental", "reduction", "router", "pow")
_WIDE_ON_CPU = ("loss", "embedding", "router")
#: What else is wide where a policy keeps norms in float32: what they are written with, wherever it stands.
_WITH_NORMS = ("transcendental", "reduction", "pow")
_PRODUCTS = ("attention", "gemm", "conv")
#: Products that autocast leaves in the dtype of their operands.
_NOT_AUTOCAST = ("_grouped_mm", "_scaled_grouped_mm")
#: The plan of a layer that runs as the script wrote it.
KEPT = LayerPlan()
#: Formats whose product (``_scaled_mm_v2``) is not among the operators whose results selective checkpointing keeps
#: (``torch._functorch.partitioners.get_default_op_list``), so that it runs again. torchtitan's NVFP4 is such.
NOT_LISTED = ("nvfp4",)
#: What oneDNN keeps of an LSTM's states in 16 bits, over what it keeps in 32: sums stay wide (2026-11-27, torch 2.13).
NARROW_STATES = 0.705


@dataclass(slots=True)
class Value:
    """Memory that a forward operator filled: its width as written and under the policy, and who saves it.

    ``saved`` are the bytes autograd saved of it in the script; ``asked`` says that an operator whose rule is known
    would save it in some form, ``kept`` that one saves it as it is, ``widened`` that a float32 copy was added;
    ``counted`` is False where the recorder could not count (``torch.func``) and ``saved`` is what saving would take.
    ``cast`` are the recipes whose codes of it are saved.
    """

    script: float
    width: float
    saved: float = 0.0
    asked: bool = False
    kept: bool = False
    widened: bool = False
    counted: bool = True
    cast: set[Recipe] = field(default_factory=set)

    def keep(self) -> None:
        """Note that the backward pass reads the tensor itself: it is kept."""
        self.asked = self.kept = True

    def bytes(self) -> float:
        """Return what is saved under the policy; what nobody known asks for stays saved if it was counted."""
        return self.saved * self.width / self.script if self.kept or (self.counted and not self.asked) else 0.0


@dataclass(slots=True)
class _Read:
    """An input of an operator: the memory behind it (None: a parameter, buffer or the batch) and how many values.

    ``maker`` is the position of the operator that made it.
    """

    value: Value | None
    size: int
    dtype: str
    maker: int = -1


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes that are kept for backward beside the values themselves.

    Attributes:
        at: position of the operator that made it.
        source: position of the operator whose result it is of; -1 for a weight or the batch.
        weight: of the layer whose backward uses it, empty where it is another operator.
        cast: it is a copy of that weight.
    """

    size: float
    at: int
    source: int
    weight: str = ""
    cast: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step runs under, as far as the width of its tensors goes.

    Attributes:
        plans: layer -> plan; layers not named keep the script's dtype.
        activations: autocast dtype around the model, or keep.
        gpu: a quantised layer keeps its 8-bit (transposed) weight from forward to backward, whatever the scaling; the
            emulation quantises the weight again where its scales lie along the contraction. Autocast keeps more wide.
        fp32_operators: what a policy keeps in float32 under autocast (attention, norm, softmax).
        shared: layers that read one input (q, k and v in a compiled step) save its codes once.
    """

    plans: Mapping[str, LayerPlan] = field(default_factory=dict)
    activations: str = "keep"
    gpu: bool = False
    fp32_operators: Collection[str] = WIDE_OPERATORS
    shared: bool = False


class Walk:
    """The walk of a step under one policy.

    ``made`` holds each operator's first output by position, ``copies`` what is kept beside these, ``inputs`` the width
    in which each layer reads its input; ``at`` is the position of the operator at hand.
    """

    def __init__(self, report: GraphReport, setting: Setting) -> None:
        rows, kept = report.operators, setting.fp32_operators
        self.setting, self.plans, self.gpu = setting, setting.plans, setting.gpu
        self.low = FLOAT_BYTES.get(setting.activations, 0.0)
        self.made: dict[int, Value] = {}
        self.values: list[Value] = []
        self.copies: list[Copy] = []
        self.inputs: dict[str, float] = {}
        self.cast_weights: set[str] = set()
        self.at = 0
        self.layers = {layer.name: layer for layer in report.layers} | {layer.weight: layer for layer in report.layers}
        # attention that torch itself writes out (no fused kernel takes its dropout or mask here) computes in float32
        self.fp32_products = {row.module for row in rows if row.op.endswith("::_safe_softmax")}
        others = _WIDE_ON_GPU if setting.gpu else _WIDE_ON_CPU
        self.fp32_operators = frozenset((*kept, *(_WITH_NORMS if "norm" in kept else ()), *others))
        self.layer_modules = {row.module for row in rows if row.cls == "gemm"}
        # checkpointing runs these modules again in the backward pass: their forward saves nothing
        self.again = {row.module for row in rows if row.phase == "recompute"}
        self.counted = any(any(row.out_saved) for row in rows)

    def reads(self, operator: Operator) -> list[_Read]:
        """Return what an operator reads, input by input: its values, their number and dtype, and who made them."""
        out = []
        for shape, dtype, maker in zip(operator.shapes, operator.dtypes, operator.sources, strict=False):
            out.append(_Read(self.made.get(maker), prod(shape or (1,)), dtype, maker))
        return out

    def layer(self, operator: Operator) -> Layer | None:
        """Return the layer whose product this is; None for other operators, and for a kernel that keeps its own."""
        if operator.cls not in ("gemm", "conv") or "_rnn" in operator.op:
            return None
        layer = self.layers.get(operator.weight) or self.layers.get(operator.module)
        return layer if layer is not None and layer.gemms else None

    def recurrent(self, operator: Operator) -> float:
        """Return bytes per value of what a kernel that runs a whole recurrent layer reads and makes; 0 for others."""
        if "mkldnn_rnn_layer" not in operator.op:
            return 0.0
        layer = self.layers.get(operator.module)
        recipe = None if layer is None else self.plans.get(layer.name, KEPT).fprop
        return self.low or FLOAT_BYTES[operator.dtypes[0]] if recipe is None else FLOAT_BYTES.get(recipe.format, 4.0)

    def narrowed(self, operator: Operator) -> bool:
        """Say whether such a kernel computes in fewer bits than in the script."""
        return 0.0 < self.recurrent(operator) < FLOAT_BYTES.get(operator.dtypes[0], 4.0)

    def copy(self, size: float, read: _Read | None = None, weight: str = "", *, cast: bool = False) -> None:
        """Note a converted copy that is kept for the backward pass.

        Args:
            size: bytes.
            read: the input that it is of; None for the batch or a weight.
            weight: name of the layer's weight; empty for none.
            cast: whether it is a cast weight, which autocast keeps once a step.
        """
        self.copies.append(Copy(size, self.at, -1 if read is None else read.maker, weight, cast))

    def save(self, read: _Read, width: float, weight: str = "") -> None:
        """An operator saves an input in a width: the tensor itself, or a converted copy of its own.

        Args:
            read: the input.
            width: bytes per value.
            weight: name of the layer's weight; empty for none.
        """
        if read.value is None:
            return
        if read.value.width == width:
            read.value.keep()
        elif read.value.saved:
            read.value.asked = True
            self.copy(read.size * width, read, weight)

    def save_wide(self, read: _Read) -> None:
        """Operators that compute in float32 save an input: a narrow one is converted once for all of them."""
        value = read.value
        if value is None or not self.low or value.width >= 4.0:
            if value is not None:
                value.keep()
        elif not value.widened:
            value.widened = value.asked = True
            if value.saved:
                self.copy(4.0 * read.size, read)

    @property
    def weights(self) -> float:
        """Return the bytes of cast weights."""
        return sum(copy.size for copy in self.copies if copy.cast)

    @property
    def total(self) -> float:
        """Return the bytes that are kept for the backward pass, cast weights left out."""
        return sum(copy.size for copy in self.copies if not copy.cast) + sum(value.bytes() for value in self.values)


def codes_bytes(recipe: Recipe, size: float, other: float) -> float:
    """Return bytes of the codes and scales of an operand of ``size`` values with ``other`` values per scale.

    Args:
        recipe: how the operand is quantised.
        size: its number of values.
        other: values per scale, where scales are by row.
    """
    if recipe.format == "nvfp4":
        return size * (0.5 + 1.0 / 16)
    if recipe.format == "mxfp8":
        return size * (1.0 + 1.0 / 32)
    granularity = recipe.scaling.granularity if recipe.scaling else "tensor"
    if granularity == "block":
        return size * (1.0 + 4.0 / 128)
    return size + (4.0 * size / other if granularity == "row" else 4.0)


def linear(walk: Walk, operator: Operator, layer: Layer) -> None:
    """Note what a layer's forward product saves of its input and of its weight.

    Args:
        walk: receives it.
        operator: the forward product.
        layer: whose product it is.
    """
    gemm = next((g for g in layer.gemms if g.role == "fprop"), layer.gemms[0])
    weight_size = gemm.k * gemm.n if layer.kind != "conv" else layer.parameters
    reads = walk.reads(operator)
    input_size = gemm.m * gemm.k if layer.kind != "conv" else (reads[0].size if reads else 0)
    read = next((r for r in reads if r.size == input_size and r.value is not None), _Read(None, input_size, ""))
    # a weight computed in the step, such as the sum of a stack, is saved like an activation
    made = next((r for r in reads if r is not read and r.value is not None and r.size == weight_size), None)
    plan = walk.plans.get(layer.name, KEPT)
    script = short_dtype(layer.dtype)
    kept = script if walk.setting.activations == "keep" else walk.setting.activations
    roles = layer.roles()
    walk.inputs[layer.name] = FLOAT_BYTES.get(script, 4.0) if read.value is None else read.value.width
    if plan.scaled:
        if made is not None and made.value is not None:
            made.value.asked = True
        _planned(walk, plan, read, gemm.m, weight_size, layer)
        return
    width = FLOAT_BYTES.get(kept if plan.fprop is None else plan.fprop.format, 4.0)
    if "wgrad" in roles:
        if read.value is not None:
            walk.save(read, width, layer.weight)
        elif width != FLOAT_BYTES.get(script, 4.0):  # of the batch, which counts as nobody's otherwise
            walk.copy(input_size * width, None, layer.weight)
    # a convolution's backward keeps its weight even where its input needs no gradient
    keeps_weight = "dgrad" in roles or layer.kind == "conv"
    if made is not None:
        walk.save(made, width)
    elif keeps_weight and width < FLOAT_BYTES.get(script, 4.0) and layer.weight not in walk.cast_weights:
        walk.cast_weights.add(layer.weight)
        walk.copy(weight_size * width, None, layer.weight, cast=True)


def _planned(walk: Walk, plan: LayerPlan, read: _Read, tokens: int, weight_size: int, layer: Layer) -> None:
    """Count what a quantised layer keeps: codes of the input for wgrad, codes of the weight where dgrad reuses them."""
    roles = layer.roles()
    if "wgrad" in roles:
        recipe = plan.wgrad
        if recipe is not None and recipe.scaled:
            known = read.value.cast if walk.setting.shared and read.value is not None else set()
            if recipe not in known:
                walk.copy(codes_bytes(recipe, read.size, float(tokens)), read, layer.weight)
            known.add(recipe)
            if read.value is not None:
                read.value.asked = True
        elif read.value is not None:
            width = 4.0 if recipe is None or recipe.format in ("fp32", "tf32") else 2.0
            walk.save(read, min(width, read.value.width), layer.weight)
    dgrad = plan.dgrad
    if "dgrad" not in roles or dgrad is None or not dgrad.scaled:
        return
    per_tensor = dgrad.scaling is not None and dgrad.scaling.granularity in ("tensor", "block")
    if walk.gpu or (per_tensor and dgrad == plan.fprop):
        walk.copy(codes_bytes(dgrad, weight_size, 128.0), None, layer.weight, cast=True)


def operand_width(walk: Walk, operator: Operator, name: str, value: Value) -> float:
    """Return the width in which a product that belongs to no layer reads an operand.

    Args:
        walk: the step so far.
        operator: the product.
        name: of the operator, without its namespace.
        value: the operand.
    """
    if width := walk.recurrent(operator):
        return width
    if not walk.low:
        return value.script
    if name in _NOT_AUTOCAST:
        return value.width
    in_fp32 = operator.module in walk.fp32_products or ("attention" in walk.fp32_operators and operator.attends)
    return 4.0 if in_fp32 else walk.low


def _other(walk: Walk, operator: Operator, name: str) -> None:
    """Note what an operator that belongs to no layer saves of its inputs."""
    reads = [read for read in walk.reads(operator) if read.dtype in FLOAT_BYTES]
    if operator.cls in _PRODUCTS:  # both operands, or q, k and v; a mask comes after them
        for read in reads[:3] if name.startswith("_scaled_dot_product") else reads:
            if read.value is not None:
                walk.save(read, operand_width(walk, operator, name, read.value))
        if walk.narrowed(operator):  # both weights are cast for the call
            size = sum(prod(shape) for shape in operator.shapes[1:3])
            walk.copy(size * walk.recurrent(operator), None, operator.weight, cast=True)
    elif operator.cls == "norm" and any(part in name for part in _NORMS):
        for read in reads[:1]:
            if "norm" in walk.fp32_operators:
                walk.save_wide(read)
            elif read.value is not None:
                read.value.keep()
    elif name in _SAVES_INPUT or (name in _SAVES_BOTH and len(reads) > 1):
        for read in reads:
            # outside the model, whose output a policy returns in fp32
            if operator.module == SCRIPT or not walk.fp32_operators.isdisjoint({operator.cls, name} & {"norm", "pow"}):
                walk.save_wide(read)
            elif read.value is not None:
                read.value.keep()


def _width(walk: Walk, operator: Operator, script: float, name: str, layer: Layer | None) -> float:
    """Return bytes per value of an operator's result under the policy."""
    if width := walk.recurrent(operator):
        return width
    if not walk.low:
        return script
    if "attention" in walk.fp32_operators and operator.attends:
        return max(4.0, script)
    if (layer is not None or operator.cls in _PRODUCTS) and name not in _NOT_AUTOCAST:
        recipe = None if layer is None else walk.plans.get(layer.name, KEPT).fprop
        return 4.0 if recipe is not None and recipe.wide_output else walk.low
    if name == "_to_copy":  # the script asks for this dtype
        return script
    reads = [read for read in walk.reads(operator) if read.dtype in FLOAT_BYTES]
    if operator.cls == "norm" and "norm" not in walk.fp32_operators and reads and reads[0].value is not None:
        return reads[0].value.width
    if (
        operator.module == SCRIPT
        or not walk.fp32_operators.isdisjoint((operator.cls, name))
        or name == "_log_softmax"  # of a loss
        or not any(read.value is not None for read in reads)
    ):
        return script if operator.cls == "allocation" else max(4.0, script)
    # a parameter or buffer as wide as the script made it widens the result, single numbers do not
    bias = name == "add" and operator.module in walk.layer_modules
    widths = [
        read.value.width if read.value is not None else FLOAT_BYTES[read.dtype]
        for read in reads
        if read.value is not None or (read.size > 1 and not bias)
    ]
    return max(widths)


def _result(walk: Walk, index: int, operator: Operator, layer: Layer | None, name: str) -> None:
    """Note an operator's result, or that it is the memory of its input."""
    in_place = operator.op.endswith("_") and not operator.op.endswith("__")
    source = walk.made.get(operator.sources[0]) if operator.sources else None
    if operator.cls == "view" or in_place:
        if source is not None:
            walk.made[index] = source
            if name in _SAVES_OUTPUT:
                source.keep()
        return
    for slot, (dtype, saved) in enumerate(zip(operator.out_dtypes, operator.out_saved or (0,), strict=False)):
        script = FLOAT_BYTES.get(dtype)
        if slot == 0 and script is not None:
            size = script * prod(operator.out_shapes[0] or (1,))
            plan = KEPT if layer is None else walk.plans.get(layer.name, KEPT)
            if operator.module in walk.again and plan.fprop is not None and plan.fprop.format in NOT_LISTED:
                saved = 0
            value = Value(script, _width(walk, operator, script, name, layer), float(saved) if walk.counted else size)
            value.counted = walk.counted
            if name in _SAVES_OUTPUT or name.startswith("_scaled_dot_product"):
                value.keep()
            walk.values.append(value)
            walk.made[index] = value
        elif saved:  # masks, statistics, indices: nothing a policy changes, but a recurrent kernel's states
            narrow = NARROW_STATES if walk.narrowed(operator) else 1.0
            walk.copies.append(Copy(saved * narrow, index, index))


def forward(walk: Walk, index: int, operator: Operator) -> None:
    """Note what a forward operator makes, and what is saved because of it.

    Args:
        walk: receives it.
        index: of the operator in the report.
        operator: the operator.
    """
    walk.at, name, layer = index, operator.op.rpartition("::")[2].rstrip("_"), walk.layer(operator)
    if layer is not None and (name not in _NOT_AUTOCAST or layer.name in walk.plans):
        linear(walk, operator, layer)
    elif operator.cls not in ("view", "allocation"):
        _other(walk, operator, name)
    _result(walk, index, operator, layer, name)


def walked(report: GraphReport, setting: Setting) -> Walk:
    """Walk the forward pass of a step under a policy: what each operator makes, and what is saved of it."""
    walk = Walk(report, setting)
    for index, operator in enumerate(report.operators):
        if operator.phase != "forward" or not operator.out_shapes:
            continue
        kept = len(walk.copies)
        forward(walk, index, operator)
        if operator.module in walk.again:
            del walk.copies[kept:]
    return walk


def saved_bytes(report: GraphReport, setting: Setting, script: Walk | None = None) -> tuple[int, int]:
    """Return the modelled bytes saved for backward, and how many of them are copies of weights.

    What was counted for the script, plus what the policy changes; (0, 0) when nothing was counted.

    Args:
        script: the walk of the script as written, where the caller has it already.
    """
    counted = report.memory.get("saved_for_backward", 0)
    if not counted:
        return 0, 0
    walk, before = walked(report, setting), script or walked(report, Setting(gpu=setting.gpu))
    return max(0, round(counted + walk.total + walk.weights - (before.total + before.weights))), round(walk.weights)
