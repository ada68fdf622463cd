"""The comparison that every outlet shows: rows of a result, and each figure of a row as a person reads it.

A row is a metric mapping of a result (its policy, the reference, a preset, a point of the front) with ``name``, and
where a result has collected it (:meth:`.records.SearchResult.rows`) with ``role``: ``best``, ``reference`` or
``preset``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from autoprec.support.units import counted, gap_name, percent_text
from autoprec.tuning.study.run import METRICS

Row = Mapping[str, Any]
MISSING = "–"
#: Columns behind the name: metrics, and the first one where a 16-bit run was measured.
_COLUMNS = ("speedup_over_16bit", "speedup", "step_time_ms", "memory_bytes", "divergence", "gradient_error")


def number(value: Any) -> float | None:
    """Return a finite float, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def percent(value: float | None) -> str:
    """Return a fraction as a percentage; a dash where it is unknown."""
    return MISSING if value is None else percent_text(value)


def shown(metric: str, row: Row) -> str:
    """Return a metric of a row with its interval, where that is known; a dash where the metric is not.

    A divergence has the half width of its interval, as ``interval``; others have bounds in ``intervals``.
    """
    value, half = number(row.get(metric)), number(row.get("interval"))
    if value is None:
        return MISSING
    if metric == "divergence":
        return percent_text(value, half)
    write = METRICS[metric].text
    low, high = (row.get("intervals") or {}).get(metric, (None, None))
    text = write(value) + (f" ({write(low)} to {write(high)})" if low is not None and high is not None else "")
    return f"~ {text}" if row.get(f"{metric}_source") == "predicted" else text


def source_of(row: Row) -> str:
    """Say whether the times of a row are measured or modelled; empty where that is not known."""
    sources = row.get("sources") or {}
    return " and ".join(sorted({str(sources[key]) for key in ("step_time_ms", "speedup") if key in sources}))


def note_of(row: Row) -> str:
    """Return why a row's policy failed, or is not the answer; empty for nothing to say."""
    return str(row.get("reason") or ("" if row.get("status", "ok") == "ok" else row["status"]))


def over_16bit(rows: Iterable[Row]) -> bool:
    """Say whether gains over 16 bit are known of any row: then a GPU is the target."""
    return any(number(row.get("speedup_over_16bit")) is not None for row in rows)


def headings(*, over_16bit: bool, over: str = "the script", written: str = "", metric: str = "") -> tuple[str, ...]:
    """Return the headings of :func:`row_cells`.

    Args:
        over_16bit: whether gains over 16 bit have a column.
        over: what speed-ups are over.
        written: the dtype of the script's own products.
        metric: what divergences are of, where not of the losses.
    """
    first, _, *labels = (gap_name(metric) if name == "divergence" else METRICS[name].label for name in _COLUMNS)
    speed = f"over {over} ({written})" if written else f"over {over}"
    return ("", first, speed, *labels) if over_16bit else ("", "speed", *labels)


def row_cells(row: Row, *, over_16bit: bool) -> tuple[str, ...]:
    """Return the cells of a row: name, speed-ups, step time, memory, divergence, gradient error."""
    seeds = int(number(row.get("seeds")) or 0)
    name = str(row.get("name", "?"))
    columns = _COLUMNS if over_16bit else _COLUMNS[1:]
    return (f"{name} ({counted(seeds, 'seed')})" if seeds else name, *(shown(metric, row) for metric in columns))
