"""The peak of a step's memory: when each tensor of the recorded step is made and released, under a policy.

The record says which operator made each tensor and which one reads it last. Of the forward pass lives what a later
operator reads, and what :mod:`autoprec.cost.saved` says is kept for backward; the backward pass releases that step by
step, and fills gradients on its way: of activations until the next operator has read them, of parameters to the end.
Checkpointed blocks run again in the middle of it. Beside them stands what an operator needs while it runs: codes of the
operands of a quantised layer, casts of those that are multiplied in 16 bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from autoprec.cost.saved import (
    FLOAT_BYTES,
    KEPT,
    NARROW_STATES,
    Copy,
    Setting,
    Value,
    Walk,
    codes_bytes,
    forward,
    linear,
    walked,
)
from autoprec.graph.report import GraphReport, Layer, Operator

#: Bytes per value of every dtype that is not wider than 4 bytes, or is fp64.
_BYTES = FLOAT_BYTES | {"bool": 1.0, "uint8": 1.0, "int8": 1.0, "int16": 2.0, "int32": 4.0, "e4m3": 1.0, "e5m2": 1.0}
#: What lives in a step, as :class:`Peak` splits it.
KINDS = ("saved", "weight_casts", "gradients", "backward")


def _bytes(operator: Operator, slot: int, width: float | None = None) -> float:
    return prod(operator.out_shapes[slot] or (1,)) * (width or _BYTES.get(operator.out_dtypes[slot], 8.0))


#: A tensor: position of the operator that filled its memory, and which of that operator's results it is.
Place = tuple[int, int]
#: Memory that the step did not make: of a parameter, a buffer or the batch.
_OUTSIDE: Place = (-1, 0)


@dataclass(frozen=True)
class Lifetimes:
    """When the tensors of a recorded step are read, which no policy changes.

    Attributes:
        base: of each operator, whose memory its first result is: its own, if it is not a view.
        direct: the last operator that reads a tensor as it is.
        unpacked: the operators of the backward pass that read a tensor as autograd saved it.
        lasting: tensors that are the gradients of parameters.
        last_of: weight -> the last operator of its layer.
        begin: the first operator of the backward pass.
        stopped: first operator of a layer's backward -> its product on what was made again. torch ends a block that
            runs again once all is there that backward needs, and the record has no product of its last layer.
    """

    report: GraphReport
    base: list[Place]
    direct: dict[Place, int]
    unpacked: dict[Place, list[int]]
    lasting: frozenset[Place]
    last_of: dict[str, int]
    begin: int
    stopped: dict[int, Operator]

    @classmethod
    def of(cls, report: GraphReport) -> Lifetimes:
        """Follow every tensor of a recorded step from the operator that makes it to the last one that reads it."""
        rows = report.operators
        base: list[Place] = [(index, 0) for index in range(len(rows))]
        direct, unpacked, lasting, last_of = {}, defaultdict(list), set(), {}
        detached = [0] * len(rows)  # how many times in a row
        for index, row in enumerate(rows):
            if row.weight:
                last_of[row.weight] = index
            for number, (source, shape, dtype) in enumerate(zip(row.sources, row.shapes, row.dtypes, strict=False)):
                if source < 0 or base[source] == _OUTSIDE:
                    if number == 0 and _is_view(row):
                        base[index] = _OUTSIDE
                    continue
                at = base[source]
                if at == (source, 0):
                    alike = _alike(rows[source], shape, dtype)
                    at = (source, next((slot for slot in alike if (source, slot) not in lasting), alike[0]))
                # autograd detaches what it hands out, and in a block that runs again what it takes in, too
                before = rows[at[0]].phase == "forward"
                handed = detached[source] > (0 if before else 1)
                if handed or (row.phase == "backward" and (before or (at[1] and rows[at[0]].phase == "recompute"))):
                    unpacked[at].append(index)
                elif row.op != "aten::detach":
                    direct[at] = index
                if row.module == "<accumulate>" and _is_view(row) and row.op == "aten::detach":
                    lasting.add(at)  # else it is added to a gradient that is there already
                if number == 0 and _is_view(row):
                    base[index] = at
                    detached[index] = detached[source] + (row.op == "aten::detach" and row.phase != "forward")
            if row.op == "aten::mul" and row.phase == "backward":  # what pow's backward reads and makes lives as long
                for power in _before(rows, "aten::pow", _before(rows, "aten::mul", [index])):
                    direct[power, 0] = index
                    for at in (base[source] for source in rows[power].sources if source >= 0):
                        unpacked[at] += [index] * (at in unpacked)
        begin = next((i for i, row in enumerate(rows) if row.phase == "backward"), len(rows))
        stopped = _stopped(report, base)
        return cls(report, base, direct, dict(unpacked), frozenset(lasting), last_of, begin, stopped)

    @property
    def end(self) -> int:
        """The number of operators: what lives to the end of the step dies there."""
        return len(self.report.operators)

    @cached_property
    def held(self) -> float:
        """Bytes that were alive when backward began beyond those that it reads: logits that have a name.

        Of several micro-batches all but the first begin theirs with the gradients that are there by then.
        """
        alive, rows = timeline(self, Setting()), self.report.operators
        begins = [k for k in range(1, len(rows)) if (rows[k - 1].phase, rows[k].phase) == ("forward", "backward")]
        known = alive["saved"][self.begin]
        if len(begins) > 1:
            known = max(alive["saved"][k] + alive["gradients"][k] for k in begins)
        return max(0.0, self.report.memory.get("live_at_backward", 0) - known)

    def released(self, place: Place, *, saved: bool = True) -> int:
        """Return the operator after which a tensor is released."""
        late = self.unpacked.get(place, ()) if saved else ()
        return max(self.direct.get(place, place[0]), *late, place[0])

    def copy_released(self, copy: Copy) -> int:
        """Return the operator after which a copy is released: the backward of its layer, or of whatever reads it."""
        readers = self.unpacked.get(self.base[copy.source], []) if copy.source >= 0 else []
        if copy.weight:
            own = [i for i in readers if self.report.operators[i].weight == copy.weight]
            return max(own, default=self.last_of.get(copy.weight, self.end - 1))
        return max(readers, default=max(copy.at, self.begin))


def _stopped(report: GraphReport, base: list[Place]) -> dict[int, Operator]:
    rows, again = report.operators, {row.module for row in report.operators if row.phase == "recompute"}
    products = {r.weight: r for r in rows if r.phase == "forward" and r.cls == "gemm" and r.module in again}
    for row in rows:
        if row.phase == "recompute" and row.cls == "gemm":
            products.pop(row.weight, None)
    first: dict[str, int] = {}
    out = {}
    for index, row in enumerate(rows):
        if row.phase == "backward" and row.weight in products:
            at = first.setdefault(row.weight, index)
            made = [s for s in row.sources if s >= 0 and rows[base[s][0]].phase != "forward" and s != base[s][0]]
            for source in made if row.role == "wgrad" else ():
                place, shape = base[source][0], rows[source].out_shapes[0]
                if rows[source].op == "aten::detach":
                    product = products[row.weight]
                    out[at] = replace(product, sources=(place,), shapes=(shape,), dtypes=rows[source].out_dtypes)
    return out


def _before(rows: Sequence[Operator], name: str, indices: Sequence[int]) -> list[int]:
    """Return the operators of a name that make what some others read."""
    return [source for index in indices for source in rows[index].sources if source >= 0 and rows[source].op == name]


def _alike(made: Operator, shape: tuple[int, ...], dtype: str) -> list[int]:
    """Return which of an operator's results may be the one that is read: those of that shape and dtype."""
    alike = zip(made.out_shapes, made.out_dtypes, strict=False)
    return [slot for slot, found in enumerate(alike) if found == (shape, dtype)] or [0]


