"""Amounts as people read them: memory in one unit, GiB, in every command, report and message; counts of things."""

from __future__ import annotations


def memory_text(size: float | None) -> str:
    """Return bytes in GiB (2**30 bytes), so that two figures compare at a glance; below 0.1 GiB in MiB.

    A size that is not known (None) is a dash.

    >>> memory_text(38_370_000_000), memory_text(2_000_000_000), memory_text(40_000_000)
    ('35.7 GiB', '1.86 GiB', '38.1 MiB')
    """
    if size is None:
        return "–"
    gib = size / 2**30
    if gib < 0.1:
        return f"{size / 2**20:.1f} MiB"
    return f"{gib:,.2f} GiB" if gib < 10 else f"{gib:,.1f} GiB"


def counted(count: int, thing: str) -> str:
    """Return a number of things, one of them in the singular.

    >>> counted(1, "trial"), counted(3, "trial"), counted(0, "trial")
    ('1 trial', '3 trials', '0 trials')
    """
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
