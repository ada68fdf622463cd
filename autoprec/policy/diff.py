"""What changed between two policies, for people and for programs."""

from __future__ import annotations

from typing import Any

from autoprec.policy.schema import Policy


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for key, item in value.items():
            out |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return out
    return {prefix: value}


def _layer_table(document: dict[str, Any]) -> dict[str, Any]:
    """Return the rules of both sides by their glob; of several with one glob the first is the one that runs."""
    out: dict[str, Any] = {}
    for side, rules in (("", document["layers"]), ("rollout.", document.get("rollout", {}).get("layers", ()))):
        for rule in rules:
            out.setdefault(f"{side}layers['{rule['match']}']", {k: v for k, v in rule.items() if k != "match"})
    return out


def diff_policies(a: Policy, b: Policy) -> list[tuple[str, Any, Any]]:
    """Return (where, value in a, value in b) for every difference; None stands for "absent".

    Rules are compared by their glob; a change in the order of rules is reported as ``layers (order)``.
    """
    left, right = a.to_dict(), b.to_dict()
    x, y = _layer_table(left), _layer_table(right)
    rows = _changed(x, y)
    common, theirs = [k for k in x if k in y], [k for k in y if k in x]
    if common != theirs:
        rows.append(("layers (order)", common, theirs))
    for document in (left, right):
        del document["layers"]
        document.get("rollout", {}).pop("layers", None)
        document["phases"] = {f"from {phase.pop('from')}": phase for phase in document.get("phases", ())}
    return rows + _changed(_flatten(left), _flatten(right))


def _changed(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
