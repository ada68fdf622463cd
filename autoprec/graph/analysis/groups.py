"""Groups: layers whose precision moves together, found from the graph and overridable by globs.

By default together: siblings of one parent that read the same tensor (q/k/v, gate/up: fused in real kernels), the same
layer of every expert of one mixture, and modules that share one weight. ``regroup`` replaces this by globs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoprec.graph.report import GraphReport, Layer
from autoprec.policy import glob_matches

__all__ = ["group_name", "merge", "regroup"]


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


def regroup(report: GraphReport, globs: Sequence[str | Sequence[str]]) -> GraphReport:
    """Return the report with its groups replaced where globs say so; nothing else changes.

    Args:
        report: a recorded step.
        globs: each entry is a glob, or several, whose matching tunable layers become one group. Layers that no entry
            matches keep their group (less the members that were taken out of it). A layer follows the first entry
            that matches it; an entry that matches nothing is ignored, since spaces are shared between models.
    """
    wanted = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in globs]
    entry_of: dict[str, int] = {}
    for layer in report.layers:
        for index, patterns in enumerate(wanted):
            if layer.tunable and any(glob_matches(pattern, layer.name) for pattern in patterns):
                entry_of[layer.name] = index
                break
    sets = [tuple(name for name, at in entry_of.items() if at == index) for index in range(len(wanted))]
    for members in report.groups.values():
        sets.append(tuple(name for name in members if name not in entry_of))
    position = {layer.name: index for index, layer in enumerate(report.layers)}
    kept = sorted((members for members in sets if members), key=lambda members: min(position[m] for m in members))
    groups = named(kept)
    group_of = {member: name for name, members in groups.items() for member in members}
    layers: tuple[Layer, ...] = tuple(
        replace(layer, group=group_of.get(layer.name, layer.group)) for layer in report.layers
    )
    return replace(report, layers=layers, groups=groups)
