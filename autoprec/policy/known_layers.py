"""The layers that a search saw, in a policy file: names in which numbers are ranges, ``blocks.0-11.mlp.fc``.

A rule for everything also takes layers that the model has been given since (an adapter, deeper blocks), and for those
the policy has no evidence. Twelve blocks of seven layers are seven names; a range may take in a number between two
that were seen, which in an ``nn.Sequential`` is an activation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: A name with its numbers as ``*``, and how far each number goes.
_Ranges = dict[tuple[str, ...], list[tuple[int, int]]]
_NUMBER = re.compile(r"(\d+)(?:-(\d+))?")


def _split(name: str) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    kind, numbers = [], []
    for part in name.split("."):
        found = _NUMBER.fullmatch(part)
        kind.append("*" if found else part)
        if found:
            numbers.append((int(found[1]), int(found[2] or found[1])))
    return tuple(kind), numbers


def _ranges(names: Iterable[str]) -> _Ranges:
    out: _Ranges = {}
    for name in names:
        kind, numbers = _split(name)
        before = out.setdefault(kind, numbers)
        out[kind] = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(before, numbers, strict=True)]
    return out


def known_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return layer names in short, in the order of their first layers."""
    out = []
    for kind, numbers in _ranges(names).items():
        held = iter(["-".join(map(str, sorted(set(bounds)))) for bounds in numbers])
        parts = [next(held) if part == "*" else part for part in kind]
        out.append(".".join(parts))
    return tuple(out)


def unknown_layers(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names that are not among those of :func:`known_layers`."""
    ranges = _ranges(known)

    def is_known(name: str) -> bool:
        kind, numbers = _split(name)
        found = ranges.get(kind)
        return found is not None and all(a <= low <= b for (low, _), (a, b) in zip(numbers, found, strict=True))

    return [name for name in names if not is_known(name)]
