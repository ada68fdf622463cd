"""Figures as people read them; one place, so that the terminal, the page, Markdown and MLflow agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprec.report.summary import Summary, number
from autoprec.support.units import counted, percent_text
from autoprec.tuning.decide.sentences import error_text
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import METRICS

MISSING = "–"
#: Columns of the comparison behind the name: metrics, and the first one where a 16-bit run was measured.
_COLUMNS = ("speedup_over_16bit", "speedup", "step_time_ms", "memory_bytes", "divergence", "gradient_error")


def shown(metric: str, row: Mapping[str, Any]) -> str:
    """Return a metric of a row, a divergence with the half width of its interval; a dash where it is unknown."""
    value, half = number(row.get(metric)), number(row.get("interval"))
    if value is None:
        return MISSING
    if metric == "divergence":
        return percent_text(value, half)
    predicted = row.get(f"{metric}_source") == "predicted"
    return f"~ {METRICS[metric].text(value)}" if predicted else METRICS[metric].text(value)


def percent(value: float | None) -> str:
    """A fraction as a percentage."""
    return MISSING if value is None else percent_text(value)


def facts(summary: Summary) -> list[str]:
    """Return noise floor, limits and where figures come from, as far as they are known; and what ``~`` means."""
    out = [f"noise floor {percent(summary.noise_floor)}"] if summary.noise_floor is not None else []
    out += [f"divergence budget {percent(summary.limit)}"] if summary.limit is not None else []
    if summary.gradient_limit is not None:
        predicted = any(row.get("gradient_error_source") == "predicted" for row in summary.rows)
        limit = error_text(summary.gradient_limit, summary.gradient_noise)
        out.append(f"gradient error at most {limit}{'; ~ predicted' if predicted else ''}")
    return out + ([f"times and memory {summary.source}"] if summary.source else [])


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def cost_text(result: SearchResult, summary: Summary) -> str:
    """What the search took, over all of its sessions, why it ended, and when it is earned back."""
    trials, sessions = sum(result.trials.values()), int(result.timings.get("sessions", 1))
    took = duration(result.seconds) + (f" over {sessions} sessions" if sessions > 1 else "")
    text = f"The search took {took} for {counted(trials, 'trial')}, {counted(summary.runs, 'run')} in all."
    text += f" It {result.stopped}." if result.stopped else ""
    if summary.saved_share is None:
        return text
    against = "a training run in 16 bit" if result.best.get("speedup_over_16bit") else "a training run"
    text += f" The policy saves {percent(summary.saved_share)} of the time of {against}"
    if summary.break_even_s is None:
        return f"{text} (modelled for another machine, so no payback time is given)."
    return f"{text}; it has paid for itself in a run that would have taken {duration(summary.break_even_s)} without it."


def headings(*, over_16bit: bool) -> tuple[str, ...]:
    """Return the headings of :func:`row_cells`."""
    labels = [METRICS[name].label for name in _COLUMNS]
    return ("", *labels) if over_16bit else ("", "speed", *labels[2:])


def row_cells(row: Mapping[str, Any], *, over_16bit: bool = False) -> tuple[str, ...]:
    """Return the cells of one comparison row: name, speed-ups, step time, memory, divergence, gradient error."""
    seeds = int(number(row.get("seeds")) or 0)
    name = str(row.get("name", "?"))
    columns = _COLUMNS if over_16bit else _COLUMNS[1:]
    return (f"{name} ({counted(seeds, 'seed')})" if seeds else name, *(shown(metric, row) for metric in columns))
