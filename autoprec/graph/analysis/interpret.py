"""From the raw record of a step to the report: classes, layers, groups, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from autoprec.applying.around.gelu import gelus_by_hand
from autoprec.applying.units import clean_name
from autoprec.graph.analysis.flops import RECURRENT, call_flops
from autoprec.graph.analysis.groups import merge, named, sibling_pairs
from autoprec.graph.analysis.layers import build_layers, collect, mark_output, mark_positions
from autoprec.graph.analysis.linking import Links, link
from autoprec.graph.analysis.memory import newton_schulz, step_memory
from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.analysis.patterns import Pattern, find_patterns
from autoprec.graph.analysis.rules import Rules
from autoprec.graph.report import GraphReport, NewtonSchulz, Operator
from autoprec.graph.trace import SCRIPT, Call, Trace
from autoprec.optim.stepping.fused import is_fused, why_not_fused


def _bytes(trace: Trace, call: Call, cls: str) -> int:
    if cls == "view":
        return 0
    return sum(trace.values[i].bytes for i in {*call.ins, *call.outs})


def _roles(trace: Trace, links: Links, patterns: list[Pattern]) -> dict[int, tuple[str, str]]:
    """Return (role, weight) of every product: fprop, dgrad, wgrad, dgrad+wgrad, agrad, scores or values."""
    roles: dict[int, tuple[str, str]] = {}
    for product in links.products:
        role, weight = roles.get(product.call.index, ("", product.weight))
        own = "" if product.role == "fprop" and not product.weight else product.role
        roles[product.call.index] = (f"{role}+{own}" if role else own, weight)
    for call in trace.calls:
        if call.name in RECURRENT:
            weights = [links.parameter_of[i] for i in call.ins if links.parameter_of[i]]
            role = {"forward": "fprop", "recompute": "recompute"}.get(call.phase, "dgrad+wgrad")
            roles[call.index] = (role, weights[0] if weights else "")
    for pattern in patterns:
        if pattern.cls == "attention":
            roles[pattern.calls[0]] = (pattern.kind, "")
    return roles


def _operators(
    trace: Trace, links: Links, rules: Rules, patterns: list[Pattern], heads: Collection[int]
) -> list[Operator]:
    roles = _roles(trace, links, patterns)
    part_of = {index: pattern.kind for pattern in reversed(patterns) for index in pattern.calls}
    rows, saved = [], dict(trace.saved)
    for call in trace.calls:
        cls = links.classes[call.index]
        about = rules.classes[cls]
        role, weight = roles.get(call.index, ("", ""))
        pattern = part_of.get(call.index, "")
        written = f" (part of a hand-written {pattern})" if pattern and cls != "attention" else ""
        inputs, outputs = trace.inputs(call), trace.outputs(call)
        if call.index in heads:
            pattern, written = "output", "; its result is the model's output, kept in fp32 first of all"
        rows.append(
            Operator(
                name=f"{call.name}_{call.index}",
                module=links.modules[call.index],
                op=call.op,
                phase=call.phase,
                cls=cls,
                precision=about.precision,
                reason=about.reason + written,
                shapes=tuple(value.shape for value in inputs),
                dtypes=tuple(value.dtype for value in inputs),
                flops=call_flops(trace, call, cls),
                bytes=_bytes(trace, call, cls),
                weight=weight,
                role=role,
                out_shapes=tuple(value.shape for value in outputs),
                out_dtypes=tuple(value.dtype for value in outputs),
                inputs=tuple(dict.fromkeys(value.producer for value in inputs if value.producer >= 0)),
                pattern=pattern,
                sources=tuple(value.producer for value in inputs),
                out_saved=tuple(saved.pop(value.storage, 0) for value in outputs),
                where=call.where or links.forward_of.get(call.index, call).where,
            )
        )
    return rows


def _batch(trace: Trace, links: Links) -> dict[str, int]:
    """Samples and tokens of one step, and its micro-batches where gradients are accumulated over several."""
    found, calls = _samples(trace, links), trace.calls_of.get("", 0)
    parts = trace.backwards if trace.backwards and calls % trace.backwards == 0 else 1
    return found | ({"micro_batches": parts} if found and parts > 1 else {})


def _samples(trace: Trace, links: Links) -> dict[str, int]:
    """Samples and tokens of one step: from the first look-up of token ids, else from the first tensor of the batch."""
    calls = max(trace.calls_of.get("", 0), 1)
    for call in trace.in_phase("forward"):
        if call.name == "embedding":
            source, _ = links.source(trace, call.ins[-1])
            ids, maker = trace.values[source], trace.producer(source)
            if len(ids.shape) == 2 and (maker is None or maker.module == SCRIPT):
                return {"samples": ids.shape[0] * calls, "tokens": ids.shape[0] * ids.shape[1] * calls}
    for call in trace.in_phase("forward"):
        for value in trace.inputs(call):
            if (
                value.origin == "input"
                and value.shape
                and value.bytes
                and value.dtype in ("fp32", "bf16", "fp16", "fp64")
            ):
                samples = value.shape[0] * calls
                return {"samples": samples, "tokens": samples * (value.shape[1] if len(value.shape) == 3 else 1)}
    return {}


def _notes(trace: Trace, links: Links) -> list[str]:
    notes = list(trace.notes)
    for op, count in links.unknown.items():
        notes.append(f"{op}: {count} calls of an operator without a rule; treated as opaque")
    if links.unmatched:
        notes.append(f"{len(links.unmatched)} backward matrix products could not be mapped to a forward layer")
    if not trace.calls_of.get(""):
        notes.append(
            "the model is not called in this step, only its parts are: layers can change, what surrounds the model's "
            "forward (activations, attention) cannot"
        )
    if not trace.backwards:
        notes.append("no backward pass was recorded")
    if trace.guesses:
        notes.append(f"{trace.guesses} data-dependent values were guessed")
    return notes


def _of_muon(found: tuple[NewtonSchulz, ...]) -> list[str]:
    flops, matrices = sum(one.flops for one in found), sum(one.matrices for one in found)
    said = (
        f"Muon makes the updates of {matrices} matrices orthogonal: {flops / 1e9:.3g} GFLOP a step of Newton-Schulz "
        "iterations beside the step's own, in the dtype that optimizer.products says; its momentum is stored as "
        "optimizer.exp_avg says"
    )
    return [said] if found else []


def interpret(
    trace: Trace, names: ModelNames, rules: Rules, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> GraphReport:
    """Build the report of a recorded step.

    Args:
        trace: the recorded step.
        names: modules and parameters of the model.
        rules: the class of each operator.
        optimizers: of the script: for the bytes of their state, and Muon's products.
    """
    optimizers = tuple(optimizers)
    links = link(trace, names, rules)
    patterns = find_patterns(trace, links)
    records = collect(trace, names, links)
    mark_positions(trace, names, links, records)
    part_of = {index for pattern in patterns for index in pattern.calls}
    operators = _operators(trace, links, rules, patterns, mark_output(trace, links, records, part_of))
    groups = named(merge(list(records), sibling_pairs(trace, names, links, records)))
    layers = build_layers(trace, names, links, records, groups)
    tunable = {layer.name for layer in layers if layer.tunable}
    kept = {name: tuple(m for m in members if m in tunable) for name, members in groups.items()}
    total = sum(operator.flops for operator in operators)
    share = sum(layer.total_flops for layer in layers if layer.tunable) / total if total else 0.0
    orthogonal = newton_schulz(optimizers)
    return GraphReport(
        model=dict(names.identity()),
        layers=layers,
        operators=tuple(operators),
        groups={name: members for name, members in kept.items() if members},
        total_flops=total,
        tunable_flops_share=share,
        batch=_batch(trace, links),
        memory=step_memory(trace, names, optimizers),
        notes=(*_notes(trace, links), *_of_muon(orthogonal)),
        source=trace.source,
        root_called=bool(trace.calls_of.get("")),
        held=names.held(),
        newton_schulz=orthogonal,
        fused_update=any(group.get("fused") for optimizer in optimizers for group in optimizer.param_groups),
        gelus_by_hand=tuple(clean_name(name) for name in gelus_by_hand(names.root)),
        can_fuse=any(not why_not_fused(optimizer) and not is_fused(optimizer) for optimizer in optimizers),
    )
