"""Short glob rules that say exactly which layer gets which choice: what a person would have written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autoprec.policy import escape, glob_matches

__all__ = ["GlobTable", "compact_rules"]


def _candidates(name: str) -> set[str]:
    """Return globs that a person might write for a layer, from the exact name to ``*``."""
    parts = [escape(part) for part in name.split(".")]
    starred = ["*" if part.isdigit() else part for part in parts]
    out = {"*", ".".join(parts), ".".join(starred)}
    for depth in range(1, len(parts)):
        out.add(".".join([*starred[:depth], "*"]))
        out.add(".".join([*parts[:depth], "*"]))
        out.add(".".join(["*", *starred[depth:]]))
    for index, part in enumerate(parts):
        if part.isdigit():  # this block, everywhere in its siblings or in all of them
            one = [*starred[:index], part, *starred[index + 1 :]]
            out.add(".".join(one))
            out.add(".".join([*one[: index + 1], "*"]))
    return {re.sub(r"\*(\.\*)+$", "*", glob) for glob in out}


class GlobTable:
    """Which candidate glob matches which layer name; computed once per model.

    Args:
        names: every layer that ``autoprec`` could see, tunable or not.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        seen: dict[bytes, str] = {}
        candidates = sorted({glob for name in names for glob in _candidates(name)}, key=lambda g: (len(g), g))
        for glob in candidates:
            row = np.fromiter((glob_matches(glob, name) for name in self.names), dtype=bool, count=len(self.names))
            if row.any():
                seen.setdefault(np.packbits(row).tobytes(), glob)
        self.globs = tuple(seen.values())
        self.matches: npt.NDArray[np.float32] = np.array(
            [[glob_matches(glob, name) for name in self.names] for glob in self.globs], dtype=np.float32
        ).reshape(len(self.globs), len(self.names))


def compact_rules(table: GlobTable, assignment: Mapping[str, str], default: str) -> list[tuple[str, str]]:
    """Return ordered ``(glob, choice)`` rules, first match wins, that give every name exactly its choice.

    Greedy from the last, most general rule to the first, most special one: each step puts in front the rule that
    corrects the most names net of those it would spoil. Exact names are candidates, so it always ends.

    Args:
        table: candidate globs of the model.
        assignment: choice per name; names that are absent get ``default``.
        default: what names without a rule get.
    """
    wanted = [assignment.get(name, default) for name in table.names]
    choices = sorted(set(wanted))
    target = np.array([choices.index(choice) for choice in wanted], dtype=np.int64)
    current = np.full(len(target), choices.index(default) if default in choices else -1, dtype=np.int64)
    rules: list[tuple[str, str]] = []
    while (current != target).any():
        best: tuple[float, float, int, int] | None = None
        for code in range(len(choices)):
            is_code = target == code
            gain = (is_code & (current != code)).astype(np.float32) - (~is_code & (current == target)).astype(
                np.float32
            )
            scores = table.matches @ gain
            top = int(np.argmax(scores))  # candidates are sorted by length: the shortest of equals comes first
            key = (float(scores[top]), -float(len(table.globs[top])), code, top)
            if best is None or key[:2] > best[:2]:
                best = key
        if best is None:
            break
        _, _, code, top = best
        rules.insert(0, (table.globs[top], choices[code]))
        current[table.matches[top] > 0] = code
    return _without_idle(table, rules, default)


def _without_idle(table: GlobTable, rules: list[tuple[str, str]], default: str) -> list[tuple[str, str]]:
    """Drop rules whose absence changes nothing (an earlier rule came to cover all they cover)."""
    index = {glob: i for i, glob in enumerate(table.globs)}

    def outcome(candidate: Sequence[tuple[str, str]]) -> list[str]:
        out = [default] * len(table.names)
        for glob, choice in reversed(candidate):
            for i in np.flatnonzero(table.matches[index[glob]]):
                out[i] = choice
        return out

    full = outcome(rules)
    position = len(rules) - 1
    while position >= 0:
        shorter = rules[:position] + rules[position + 1 :]
        if outcome(shorter) == full:
            rules = shorter
        position -= 1
    return rules
