"""The verdict, and what a search cost, in words: one place, so that page and terminal agree."""

from __future__ import annotations

from autoprec.reports.summary import Summary
from autoprec.support.redact import redact_text
from autoprec.support.units import counted, span_text
from autoprec.tuning.decide.sentences import Reason, statements
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import percent


def verdict_lines(result: SearchResult) -> list[str]:
    """Return why the answer is what it is: the verdict in one line, then its caveats; at least one, maybe empty."""
    lines = statements([Reason.from_json(reason) for reason in result.reasons]) if result.reasons else [result.reason]
    return [redact_text(line) for line in lines]


def cost_text(summary: Summary) -> str:
    """What the search took, over all of its sessions, why it ended, and when it is earned back."""
    result = summary.result
    trials, sessions = sum(result.trials.values()), int(result.timings.get("sessions", 1))
    took = span_text(result.seconds) + (f" over {sessions} sessions" if sessions > 1 else "")
    text = f"The search took {took} for {counted(trials, 'trial')}, {counted(summary.runs, 'run')} in all."
    text += f" It {result.stopped}." if result.stopped else ""
    if summary.saved_share is None:
        return text
    against = "a training run in 16 bit" if result.best.get("speedup_over_16bit") else "a training run"
    text += f" The policy saves {percent(summary.saved_share)} of the time of {against}"
    if summary.break_even_s is None:
        return f"{text} (modelled for another machine, so no payback time is given)."
    paid = span_text(summary.break_even_s)
    return f"{text}; it has paid for itself in a run that would have taken {paid} without it."
