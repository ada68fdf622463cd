"""Layers: the weighted GEMMs of a step collected by the module (or parameter) a policy would name."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from autoprec.applying.units import why_not_a_weight
from autoprec.graph.analysis.flops import RECURRENT, Gemm, recurrent_gemms
from autoprec.graph.analysis.linking import VECTOR_PRODUCTS, Links, Product
from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.report import GemmCall, Layer
from autoprec.graph.trace import SCRIPT, Call, Trace

#: In what order the products of one layer are told.
_ORDER = {"fprop": 0, "dgrad": 1, "wgrad": 2, "recompute": 3}


@dataclass(slots=True)
class LayerRecord:
    """A layer while it is being put together; ``inputs`` are the value indices its forward GEMMs read."""

    name: str
    weight: str
    kind: str
    module: str
    products: list[Product] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    fused: list[GemmCall] = field(default_factory=list)
    order: int = 0


_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def _kind(names: ModelNames, name: str, weight: str, executing: str) -> str:
    module = names.modules.get(name)
    caller = names.modules.get(executing)
    parameter = names.parameters.get(weight)
    if isinstance(module, _RECURRENT) or isinstance(caller, _RECURRENT):
        return "rnn"
    if isinstance(module, nn.MultiheadAttention) or isinstance(caller, nn.MultiheadAttention):
        return "attention_projection"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    if parameter is not None and parameter.dim() == 3:
        return "expert"
    return "functional"


def _layer_name(names: ModelNames, product: Product) -> tuple[str, str]:
    """Return a layer's name and the module that ran it: the running module if the weight is its own, else the owner."""
    running = product.layer_module
    own = names.own_parameter(running, product.weight)
    module = names.modules.get(running)
    prefix = f"{running}." if running else ""
    computed = module is not None and (not own or module._parameters.get("weight") is None)
    if computed and module is not None and _is_weighted(module) and product.weight.startswith(prefix):
        return running, running  # weight norm, spectral norm, pruning, adapters
    path = own or product.weight
    owner, _, attribute = path.rpartition(".")
    if isinstance(names.modules.get(owner), _RECURRENT):
        return owner, running
    of_module = attribute == "weight" and (owner or _is_weighted(names.root))
    return (owner if of_module else path), running


def collect(trace: Trace, names: ModelNames, links: Links) -> dict[str, LayerRecord]:
    """Gather the weighted products of a step by layer, in the order of their first forward call.

    Args:
        trace: the recorded step.
        names: modules and parameters of the model.
        links: what belongs together in the trace.
    """
    records: dict[str, LayerRecord] = {}
    for product in links.products:
        if not product.weight or _computes_weight(product.layer_call, links):
            continue
        name, running = _layer_name(names, product)
        record = records.get(name)
        if record is None:
            kind = _kind(names, name, product.weight, running)
            record = LayerRecord(name, product.weight, kind, running, order=len(records))
            records[name] = record
        record.products.append(product)
        if product.role == "fprop":
            is_b = links.parameter_of[product.gemm.b] == product.weight
            record.inputs.append(product.gemm.a if is_b else product.gemm.b)
            record.outputs.extend(product.call.outs[:1])
            if product.call.name == "_grouped_mm" and len(trace.values[product.gemm.a].shape) == 2:
                record.flags.add("grouped")
    _recurrent(trace, links, records)
    for name, module in names.modules.items():
        if name not in records and _is_weighted(module):
            weight = names.canonical(f"{name}.weight" if name else "weight")
            records[name] = LayerRecord(name, weight, _kind(names, name, weight, name), name, order=len(records))
            records[name].flags |= set() if trace.calls_of.get(name) else {"never_called"}
    return records


def _computes_weight(call: Call, links: Links) -> bool:
    """Say whether a product is part of how a weight is computed: spectral norm's power iteration."""
    return call.name in VECTOR_PRODUCTS and all(links.parameter_of[i] or links.constant[i] for i in call.ins)


