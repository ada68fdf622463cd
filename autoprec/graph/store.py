"""Saving and loading a recorded graph as data: JSON with operator names, never pickle."""

from __future__ import annotations

import json
import math
import operator
import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoprec.errors import FileError
from autoprec.graph.report import MAX_GRAPH_BYTES
from autoprec.support.files import read_text, write_atomic

GRAPH_SCHEMA = "autoprec.graph/1"
_NAME = re.compile(r"[A-Za-z_]\w*")
_TORCH_KINDS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (tuple, list)):
        items = [_encode(item) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, cls in _TORCH_KINDS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    return str(value)


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"{value!r} is not an argument")
    kind, content = next(iter(value.items()))
    if kind == "node":
        return nodes[content]
    if kind == "tuple":
        return tuple(_decode(item, nodes) for item in content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    if kind in _TORCH_KINDS and _NAME.fullmatch(str(content)):
        found = getattr(torch, content)
        if isinstance(found, _TORCH_KINDS[kind]):
            return found
    raise ValueError(f"unknown argument kind '{kind}'")


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return f"{namespace}::{name}.{target._overloadname}"
    return f"higher_order::{getattr(target, '_name', target)}"


def _opaque(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for an operator that this process does not have registered: the graph can be read, not run."""


def _target(name: str) -> Any:
    """Find an operator by name: attribute look-up among registered operators, nothing is called or imported."""
    if name == "getitem":
        return operator.getitem
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.rpartition(".")
    if not all(_NAME.fullmatch(part) for part in (namespace, base, overload)):
        return _opaque
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except (AttributeError, RuntimeError):
        return _opaque
    return found if isinstance(found, torch._ops.OpOverload) else _opaque


def save_graph(graph: fx.Graph, path: Path | str) -> Path:
    """Write a graph to a JSON file.

    Raises:
        NoSpaceError, FileError: see :func:`autoprec.support.files.write_atomic`.
    """
    rows = []
    for node in graph.nodes:
        row: dict[str, Any] = {"name": node.name, "op": node.op, "args": _encode(tuple(node.args))}
        if node.kwargs:
            row["kwargs"] = {key: _encode(value) for key, value in node.kwargs.items()}
        if node.op == "call_function":
            row["target"] = node.meta.get("target") or _target_name(node.target)
        row["meta"] = {key: _encode(value) for key, value in node.meta.items() if key != "target"}
        rows.append(row)
    return write_atomic(path, json.dumps({"schema": GRAPH_SCHEMA, "nodes": rows}, allow_nan=False))


def load_graph(path: Path | str) -> fx.Graph:
    """Read a graph that :func:`save_graph` wrote. No code of the file is run: operators are looked up by name.

    Operators that are not registered in this process become opaque nodes, their name kept in ``meta["target"]``.

    Raises:
        FileError: missing, too large, or not a graph file.
    """
    text = read_text(path, most_bytes=MAX_GRAPH_BYTES)
    try:
        document = json.loads(text)
        if document["schema"] != GRAPH_SCHEMA:
            raise ValueError(f"schema is not {GRAPH_SCHEMA}")
        return _build(document["nodes"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"is not a graph file: {type(error).__name__}: {error}"
        raise FileError(what, where=str(path), fix="write it with autoprec.graph.save_graph") from error


def _build(rows: list[dict[str, Any]]) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for row in rows:
        args = _decode(row["args"], nodes)
        kwargs = {key: _decode(value, nodes) for key, value in row.get("kwargs", {}).items()}
        meta = {key: _decode(value, nodes) for key, value in row["meta"].items()}
        if row["op"] == "placeholder":
            node = graph.placeholder(row["name"])
        elif row["op"] == "output":
            node = graph.output(args[0])
        elif row["op"] == "call_function":
            target = _target(row["target"])
            node = graph.call_function(target, args, kwargs)
            if target is _opaque:
                meta["target"] = row["target"]
        else:
            raise ValueError(f"unknown node kind '{row['op']}'")
        node.meta.update(meta)
        nodes[row["name"]] = node
    return graph
