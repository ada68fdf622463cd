"""Figures as people read them; one place, so that the terminal, the page and Markdown agree."""

from __future__ import annotations

from autoprec.report.summary import Payback, Row, Summary
from autoprec.support import units
from autoprec.support.units import counted, memory_text, percent_text, ratio_text
from autoprec.tuning.decide.sentences import error_text

_MISSING = "–"


def ratio(value: float | None) -> str:
    """A speed-up, ``1.31x``."""
    return _MISSING if value is None else ratio_text(value)


def percent(value: float | None, half_width: float | None = None) -> str:
    """A fraction as a percentage, with the half width of its confidence interval."""
    return _MISSING if value is None else percent_text(value, half_width)


def gradient_limit(summary: Summary) -> str:
    """The limit of the gradient error in both of its units, and what ``~`` means; empty where there is none."""
    limit, about = summary.gradient_limit, "; ~ predicted" if any(row.predicted for row in summary.rows) else ""
    return f"gradient error at most {error_text(limit, summary.gradient_noise)}{about}" if limit is not None else ""


def time_text(value: float | None) -> str:
    """Milliseconds per step."""
    return _MISSING if value is None else units.time_text(value)


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def search_time(cost: Payback) -> str:
    """What a search took, over all of its sessions."""
    return duration(cost.seconds) + (f" over {cost.sessions} sessions" if cost.sessions > 1 else "")


def headings(*, over_16bit: bool) -> tuple[str, ...]:
    """Return the headings of :func:`row_cells`."""
    speed = ("over 16-bit", "over the script") if over_16bit else ("speed",)
    return ("", *speed, "step", "memory", "divergence", "gradient error")


def row_cells(row: Row, *, over_16bit: bool = False) -> tuple[str, ...]:
    """Return the cells of one comparison row: name, speed-ups, step time, memory, divergence, gradient error."""
    speed = (ratio(row.speedup_over_16bit), ratio(row.speedup)) if over_16bit else (ratio(row.speedup),)
    return (
        f"{row.name} ({counted(row.seeds, 'seed')})" if row.seeds else row.name,
        *speed,
        time_text(row.step_time_ms),
        memory_text(row.memory_bytes),
        percent(row.divergence, row.interval),
        f"~ {percent(row.gradient_error)}" if row.predicted else percent(row.gradient_error),
    )