def _is_view(row: Operator) -> bool:
    return row.cls == "view" or (row.op.endswith("_") and not row.op.endswith("__"))


#: Bytes alive at each operator by kind: of the scaled model, but for gradients and casts of weights.
Timeline = Mapping[str, list[float]]


class _Events:
    """Adds up intervals in which something is alive.

    Args:
        grow: see :func:`timeline`.
        begin: where the backward pass begins: what lives until then does so in every block.
    """

    def __init__(self, length: int, grow: Sequence[tuple[float, float]] | None, begin: int) -> None:
        self.changes = {kind: [0.0] * (length + 2) for kind in KINDS}
        self._grow, self._begin = grow, begin

    def add(self, kind: str, size: float, begin: int, end: int) -> None:
        row = self.changes[kind]
        if self._grow is not None and kind in ("saved", "backward"):
            larger, more = self._grow[begin]
            size *= larger * (more if begin < self._begin <= end else 1.0)
        row[begin] += size
        row[end + 1] -= size

    def timeline(self) -> Timeline:
        return {kind: list(accumulate(row))[:-1] for kind, row in self.changes.items()}


def timeline(
    lifetimes: Lifetimes, setting: Setting, grow: Sequence[tuple[float, float]] | None = None, held: float = 0.0
) -> Timeline:
    """Return what is alive during a step under a policy, beside parameters, buffers and optimizer state.

    Gradients of parameters that the record does not show being made are there all the time.

    Args:
        grow: of each operator, how many times as large its result is in the model that is asked for, and how many.
        held: bytes that the script holds through the backward pass although no operator reads them.
    """
    report = lifetimes.report
    walk = walked(report, setting)
    events = _Events(lifetimes.end, grow, lifetimes.begin)
    for index, row in enumerate(report.operators):
        if not row.out_shapes or row.module == "<accumulate>":
            continue
        if (product := lifetimes.stopped.get(index)) is not None and (layer := walk.layer(product)) is not None:
            walk.at = index
            walk.cast_weights.discard(layer.weight)
            linear(walk, product, layer)
        if row.phase == "recompute" or (row.phase == "backward" and (index, 0) in lifetimes.unpacked):
            walk.cast_weights.discard(row.weight)
            forward(walk, index, row)
            if (index, 0) in lifetimes.unpacked and (result := walk.made.get(index)) is not None:
                result.saved = _bytes(row, 0)
        elif row.phase != "forward" and lifetimes.base[index] != _OUTSIDE:
            walk.made[index] = gradient(walk, lifetimes, index, row)
        needed = (0.0, 0.0)
        if "mkldnn_rnn_layer" in row.op:
            needed = _recurrent_workspace(walk, row)
        elif (layer := walk.layer(row)) is not None and index in walk.made:
            needed = _workspace(walk, index, row, layer)
        for kind, size in zip(("backward", "weight_casts"), needed, strict=True):
            events.add(kind, size, index, index)
    for index, row in enumerate(report.operators):  # what is kept of a result, its last reader says
        if lifetimes.base[index] == (index, 0) and row.module != "<accumulate>":
            for slot in range(len(row.out_shapes)):
                _live(walk, lifetimes, events, index, slot)
    for copy in walk.copies:
        events.add("weight_casts" if copy.cast else "saved", copy.size, copy.at, lifetimes.copy_released(copy))
    if held:
        events.add("saved", held, lifetimes.begin - 1, lifetimes.end)
    events.add("gradients", report.memory.get("gradients_in_forward", 0), 0, lifetimes.begin - 1)
    made = sum(_bytes(report.operators[index], slot) for index, slot in lifetimes.lasting)
    events.add("gradients", max(0.0, report.memory.get("gradients", 0) - made), 0, lifetimes.end)
    return events.timeline()


