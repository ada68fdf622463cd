"""Ordered rules on layer names: first match wins, and a rule that matches nothing is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autoprec.errors import PolicyMismatchError, nearest
from autoprec.policy.globs import glob_matches
from autoprec.policy.schema import LayerPlan, LayerRule, Policy


def first_match(rules: Sequence[LayerRule], name: str) -> LayerRule | None:
    """Return the first rule that matches a module name."""
    return next((rule for rule in rules if glob_matches(rule.match, name)), None)


def unmatched_rules(policy: Policy, names: Iterable[str]) -> list[LayerRule]:
    """Return the rules, not marked optional, whose glob matches none of the names."""
    listed = list(names)
    together = "\n".join(listed)

    def matches(pattern: str) -> bool:
        if "[" not in pattern and not all(part in together for part in re.split(r"[*?]", pattern)):
            return False  # a text of it is in no name at all: most of the rules that do not fit a model
        return any(glob_matches(pattern, name) for name in listed)

    return [rule for rule in policy.layers if not rule.optional and not matches(rule.match)]


def resolve(policy: Policy, names: Iterable[str], *, strict: bool = True) -> dict[str, LayerPlan]:
    """Return what each named layer runs under a policy.

    Args:
        policy: the policy.
        names: tunable layers of the model, in model order.
        strict: refuse a rule that matches nothing.

    Raises:
        PolicyMismatchError: a rule that is not optional matches none of the names; the message lists the rules and
            the nearest layer names of the model.
    """
    listed = list(names)
    missing = unmatched_rules(policy, listed) if strict else []
    if missing:
        shown = []
        for rule in missing[:8]:
            close = nearest(rule.match.replace("*", ""), listed, limit=1)
            shown.append(f"'{rule.match}'" + (f" (nearest layer: '{close[0]}')" if close else ""))
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise PolicyMismatchError(
            f"{len(missing)} of {len(policy.layers)} rules match no tunable layer: {', '.join(shown)}{more}",
            fix="is this policy for another model? otherwise correct the glob, or mark the rule 'optional: true'",
        )
    return {name: policy.plan_of_rule(first_match(policy.layers, name)) for name in listed}
