"""What changed between two policies, for people and for programs."""

from __future__ import annotations

from typing import Any

from autoprec.policy.schema import Policy

__all__ = ["diff_policies"]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for key, item in value.items():
            out |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return out
    return {prefix: value}


def _layer_table(document: dict[str, Any]) -> dict[str, Any]:
    return {
        f"layers['{rule['match']}']": {k: v for k, v in rule.items() if k != "match"} for rule in document["layers"]
    }


def diff_policies(a: Policy, b: Policy) -> list[tuple[str, Any, Any]]:
    """Return (where, value in a, value in b) for every difference; None stands for "absent".

    Rules are compared by their glob; a change in the order of rules is reported as ``layers (order)``.
    """
    left, right = a.to_dict(), b.to_dict()
    rows = []
    for name, (x, y) in {"layers": (_layer_table(left), _layer_table(right))}.items():
        for key in dict.fromkeys([*x, *y]):
            if x.get(key) != y.get(key):
                rows.append((key, x.get(key), y.get(key)))
        common = [k for k in x if k in y]
        if common != [k for k in y if k in x]:
            rows.append((f"{name} (order)", common, [k for k in y if k in x]))
    for document in (left, right):
        del document["layers"]
        document["phases"] = {f"from {phase.pop('from')}": phase for phase in document.get("phases", ())}
    flat_a, flat_b = _flatten(left), _flatten(right)
    for key in dict.fromkeys([*flat_a, *flat_b]):
        if flat_a.get(key) != flat_b.get(key):
            rows.append((key, flat_a.get(key), flat_b.get(key)))
    return rows