def gradient(walk: Walk, lifetimes: Lifetimes, index: int, row: Operator) -> Value:
    """Return what an operator of the backward pass makes: as wide as what it reads, unless it says otherwise.

    Args:
        walk: what the forward pass made.
        lifetimes: of the step's tensors.
        index: of the operator in the report.
        row: the operator.
    """
    script = _BYTES.get(row.out_dtypes[0], 8.0)
    if lifetimes.base[index] != (index, 0) and row.sources and (made := walk.made.get(row.sources[0])) is not None:
        return made
    layer, width = walk.layer(row), script
    if row.out_dtypes[0] in FLOAT_BYTES and (index, 0) not in lifetimes.lasting and walk.low and "_rnn" not in row.op:
        reads = [read.value.width for read in walk.reads(row) if read.value is not None and read.dtype in FLOAT_BYTES]
        width = max(reads, default=script)
        if layer is not None and row.role == "dgrad":
            width = walk.inputs.get(layer.name, script)
        elif layer is not None and row.role == "wgrad":
            width = script
    return Value(script, width)


def _live(walk: Walk, lifetimes: Lifetimes, events: _Events, index: int, slot: int) -> None:
    """Add one result of an operator, from where it is made to where it is released."""
    row, place, kind = lifetimes.report.operators[index], (index, slot), "backward"
    made = walk.made.get(index)
    width = None if made is None or row.out_dtypes[slot] not in FLOAT_BYTES else made.width
    if row.out_dtypes[slot] == "uint8" and walk.narrowed(row):
        width = NARROW_STATES
    if place not in lifetimes.direct and place not in lifetimes.unpacked and row.out_shapes[slot] == row.out_shapes[0]:
        place = (index, 0)  # which of several alike is read, the record does not say
    saved = True
    if row.phase in ("forward", "recompute"):
        kind = "saved" if row.phase == "forward" else kind
        if slot and row.phase == "forward":
            return  # the walk counts what is saved of it as a copy
        saved = made is None or made.kept or not made.asked
    elif place in lifetimes.lasting:
        events.add("gradients", _bytes(row, slot), index, lifetimes.end)
        return
    elif row.role == "wgrad":  # of the weight's size: about to be added to a gradient, or cast to its dtype
        kind = "weight_casts"
    events.add(kind, _bytes(row, slot, width), index, lifetimes.released(place, saved=saved))


