"""Groups: layers whose precision must move together, found from what the recorded step read and wrote.

Siblings of one parent that read the same tensor (q/k/v, gate/up: one fused GEMM in real kernels), the same layer of
every expert of one mixture, and modules that share one weight. A search decides per group, which is also what keeps
its space small; the ``groups`` of a search space join more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from autoprec.graph.analysis.layers import LayerRecord
from autoprec.graph.analysis.linking import Links
from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.trace import Trace

_GATHERS = frozenset({"index", "index_select", "gather", "_unsafe_index", "masked_select", "take_along_dim"})


def merge(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return the connected sets of ``names`` under ``pairs``, each in the order of ``names``."""
    parent = {name: name for name in names}

    def top(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for a, b in pairs:
        if a in parent and b in parent:
            parent[top(a)] = top(b)
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(top(name), []).append(name)
    return [tuple(members) for members in sets.values()]


def _common_prefix(names: Sequence[str]) -> str:
    parts = list(zip(*(name.split(".")[:-1] for name in names), strict=False))
    same = next((i for i, column in enumerate(parts) if len(set(column)) > 1), len(parts))
    return "".join(f"{column[0]}." for column in parts[:same])


def group_name(members: Sequence[str]) -> str:
    """Return a short name for a group: ``h.0.attn.{q_proj,k_proj,v_proj}``, ``h.0.experts.*.{w1,w3}``."""
    if len(members) == 1:
        return members[0]
    split = [name.split(".") for name in members]
    if len({len(parts) for parts in split}) != 1:
        prefix = _common_prefix(members)
        short = [name[len(prefix) :] for name in members]
        return f"{prefix}{{{','.join(short)}}}" if len(members) <= 4 else f"{prefix}{{{short[0]},...,{short[-1]}}}"
    out = []
    for column in zip(*split, strict=True):
        values = list(dict.fromkeys(column))
        if len(values) == 1:
            out.append(values[0])
        elif all(value.isdigit() for value in values):
            out.append("*")
        else:
            out.append(
                "{" + ",".join(values) + "}" if len(values) <= 6 else "{" + f"{values[0]},...,{values[-1]}" + "}"
            )
    return ".".join(out)


def named(sets: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Give every set a name of its own."""
    out: dict[str, tuple[str, ...]] = {}
    for members in sets:
        name = group_name(members)
        while name in out:
            name += "'"
        out[name] = members
    return out


def _same_input(trace: Trace, links: Links, records: dict[str, LayerRecord]) -> Iterator[tuple[str, str]]:
    first: dict[tuple[str, int], str] = {}
    for record in records.values():
        if "router" in record.flags or not record.inputs or record.kind == "rnn":
            continue
        key = (record.name.rpartition(".")[0], links.source(trace, record.inputs[0])[0])
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
        found = [links.source(trace, r.inputs[0], _GATHERS) for r in members if r.inputs]
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
    """Return pairs of layer names that must move together.

    Args:
        trace: the recorded step.
        names: modules and parameters of the model.
        links: what belongs together in the trace.
        records: layers by name.
    """
    pairs = list(_same_input(trace, links, records))
    pairs += _same_expert(trace, names, links, records)
    by_weight: dict[str, str] = {}
    for record in records.values():
        seen = by_weight.setdefault(record.weight, record.name)
        if seen != record.name:
            pairs.append((seen, record.name))
    return pairs
