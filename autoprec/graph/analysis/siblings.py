"""Which layers the graph itself ties together: same input, same experts, same weight."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autoprec.graph.analysis.layers import LayerRecord
from autoprec.graph.analysis.linking import Links
from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.trace import Trace

__all__ = ["sibling_pairs", "source_of"]

_MOVES = frozenset({"view", "cast", "allocation"})
_GATHERS = frozenset({"index", "index_select", "gather", "_unsafe_index", "masked_select", "take_along_dim"})


def source_of(trace: Trace, links: Links, value: int) -> int:
    """Walk up through what only moves or casts a tensor."""
    return _walk(trace, links, value, frozenset())[0]


def _walk(trace: Trace, links: Links, value: int, also: frozenset[str]) -> tuple[int, bool]:
    """Walk up through moves, casts and the operators ``also``; say whether one of those was passed."""
    passed = False
    for _ in range(12):
        call = trace.producer(value)
        if call is None or not call.ins:
            break
        if links.classes[call.index] not in _MOVES:
            if call.name not in also:
                break
            passed = True
        value = call.ins[0]
    return value, passed


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
    mixtures: set[str] = set()
    for (container, _), members in families.items():
        found = [_walk(trace, links, r.inputs[0], _GATHERS) for r in members if r.inputs]
        rows_of_one = len(found) > 1 and len({source for source, _ in found}) == 1 and all(hit for _, hit in found)
        if rows_of_one or ("expert" in container.lower() and len(members) > 1):
            mixtures.add(container)
    for (container, _), members in families.items():
        if container in mixtures:
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
