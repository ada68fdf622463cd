"""Memory as people read it: one unit, GiB, in every command, report and message."""

from __future__ import annotations

__all__ = ["memory_text"]


def memory_text(size: float) -> str:
    """Return bytes in GiB with three digits or more: ``0.119 GiB``, ``35.7 GiB``, ``1,024.0 GiB``."""
    gib = size / 2**30
    return f"{gib:,.1f} GiB" if gib >= 10 else f"{gib:.3g} GiB"
