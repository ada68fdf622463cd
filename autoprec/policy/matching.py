"""Ordered glob matching of layer names: first match wins, and a rule that matches nothing is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from autoprec.errors import PolicyMismatchError, nearest
from autoprec.policy.schema import LayerPlan, LayerRule, Policy

__all__ = ["escape", "first_match", "glob_matches", "glob_regex", "resolve", "unmatched_rules"]


def _pieces(pattern: str) -> list[str]:
    """Return the regular expressions of the texts between the stars of a glob."""
    out, index = [""], 0
    while index < len(pattern):
        char = pattern[index]
        index += 1
        if char == "*":
            if out[-1] or len(out) == 1:  # two stars are one
                out.append("")
        elif char == "?":
            out[-1] += "."
        elif char == "[" and "]" in pattern[index + 1 :]:
            end = pattern.index("]", index + 1)
            body = pattern[index:end].replace("\\", "\\\\").replace("[", "\\[")
            out[-1] += "[" + ("^" + body[1:] if body.startswith("!") else body.replace("^", "\\^", 1)) + "]"
            index = end + 1
        else:
            out[-1] += re.escape(char)
    return out


@lru_cache(maxsize=4096)
def _compiled(pattern: str, bounded: bool = True) -> re.Pattern[str]:
    """Return the regular expression of a glob; ``bounded`` forbids it to try a star twice.

    The first place where the text between two stars is found is as good as any later one, so each such part can be
    atomic: without that ``*a*a*a*a*a*b`` takes hours on a name of a hundred letters.
    """
    first, *rest = _pieces(pattern)
    if bounded and rest:
        middle = "".join(f"(?>.*?{piece})" for piece in rest[:-1])
        text = f"{first}{middle}.*{rest[-1]}"
    else:
        text = ".*".join([first, *rest])
    try:
        return re.compile(text, re.DOTALL)
    except re.error:  # e.g. an inverted range: such a bracket is taken literally, as fnmatch does
        return re.compile(re.escape(pattern), re.DOTALL)


def glob_matches(pattern: str, name: str) -> bool:
    """Say whether a glob matches a whole module name; ``*`` also crosses dots, and case counts."""
    return _compiled(pattern).fullmatch(name) is not None


def glob_regex(pattern: str) -> str:
    """Return the regular expression whose ``fullmatch`` is :func:`glob_matches`, for files that others read."""
    return _compiled(pattern, bounded=False).pattern


def escape(name: str) -> str:
    """Return a glob that matches exactly this name."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def first_match(rules: Sequence[LayerRule], name: str) -> LayerRule | None:
    """Return the first rule that matches a module name."""
    return next((rule for rule in rules if glob_matches(rule.match, name)), None)


def unmatched_rules(policy: Policy, names: Iterable[str]) -> list[LayerRule]:
    """Return the rules, not marked optional, whose glob matches none of the names."""
    listed = list(names)
    return [
        rule for rule in policy.layers if not rule.optional and not any(glob_matches(rule.match, n) for n in listed)
    ]


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
