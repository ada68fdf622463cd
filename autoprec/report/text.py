"""Figures as people read them; one place, so that the terminal, the page and Markdown agree."""

from __future__ import annotations

from autoprec.report.summary import Row

__all__ = ["bytes_text", "duration", "percent", "ratio", "row_cells", "time_text"]

_MISSING = "–"


def ratio(value: float | None) -> str:
    """A speed-up, ``1.31x``."""
    return f"{value:.2f}x" if value is not None else _MISSING


def percent(value: float | None, half_width: float | None = None) -> str:
    """A fraction as a percentage, with the half width of its confidence interval where known."""
    if value is None:
        return _MISSING
    digits = 3 if abs(value) < 0.01 else 2 if abs(value) < 0.1 else 1
    text = f"{100 * value:.{digits}f} %"
    return text if half_width is None else f"{100 * value:.{digits}f} ± {100 * half_width:.{digits}f} %"


def bytes_text(value: float | None) -> str:
    """Bytes in the unit that gives one to four digits."""
    if value is None:
        return _MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def time_text(value: float | None) -> str:
    """Milliseconds per step."""
    return _MISSING if value is None else f"{value:.1f} ms" if value >= 10 else f"{value:.3g} ms"


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def row_cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one comparison row: name, speed, step time, memory, divergence, gradient error."""
    return (
        row.name,
        ratio(row.speedup),
        time_text(row.step_time_ms),
        bytes_text(row.memory_bytes),
        percent(row.divergence, row.interval),
        _MISSING if row.gradient_error is None else f"{row.gradient_error:.3f}",
    )
