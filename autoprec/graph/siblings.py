"""Which layers the graph itself ties together: same input, same experts, same weight."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autoprec.graph.layers import LayerRecord
from autoprec.graph.linking import Links
from autoprec.graph.modules import ModelNames
from autoprec.graph.trace import Trace

__all__ = ["sibling_pairs", "source_of"]

_MOVES = frozenset({"view", "cast", "allocation"})
_GATHERS = frozenset({"index", "index_select", "gather", "_unsafe_index", "where", "mul"})


def source_of(trace: Trace, links: Links, value: int, *, through_gather: bool = False) -> int:
    """Walk up through what only moves or casts a tensor; with ``through_gather`` also through row selection."""
    for _ in range(12):
        call = trace.producer(value)
        if call is None or not call.ins:
            return value
        moves = links.classes[call.index] in _MOVES or (through_gather and call.name in _GATHERS)
        if not moves:
            return value
        value = call.ins[0]
    return value


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _same_input(trace: Trace, links: Links, records: dict[str, LayerRecord]) -> Iterator[tuple[str, str]]:
    first: dict[tuple[str, int], str] = {}
    for record in records.values():
        if "router" in record.flags or not record.inputs or record.kind == "rnn":
            continue
        key = (_parent(record.name), source_of(trace, links, record.inputs[0]))
        seen = first.setdefault(key, record.name)
        if seen != record.name:
            yield seen, record.name


def _same_expert(
    trace: Trace, names: ModelNames, links: Links, records: dict[str, LayerRecord]
) -> Iterator[tuple[str, str]]:
    """Layers ``<list>.<i>.<rest>`` of a list whose elements read rows of one tensor, not each other's output."""
    families: dict[tuple[str, str], list[LayerRecord]] = {}
    for record in records.values():
        match = re.fullmatch(r"(.*)\.(\d+)((?:\.[^.]+)*)", record.name)
        if match and type(names.modules.get(match[1])).__name__ == "ModuleList":
            families.setdefault((match[1], match[3]), []).append(record)
    gathered: dict[str, bool] = {}
    for (container, _), members in families.items():
        called = [r for r in members if r.inputs]
        sources = {source_of(trace, links, r.inputs[0], through_gather=True) for r in called}
        looks = "expert" in container.lower()
        parallel = len(called) > 1 and len(sources) == 1
        gathered[container] = gathered.get(container, False) or parallel or (looks and len(members) > 1)
    for (container, _), members in families.items():
        if gathered[container]:
            for record in members[1:]:
                yield members[0].name, record.name


def sibling_pairs(
    trace: Trace, names: ModelNames, links: Links, records: dict[str, LayerRecord]
) -> list[tuple[str, str]]:
    """Return pairs of layer names that must move together."""
    pairs = list(_same_input(trace, links, records))
    pairs += _same_expert(trace, names, links, records)
    by_weight: dict[str, str] = {}
    for record in records.values():
        seen = by_weight.setdefault(record.weight, record.name)
        if seen != record.name:
            pairs.append((seen, record.name))
    return pairs
