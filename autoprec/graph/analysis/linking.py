"""Who is who in a trace: which parameter a tensor comes from, which forward call a backward call belongs to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import takewhile

from autoprec.graph.analysis.flops import Gemm, conv_gemm, gemm_of
from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.analysis.rules import Rules
from autoprec.graph.trace import BETWEEN, FORWARD_PHASES, OTHER_MODEL, Call, Trace

#: Classes whose result is still "the parameter, in another form" when every input is: casts, transposes, scalings.
_CARRIES = frozenset({"view", "cast", "pointwise", "reduction", "transcendental", "allocation", "norm"})
#: Classes that only move or cast a tensor.
MOVES = frozenset({"view", "cast", "allocation"})
_PRODUCTS = ("gemm", "conv", "attention")
#: Products with a vector: of a weight and a buffer they are what spectral norm divides the weight by.
VECTOR_PRODUCTS = ("mv", "dot", "vdot")


@dataclass(frozen=True, slots=True)
class Product:
    """One GEMM of the step: its call, matrix shape, weight (a parameter's first name, or empty) and role.

    ``layer_call`` is the forward call whose layer this product belongs to: the call itself in the forward pass. A
    product of a second backward pass (a gradient penalty) belongs to the layer whose gradient it differentiates.
    """

    call: Call
    gemm: Gemm
    weight: str
    role: str
    layer_call: Call
    layer_module: str


@dataclass(slots=True)
class Links:
    """What :func:`link` found out."""

    classes: list[str]
    parameter_of: list[str]
    forward_of: dict[int, Call] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    unmatched: list[Call] = field(default_factory=list)
    modules: dict[int, str] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    constant: list[bool] = field(default_factory=list)

    def source(self, trace: Trace, value: int, also: Collection[str] = ()) -> tuple[int, bool]:
        """Walk up through moves, casts and the operators ``also``; say whether one of those was passed.

        Args:
            trace: the recorded step.
            value: index of the tensor to begin with.
            also: names of further operators that are passed.
        """
        passed = False
        for _ in range(16):
            call = trace.producer(value)
            if call is None or not call.ins:
                break
            if self.classes[call.index] not in MOVES:
                if call.name not in also:
                    break
                passed = True
            value = call.ins[0]
        return value, passed

    def other_model(self, gemm: Gemm) -> bool:
        """Say whether a factor of a product belongs to a model that is not recorded (a teacher, a frozen encoder)."""
        return bool(self.foreign[gemm.a] or self.foreign[gemm.b])


def classify(call: Call, rules: Rules) -> str:
    """Return the class of a call by rules, then by the tags its operator carries; ``opaque`` when nobody knows."""
    found = rules.class_of(call.op)
    if found is not None:
        return found
    tags = {str(tag).rpartition(".")[2] for tag in getattr(call.func, "tags", ())}
    if "pointwise" in tags:
        return "pointwise"
    if "reduction" in tags:
        return "reduction"
    return "view" if getattr(call.func, "is_view", False) else "opaque"


def _parameters(trace: Trace, classes: list[str], origin: str = "parameter") -> tuple[list[str], list[bool]]:
    """Return, per value, the parameter it is a form of, and whether it is a constant: of buffers and numbers alone.

    A form of a parameter is what was made of parameters and constants alone. ``origin`` may be ``foreign``: what is a
    form of another model's parameter has that as its name.
    """
    out = [value.name or origin if value.origin == origin else "" for value in trace.values]
    constant = [v.origin == "buffer" or (v.origin == "input" and v.shape == ()) for v in trace.values]
    for call in trace.calls:
        if classes[call.index] not in _CARRIES and call.name not in VECTOR_PRODUCTS:
            continue
        ins = call.ins[1:] if call.name == "copy" and len(call.ins) > 1 else call.ins
        named = [i for i in ins if out[i]]
        if named and all(out[i] or constant[i] for i in ins):
            largest = max(named, key=lambda i: trace.values[i].bytes)
            for value in call.outs:
                out[value] = out[largest]
        elif not named and all(constant[i] for i in ins):
            for value in call.outs:
                constant[value] = True
    return out, constant


def _forward_table(trace: Trace) -> dict[tuple[int, int], list[Call]]:
    table: dict[tuple[int, int], list[Call]] = {}
    for call in trace.in_phase(*FORWARD_PHASES):
        table.setdefault((call.task, call.seq), []).append(call)
    return table


def _candidates(trace: Trace, table: dict[tuple[int, int], list[Call]], task: int, seq: int) -> list[Call]:
    if seq < 0:
        return []
    seen = set()
    while task not in seen:  # nested graph tasks (reentrant checkpointing) look into the task they ran in first
        seen.add(task)
        task = trace.parents.get(task, -1)
        found = table.get((task, seq))
        if found:
            return found
    return []


def _between(trace: Trace, table: dict[tuple[int, int], list[Call]]) -> dict[int, str]:
    """Return the module of calls that ran again between modules: the innermost around all that ran again with them."""
    runs: dict[tuple[int, int], list[Call]] = {}
    for call in trace.in_phase("recompute"):
        runs.setdefault((call.task, call.within), []).append(call)
    out: dict[int, str] = {}
    for (task, within), calls in runs.items():
        entered = {call.module for call in calls} - {BETWEEN}
        needs = {call.module for call in _candidates(trace, table, task, within)[:1]} - {BETWEEN}
        columns = zip(*(name.split(".") for name in entered | needs), strict=False)
        name = ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))
        while name in entered and name:
            name = name.rpartition(".")[0]
        out |= {call.index: name for call in calls if call.module == BETWEEN}
    return out


def _differentiated(trace: Trace) -> dict[int, list[Call]]:
    """Return the calls of backward passes that may be differentiated in turn, by the node that each has made."""
    made: dict[int, list[Call]] = {}
    for call in trace.calls:
        if call.made >= 0:
            made.setdefault(call.made, []).append(call)
    return made


def _forward_weight(names: ModelNames, parameters: list[str], call: Call, gemm: Gemm) -> str:
    options = [name for name in (parameters[gemm.b], parameters[gemm.a]) if name]
    own = [name for name in options if names.own_parameter(call.module, name)]
    return (own or options or [""])[0]


def _pick(candidates: list[Product], operands: set[str], gemm: Gemm) -> Product | None:
    """Choose the forward product a backward GEMM differentiates: by its weight, else by the shape of the result."""
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    by_weight = [p for p in candidates if p.weight and p.weight in operands]
    if by_weight:
        return by_weight[0]
    shape = {gemm.m, gemm.n}
    by_shape = [p for p in candidates if {p.gemm.k, p.gemm.n} == shape or {p.gemm.m, p.gemm.k} == shape]
    return (by_shape or candidates)[0]


def link(trace: Trace, names: ModelNames, rules: Rules) -> Links:
    """Classify every call, find the parameter behind every tensor and the forward call behind every backward call.

    Args:
        trace: the recorded step.
        names: modules and parameters of the model.
        rules: the class of each operator.
    """
    classes = [classify(call, rules) for call in trace.calls]
    parameter_of, constant = _parameters(trace, classes)
    others = any(value.origin == "foreign" for value in trace.values)
    foreign = _parameters(trace, classes, "foreign")[0] if others else [""] * len(trace.values)
    links = Links(classes, parameter_of, foreign=foreign, constant=constant)
    table = _forward_table(trace)
    between = _between(trace, table)
    twice = _differentiated(trace)
    made: dict[int, Product] = {}
    for call in trace.calls:
        if classes[call.index] == "opaque":
            links.unknown[call.op] = links.unknown.get(call.op, 0) + 1
        if call.phase != "backward":
            links.modules[call.index] = between.get(call.index, call.module)
            _link_forward(trace, names, links, call, made)
            continue
        candidates = _candidates(trace, table, call.task, call.seq)
        candidates = candidates or [c for c in twice.get(call.seq, ()) if c.task != call.task and c.index < call.index]
        if candidates:
            links.forward_of[call.index] = candidates[0]
            links.modules[call.index] = links.modules[candidates[0].index]
        else:
            links.modules[call.index] = "<accumulate>" if "AccumulateGrad" in call.node else "<hooks>"
        product = _link_backward(trace, links, call, [made[c.index] for c in candidates if c.index in made])
        if product is not None:
            made[call.index] = product
    return links


def _link_forward(trace: Trace, names: ModelNames, links: Links, call: Call, made: dict[int, Product]) -> None:
    if links.classes[call.index] not in _PRODUCTS:
        return
    gemm = gemm_of(trace, call) or conv_gemm(trace, call)
    if gemm is None:
        return
    weight = _forward_weight(names, links.parameter_of, call, gemm)
    if not weight and links.classes[call.index] == "gemm":
        links.classes[call.index] = "attention"
        if links.other_model(gemm):
            links.modules[call.index] = OTHER_MODEL
    role = "recompute" if call.phase == "recompute" else "fprop"
    product = Product(call, gemm, weight, role, call, links.modules[call.index])
    made[call.index] = product
    links.products.append(product)


def _link_backward(trace: Trace, links: Links, call: Call, candidates: list[Product]) -> Product | None:
    """Link a matrix product of a backward pass, and return it where it belongs to a forward one."""
    if links.classes[call.index] not in _PRODUCTS:
        return None
    convolution = conv_gemm(trace, call) if call.name.startswith("convolution_backward") else None
    if convolution is not None:
        _link_convolution(links, call, convolution, candidates)
        return None
    gemm = gemm_of(trace, call)
    if gemm is None:
        return None
    operands = {links.parameter_of[gemm.a], links.parameter_of[gemm.b]} - {""}
    forward = _pick(candidates, operands, gemm)
    if forward is None:
        if operands:
            name = sorted(operands)[0]
            links.products.append(Product(call, gemm, name, "dgrad", call, links.modules[call.index]))
        else:
            links.classes[call.index] = "attention"
            if links.other_model(gemm):
                links.modules[call.index] = OTHER_MODEL
            elif call.index not in links.forward_of:  # else: the derivative of an operator that is not a product itself
                links.unmatched.append(call)
        return None
    role = ("dgrad" if forward.weight in operands else "wgrad") if forward.weight else "agrad"
    if role == "agrad":
        links.classes[call.index] = "attention"
    links.modules[call.index] = forward.layer_module
    product = Product(call, gemm, forward.weight, role, forward.layer_call, forward.layer_module)
    links.products.append(product)
    return product


def _link_convolution(links: Links, call: Call, gemm: Gemm, candidates: list[Product]) -> None:
    weight = links.parameter_of[gemm.b]
    forward = _pick(candidates, {weight} - {""}, gemm)
    layer_call = forward.call if forward else call
    module = forward.layer_module if forward else links.modules[call.index]
    weight = (forward.weight if forward else "") or weight
    mask = call.args[-1]
    if mask[0]:
        turned = Gemm(gemm.m, gemm.n, gemm.k, gemm.batch, gemm.a, gemm.b)
        links.products.append(Product(call, turned, weight, "dgrad", layer_call, module))
    if mask[1]:
        turned = Gemm(gemm.n, gemm.m, gemm.k, gemm.batch, gemm.a, gemm.b)
        links.products.append(Product(call, turned, weight, "wgrad", layer_call, module))
