"""The verdict, spans of time, and what a search cost, in words: one place, so that page, Markdown, terminal agree."""

from __future__ import annotations

from autoprec.report.summary import Summary
from autoprec.support.redact import redact_text
from autoprec.support.units import counted
from autoprec.tuning.decide.sentences import Reason, statements
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import percent


def verdict_lines(result: SearchResult) -> list[str]:
    """Return why the answer is what it is: the verdict in one line, then its caveats; at least one, maybe empty."""
    reasons = statements([Reason.from_json(reason) for reason in result.reasons])
    return [redact_text(line) for line in reasons or [result.reason]]


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def cost_text(summary: Summary) -> str:
    """What the search took, over all of its sessions, why it ended, and when it is earned back."""
    result = summary.result
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
