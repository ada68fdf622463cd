"""The recorded step as a real ``torch.fx.Graph``: forward, recompute and backward nodes in the order they ran."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from autoprec.graph.report import GraphReport
from autoprec.graph.trace import Call, Ref, Trace

_PLAIN = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_PREFIX = {"parameter": "p_", "buffer": "b_", "input": "in_"}


class _Builder:
    def __init__(self, trace: Trace, report: GraphReport) -> None:
        self.trace, self.report = trace, report
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}

    def _placeholder(self, index: int) -> fx.Node:
        value = self.trace.values[index]
        label = value.name if value.name else str(index)
        node = self.graph.placeholder(_PREFIX.get(value.origin, "in_") + re.sub(r"\W", "_", label))
        node.meta.update(
            {"origin": value.origin, "name": value.name, "out_shapes": (value.shape,), "out_dtypes": (value.dtype,)}
        )
        return node

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.nodes[argument.value]
        if isinstance(argument, tuple):
            return tuple(self._argument(item) for item in argument)
        if isinstance(argument, list):
            return [self._argument(item) for item in argument]
        return argument if isinstance(argument, _PLAIN) else str(argument)

    def _call(self, call: Call) -> None:
        row = self.report.operators[call.index]
        args = tuple(self._argument(argument) for argument in call.args)
        kwargs = {key: self._argument(value) for key, value in call.kwargs.items()}
        node = self.graph.call_function(call.func, args, kwargs)
        node.meta.update(row.to_json() | {"seq_nr": call.seq})
        single = len(call.outs) == 1 and not _returns_several(call)
        for index in call.outs:
            self.nodes[index] = node if single else self._item(node, index)

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        value = self.trace.values[index]
        item = self.graph.call_function(operator.getitem, (node, value.slot))
        item.meta.update({"out_shapes": (value.shape,), "out_dtypes": (value.dtype,), "phase": node.meta["phase"]})
        return item

    def build(self) -> fx.Graph:
        """Return the graph: placeholders first, calls in order, what nobody reads as the output."""
        outside = [i for i, value in enumerate(self.trace.values) if value.producer < 0]
        read = {index for call in self.trace.calls for index in call.ins}
        for index in outside:
            if index in read:
                self.nodes[index] = self._placeholder(index)
        for call in self.trace.calls:
            self._call(call)
        ends = [i for call in self.trace.calls for i in call.outs if i not in read]
        self.graph.output(tuple(self.nodes[i] for i in ends))
        return self.graph


def _returns_several(call: Call) -> bool:
    returns: Any = getattr(getattr(call.func, "_schema", None), "returns", ())
    return len(returns) != 1 or "[]" in str(returns[0].type)


def to_fx(trace: Trace, report: GraphReport) -> fx.Graph:
    """Return the step as a ``torch.fx.Graph``.

    Parameters, buffers and the batch are placeholders; operators are ``call_function`` nodes on the very operator
    overloads that ran. Every call node's ``meta`` is the row of its operator (:meth:`Operator.to_json`) and ``seq_nr``,
    autograd's sequence number.
    """
    return _Builder(trace, report).build()