def _is_weighted(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D"


def _recurrent(trace: Trace, links: Links, records: dict[str, LayerRecord]) -> None:
    """Give the module of fused recurrent kernels a layer, with the products that run inside them."""
    for call in trace.calls:
        if call.name not in RECURRENT:
            continue
        module = links.modules[call.index]
        if module not in records:
            weights = [links.parameter_of[i] for i in call.ins if links.parameter_of[i]]
            weight = weights[0] if weights else ""
            records[module] = LayerRecord(module, weight, "rnn", module, order=len(records))
        record = records[module]
        for m, k, n, calls in recurrent_gemms(trace, call):
            if call.phase == "backward":
                record.fused += [GemmCall("dgrad", m, n, k, calls), GemmCall("wgrad", n, m, k, calls)]
            else:
                record.fused.append(GemmCall("fprop" if call.phase == "forward" else call.phase, m, k, n, calls))
        if call.phase == "forward":
            record.inputs.append(call.ins[0])
            record.outputs.extend(call.outs[:1])


def mark_positions(trace: Trace, names: ModelNames, links: Links, records: dict[str, LayerRecord]) -> None:
    """Flag layers by position (first, head, tied, frozen, router, narrow), and where backward is differentiated.

    Args:
        trace: the recorded step.
        names: modules and parameters of the model.
        links: what belongs together in the trace.
        records: layers by name; receive their flags.
    """
    forward = [r for r in records.values() if r.outputs]
    if forward:
        min(forward, key=lambda r: trace.values[r.outputs[0]].producer).flags.add("first")
        makers = {r.name: trace.producer(r.outputs[-1]) for r in forward}
        last = [r for r in forward if (call := makers[r.name]) is not None and call.phase == "forward"] or forward
        max(last, key=lambda r: trace.values[r.outputs[-1]].producer).flags.add("head")
    for record in records.values():
        if names.canonical(record.weight) in names.tied:
            record.flags.add("tied")
        parameter = names.parameters.get(record.weight)
        if parameter is not None and not parameter.requires_grad:
            record.flags.add("frozen")
        if any(_differentiated(product) for product in record.products):
            record.flags.add("double_backward")
        if "head" in record.flags or not record.outputs:
            continue
        if _feeds_router(trace, links, record):
            record.flags.add("router")
        elif _feeds_choice(trace, links, record):
            record.flags.add("narrow")


def mark_output(trace: Trace, links: Links, records: dict[str, LayerRecord], part_of: Collection[int]) -> set[int]:
    """Give the class ``output`` to what is done to the logits before the loss reads them; return the head's products.

    Casts, soft caps and masks count; operators that are part of a hand-written one (``part_of``) keep their class.

    Args:
        trace: the recorded step.
        links: what belongs together in the trace; receives the class ``output``.
        records: layers by name.
        part_of: indices of calls that belong to a pattern.
    """
    products: set[int] = set()
    for record in (r for r in records.values() if "head" in r.flags and r.outputs):
        logits = trace.values[record.outputs[-1]]
        products.add(logits.producer)
        size = prod(logits.shape)

        def follows(call: Call, size: int = size) -> bool:
            same = bool(call.outs) and prod(trace.values[call.outs[0]].shape) == size
            own = same and call.phase == "forward" and call.index not in part_of
            return own and links.classes[call.index] in ("view", "cast", "pointwise")

        for call in [call for call, _ in trace.below(record.outputs[-1], follows, depth=8) if follows(call)]:
            if links.classes[call.index] != "view":
                links.classes[call.index] = "output"
    return products


def _differentiated(product: Product) -> bool:
    """Say whether a product is part of a backward that is differentiated in turn, and not of a recomputed forward."""
    call = product.call
    return call.differentiable and call.node.lower().startswith(product.layer_call.name.lower())


def _feeds_router(trace: Trace, links: Links, record: LayerRecord) -> bool:
    """Say whether a layer's outputs, as wide as they are, reach the choice of the largest in the model."""
    through = ("view", "cast", "softmax", "pointwise", "allocation", "transcendental")

    def inside(call: Call) -> bool:
        return call.phase == "forward" and call.module != SCRIPT

    def passes(call: Call) -> bool:
        width = trace.values[call.outs[0]].shape[-1:] if call.outs else ()
        same = width == trace.values[record.outputs[0]].shape[-1:]
        return same and inside(call) and links.classes[call.index] in through

    chooses = ("topk", "sort", "argsort", "kthvalue", "one_hot")
    found = (call for call, _ in trace.below(record.outputs[0], passes, depth=8) if inside(call))
    return any(links.classes[call.index] == "router" and call.name in chooses for call in found)


def _feeds_choice(trace: Trace, links: Links, record: LayerRecord) -> bool:
    """Say whether a layer's outputs are the logits of experts (fewer than its inputs) or of classes.

    They go through a softmax, or into the loss, as many as they are: their number does not grow with the model.
    """
    if not record.inputs:
        return False
    count, inputs = (trace.values[value].shape[-1:] for value in (record.outputs[0], record.inputs[0]))

    def passes(call: Call) -> bool:
        return call.phase == "forward" and links.classes[call.index] in ("view", "cast", "pointwise")

    for call, read in trace.below(record.outputs[0], passes, depth=4):
        if call.phase == "forward" and trace.values[read].shape[-1:] == count:
            cls = links.classes[call.index]
            if cls == "loss" or (cls == "softmax" and count < inputs):
                return True
    return False


def _gemm_calls(products: list[Product], fused: list[GemmCall]) -> tuple[GemmCall, ...]:
    fprop = next((p.gemm for p in products if p.role in ("fprop", "recompute")), None)
    counted: dict[tuple[str, int, int, int, int], int] = {}
    for product in products:
        gemm = product.gemm
        if (
            product.role == "wgrad"
            and fprop is not None
            and (gemm.m, gemm.n) == (fprop.k, fprop.n) != (fprop.n, fprop.k)
        ):
            gemm = Gemm(gemm.n, gemm.k, gemm.m, gemm.batch, gemm.a, gemm.b)  # computed transposed: same product
        key = (product.role, gemm.m, gemm.k, gemm.n, gemm.batch)
        counted[key] = counted.get(key, 0) + 1
    for row in fused:
        key = (row.role, row.m, row.k, row.n, row.batch)
        counted[key] = counted.get(key, 0) + row.calls
    rows = [GemmCall(role, m, k, n, calls, batch) for (role, m, k, n, batch), calls in counted.items()]
    return tuple(sorted(rows, key=lambda row: _ORDER.get(row.role, 9)))


_SEEN_BY_FUNCTIONS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm")


def _outside(record: LayerRecord, names: ModelNames) -> str:
    """Return why no policy reaches a weight that no layer module runs."""
    owner, _, attribute = record.weight.rpartition(".")
    parameter = names.parameters.get(record.weight)
    if isinstance(names.modules.get(owner), torch.jit.ScriptModule):
        return "inside TorchScript, whose compiled code no policy reaches"
    if parameter is not None and parameter.is_complex():
        return why_not_a_weight(attribute, parameter)
    if record.kind == "attention_projection":
        return "its weight is used inside nn.MultiheadAttention, not through a layer of its own"
    if record.kind == "rnn":
        return "a recurrent layer with a forward of its own: bf16 comes through activations"
    if record.kind == "conv":
        return "a convolution with a forward of its own: follows activations"
    if parameter is not None and (why := why_not_a_weight(attribute, parameter)):
        return f"{why}: follows activations"
    return "its weight is used outside a linear or convolution module: follows activations"


#: What a weight may go through on its way to the product, and still be known for that weight where a policy runs it.
_SAME = frozenset({"view", "cast"})


def _changed(trace: Trace, links: Links, product: Product) -> str:
    """Return the operator that computes what is multiplied out of the weight, empty where it is the weight itself."""
    gemm = product.gemm
    value = gemm.b if links.parameter_of[gemm.b] == product.weight else gemm.a
    while (call := trace.producer(value)) is not None and call.ins:
        if links.classes[call.index] not in _SAME and call.name not in ("clone", "contiguous"):
            return call.name
        value = call.ins[0]
    return ""


def _hidden(record: LayerRecord, trace: Trace, links: Links) -> str:
    """Return why the GEMMs of a raw weight cannot be replaced; empty when they can."""
    owner = record.name.rpartition(".")[0] if record.weight == record.name else record.name
    for product in record.products:
        call = product.call
        if product.role == "fprop":
            if call.function == "einsum":
                return "an einsum that is not a plain matrix product: follows activations"
            if call.name not in _SEEN_BY_FUNCTIONS:
                return f"multiplied by {call.name}: no replacement, follows activations"
            if changed := _changed(trace, links, product):
                return f"computed by the module ({changed}) before it multiplies by it: follows activations"
            if record.module != owner and not record.module.startswith(f"{owner}." if owner else ""):
                return "multiplied outside the module that holds it: follows activations"
        elif call.node and not _BUILTIN_NODE.match(call.node):
            return "multiplied inside a custom autograd function: follows activations"
    return ""


_BUILTIN_NODE = re.compile(r"(Mm|Addmm|Bmm|Baddbmm|Linear|Matmul|GroupedMm|Checkpoint\w*)Backward\d*$")


def _used_by(record: LayerRecord) -> str:
    """Return why a layer whose own forward did not run cannot be decided: who multiplies by its weight, and how."""
    forward = next((p for p in record.products if p.role == "fprop"), None)
    how = f" ({forward.call.name})" if forward is not None else ""
    who = record.module or "the root module"
    return f"its module's forward is not called: {who} multiplies by its weight{how}, which follows activations"


def _verdict(
    record: LayerRecord, names: ModelNames, applicable: dict[str, str], trace: Trace, links: Links
) -> tuple[bool, str]:
    kind = applicable.get(record.name, "")
    if "never_called" in record.flags:
        return False, "never called in the recorded step"
    if not record.products and not record.fused:
        return False, "its weight is computed in a way that is not followed: follows activations"
    if not kind:
        return False, _outside(record, names)
    if "router" in record.flags:
        return False, "chooses the experts (feeds a top-k): kept as the script wrote it"
    frozen = "; frozen, so it has no wgrad" if "frozen" in record.flags else ""
    if kind == "functional":
        hidden = _hidden(record, trace, links)
        return not hidden, hidden or f"a raw weight multiplied by a function its module calls{frozen}"
    if kind == "attention":
        return True, f"projection of nn.MultiheadAttention{frozen}"
    if record.module != record.name or not trace.calls_of.get(record.name):
        return False, _used_by(record)
    if kind == "recurrent":
        return True, "recurrent layer: one dtype for all its gates, bf16 or fp16; no library trains it in 8 bits"
    if kind == "conv":
        return True, "convolution: bf16 or fp16; no library trains it in 8 bits"
    return True, f"matrix product with a weight of its own{frozen}"


def build_layers(
    trace: Trace,
    names: ModelNames,
    links: Links,
    records: dict[str, LayerRecord],
    groups: dict[str, tuple[str, ...]],
) -> tuple[Layer, ...]:
    """Turn records into the layers of the report, in model order.

    Args:
        trace: the recorded step.
        names: modules and parameters of the model.
        links: what belongs together in the trace.
        records: layers by name.
        groups: name -> layers that must move together.
    """
    applicable = names.applicable()
    group_of = {member: group for group, members in groups.items() for member in members}
    position = {name: index for index, name in enumerate(names.modules)}
    ordered = sorted(records.values(), key=lambda r: (_position(position, r.name), r.order))
    out = []
    for record in ordered:
        gemms = _gemm_calls(record.products, record.fused)
        flops: dict[str, int] = {}
        for gemm in gemms:
            flops[gemm.role] = flops.get(gemm.role, 0) + gemm.flops
        tunable, reason = _verdict(record, names, applicable, trace, links)
        group = group_of.get(record.name, record.name)
        called = [m for m in groups.get(group, ()) if "never_called" not in records[m].flags]
        if "never_called" in record.flags and called and record.name in applicable:
            tunable, reason = True, "not called in the recorded step; moves with its group"
        parameter = names.parameters.get(record.weight)
        module = names.modules.get(record.name)
        out.append(
            Layer(
                name=record.name,
                type=type(module).__name__ if module is not None else type(parameter).__name__,
                kind=record.kind,
                weight=record.weight,
                group=group,
                gemms=gemms,
                parameters=int(parameter.numel()) if parameter is not None else 0,
                tunable=tunable,
                reason=reason,
                flags=tuple(sorted({*record.flags, *_number_flag(parameter)})),
                flops=flops,
                dtype=trace.values[record.inputs[0]].dtype if record.inputs else "",
                where=names.defined_at(record.name),
            )
        )
    return tuple(out)


def _number_flag(parameter: nn.Parameter | None) -> tuple[str, ...]:
    return ("complex",) if parameter is not None and parameter.is_complex() else ()


def _position(position: dict[str, int], name: str) -> int:
    while name not in position:
        if "." not in name:
            return position.get("", 0)
        name = name.rpartition(".")[0]
    return position[name]