def _workspace(walk: Walk, index: int, row: Operator, layer: Layer) -> tuple[float, float]:
    """Return the bytes that a layer's product needs while it runs: codes, casts, and sums before they are narrowed.

    Those that grow with the batch, and those that have the size of the weight.
    """
    gemm = next((g for g in layer.gemms if g.role == "fprop"), layer.gemms[0])
    plan = walk.plans.get(layer.name, KEPT)
    made = walk.made[index].width
    result = prod(row.out_shapes[0] or (1,))
    inputs, weights, outputs = gemm.m * gemm.k, gemm.k * gemm.n, gemm.m * gemm.n
    if layer.kind == "conv":
        return _conv_workspace(walk, row, made), 0.0
    role = row.role if row.role in ("dgrad", "wgrad") else "fprop"
    recipe = {"fprop": plan.fprop, "dgrad": plan.dgrad, "wgrad": plan.wgrad}[role]
    kept = any(copy.at == index and not copy.cast for copy in walk.copies[-2:])
    if recipe is None or not recipe.scaled:
        low = walk.low if recipe is None else FLOAT_BYTES.get(recipe.format, 4.0)
        if not low or low >= 4.0:
            return 0.0, 0.0
        read = outputs if role != "fprop" else 0 if kept else inputs
        own, other = (weights * (made != low), 0.0) if role == "wgrad" else (0.0, result * (made != low))
        return low * (read + other), low * (weights * (role == "fprop") + own)
    tokens, sums = float(gemm.m), 0.0 if walk.gpu or made >= 4.0 else 4.0 * result
    if row.op == "aten::addmm":  # a bias in float32 is added to a float32 copy, whose sum is narrowed
        sums *= 2.0
    if role == "fprop":
        codes = 0.0 if kept else codes_bytes(recipe, inputs, tokens)
        return sums + codes, codes_bytes(recipe, weights, 128.0)
    both = 1 if recipe.scaling is not None and recipe.scaling.granularity == "tensor" else 2
    codes = both * codes_bytes(recipe, outputs, tokens)
    return (codes, sums) if role == "wgrad" else (sums + codes, codes_bytes(recipe, weights, 128.0))


def _recurrent_workspace(walk: Walk, row: Operator) -> tuple[float, float]:
    """Return what oneDNN needs while an LSTM or GRU runs: what grows with the batch, and what has the weights' size.

    In float32 the sums of all gates of all time steps. Both weights in another order, in the backward pass their
    gradients as well, which are float32, as is the gradient of the output.
    """
    x, inputs, states = row.shapes[:3]
    width, weights = walk.recurrent(row), prod(inputs) + prod(states)
    gates = 4.0 * prod(x[:-1]) * inputs[0] if width >= 4.0 else 0.0
    if row.phase != "backward":
        return gates, width * weights
    return gates + 4.0 * prod(row.out_shapes[0]), (4.0 + (width if width < 4.0 else 0.0)) * weights


def _conv_workspace(walk: Walk, row: Operator, width: float) -> float:
    """Return what a convolution needs while it runs backward: on a CPU oneDNN reorders both of its operands."""
    if walk.gpu or row.phase != "backward" or len(row.shapes) < 2:
        return 0.0
    return width * sum(prod(shape) for shape in row.shapes[:2])
