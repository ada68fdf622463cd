"""Amounts as people write them on a command line: durations, shares and bytes, each with its unit.

A number without a unit is refused where people mean different things by it: everything that AutoPrec prints is in
percent and GiB, so 0.25 would be taken for 0.25 % and 60 for 60 GiB, and they would be neither.
"""

from __future__ import annotations

import re
from typing import Literal

from autoprec.errors import UsageError

#: A share without a unit is a fraction; above this one it is probably meant in percent.
LARGEST_BARE_SHARE = 0.05
#: No training step has so few bytes: a smaller number lacks its unit.
LEAST_BYTES = 2**20


def parse_duration(text: str) -> float:
    """Parse ``90s``, ``20m`` or ``1.5h`` into seconds. A number alone is refused: 2 could be meant in any unit.

    Raises:
        UsageError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise UsageError(f"'{text}' is not a duration", fix="write seconds, minutes or hours: 90s, 20m, 1.5h")
    if not found[2]:
        number = found[1]
        raise UsageError(
            f"'{text}' is a duration without a unit", fix=f"write {number}s, {number}m or {number}h", code="unit"
        )
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def parse_share(text: str) -> float:
    """Parse ``0.25%`` or ``0.0025`` into a fraction.

    Raises:
        UsageError: anything else; a fraction above 5 % without the sign that says it is meant.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*", text)
    if not found:
        raise UsageError(f"'{text}' is not a share", fix="write a percentage or a fraction: 0.25% or 0.0025")
    share = float(found[1]) / (100 if found[2] else 1)
    if not found[2]:
        check_share(share, text)
    return share


def check_share(share: float, text: str = "") -> float:
    """Return a share that came without a unit.

    Raises:
        UsageError: it is above 5 %, and was probably meant in percent.
    """
    if share > LARGEST_BARE_SHARE:
        raise UsageError(
            f"'{text or f'{share:g}'}' without a unit is {share:.4g} of 1, which is {100 * share:.4g} %",
            fix=f"write {share:g}% or {share / 100:g}; if it is meant: {100 * share:g}%",
            code="unit",
        )
    return share


def parse_bytes(text: str) -> int:
    """Parse ``60GiB``, ``60GB`` or a number of bytes.

    Raises:
        UsageError: anything else; a number of bytes below 1 MiB without a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", text.lower())
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {letter: 1000**power, f"{letter}b": 1000**power, f"{letter}i": 1024**power, f"{letter}ib": 1024**power}
    if not found or found[2] not in units:
        raise UsageError(f"'{text}' is not an amount of memory", fix="e.g. 60GiB or 512MiB")
    size = int(float(found[1]) * units[found[2]])
    if not found[2] and size < LEAST_BYTES:
        raise UsageError(f"'{text}' without a unit is {size} bytes", fix=f"write {found[1]}GiB", code="unit")
    return size


def parse_limit(text: str) -> int | Literal["auto"]:
    """Parse an amount of memory as :func:`parse_bytes` does, or the word ``auto``."""
    return "auto" if text.strip().lower() == "auto" else parse_bytes(text)
