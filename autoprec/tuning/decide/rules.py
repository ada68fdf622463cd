"""From a choice per layer to the few glob rules of a policy file, as a person would have written them by hand.

A policy's rules are ordered and the first match wins, so a general rule (``blocks.*.mlp.*``) may stand behind its
exceptions (``blocks.0.*``). The rules are found greedily from the last to the first, and say exactly what the search
decided: a layer that no rule could name by a pattern gets a rule with its own name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from autoprec.policy import LayerRule, escape, glob_matches
from autoprec.policy.space import Choice
from autoprec.precision.recipes import KEEP
from autoprec.support.arrays import np, npt


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
    """Which candidate glob matches which layer name; see :func:`glob_table`.

    Args:
        names: every layer that ``autoprec`` could see, tunable or not.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        seen: dict[bytes, tuple[str, npt.NDArray[np.bool_]]] = {}
        candidates = sorted({glob for name in names for glob in _candidates(name)}, key=lambda g: (len(g), g))
        for glob in candidates:
            row = np.fromiter((glob_matches(glob, name) for name in self.names), dtype=bool, count=len(self.names))
            if row.any():
                seen.setdefault(np.packbits(row).tobytes(), (glob, row))
        self.globs = tuple(glob for glob, _ in seen.values())
        self.index = {glob: i for i, glob in enumerate(self.globs)}
        rows = np.array([row for _, row in seen.values()], dtype=np.float32)
        self.matches: npt.NDArray[np.float32] = rows.reshape(len(self.globs), len(self.names))
        self.columns = np.ascontiguousarray(self.matches.T)


@lru_cache(maxsize=2)
def glob_table(names: tuple[str, ...]) -> GlobTable:
    """Return the table of a model's layer names: a second for a thousand layers, so it is kept for that of a search."""
    return GlobTable(names)


def compact_rules(table: GlobTable, assignment: Mapping[str, str], default: str) -> list[tuple[str, str]]:
    """Return ordered ``(glob, choice)`` rules, first match wins, that give every name exactly its choice.

    Greedy from the last, most general rule to the first, most special one: each step puts in front the rule that
    corrects the most names net of those it would spoil. Exact names are candidates, so it always ends.

    Args:
        assignment: choice per name; names that are absent get ``default``.
        default: what names without a rule get.
    """
    wanted = [assignment.get(name, default) for name in table.names]
    choices = sorted(set(wanted))
    target = np.array([choices.index(choice) for choice in wanted], dtype=np.int64)
    current = np.full(len(target), choices.index(default) if default in choices else -1, dtype=np.int64)
    rules: list[tuple[str, str]] = []
    wants = np.arange(len(choices))[:, None]
    is_code = target == wants
    before = np.zeros((len(choices), len(target)), dtype=np.float32)
    scores = np.zeros((len(table.globs), len(choices)), dtype=np.float32)  # names corrected, net of those spoilt
    while (current != target).any():
        right = current == target
        gains = (is_code & (current != wants)).astype(np.float32) - (~is_code & right).astype(np.float32)
        changed = (gains != before).any(axis=0)  # a special rule moves few names: small whole numbers, so exact
        scores += table.columns[changed].T @ (gains - before)[:, changed].T
        before = gains
        tops = scores.argmax(axis=0)  # candidates are sorted by length: the shortest of equals comes first
        keys = [(float(scores[top, code]), -len(table.globs[top])) for code, top in enumerate(tops)]
        code = max(range(len(keys)), key=keys.__getitem__)
        rules.insert(0, (table.globs[tops[code]], choices[code]))
        current[table.matches[tops[code]] > 0] = code
    return _without_idle(table, rules, default)


def layer_rules(table: GlobTable, choices: Mapping[str, str], reached: Collection[str]) -> list[LayerRule]:
    """Return the rules of a policy that give every layer its choice by name, ``keep`` to those without one.

    Args:
        reached: layers that a policy reaches; a rule that only exempts others (a recurrent kernel) may match nothing
            where the policy is applied.
    """
    rules = []
    for glob, name in compact_rules(table, choices, KEEP):
        choice, spare = Choice.parse(name), not any(glob_matches(glob, layer) for layer in reached)
        rules.append(LayerRule(match=glob, recipe=choice.recipe, gemms=dict(choice.gemms), optional=spare))
    return rules


def recipes_in(choices: Iterable[str]) -> set[str]:
    """Return the names of the recipes that choices use, ``keep`` left out."""
    parsed = [Choice.parse(choice) for choice in set(choices)]
    return {name for one in parsed for name in (one.recipe, *one.gemms.values())} - {KEEP}


def _without_idle(table: GlobTable, rules: list[tuple[str, str]], default: str) -> list[tuple[str, str]]:
    """Drop rules whose absence changes nothing (an earlier rule came to cover all they cover)."""
    codes = {choice: code for code, choice in enumerate(dict.fromkeys([default, *(choice for _, choice in rules)]))}
    rows = [table.matches[table.index[glob]] > 0 for glob, _ in rules]
    covered = [np.zeros(len(table.names), dtype=bool)]  # by any rule before each
    for row in rows:
        covered.append(covered[-1] | row)
    kept: list[tuple[str, str]] = []
    beneath = np.zeros(len(table.names), dtype=np.int64)  # what the rules kept so far, all of them later ones, give
    for (glob, choice), row, before in zip(reversed(rules), reversed(rows), reversed(covered[:-1]), strict=True):
        if (beneath[row & ~before] != codes[choice]).any():
            kept.insert(0, (glob, choice))
            beneath[row] = codes[choice]
    return kept
