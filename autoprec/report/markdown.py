"""The report as Markdown: for a pull request, a wiki, or a run's description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from autoprec.report.summary import Summary, important, metrics_row, summarise
from autoprec.report.text import duration, gradient_limit, headings, percent, row_cells, search_time
from autoprec.support.files import write_atomic
from autoprec.support.text import markdown_text, visible
from autoprec.support.units import counted
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---" if index == 0 else "---:" for index in range(len(headings))]
    return ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (headings, marks, *rows)]


def _cost(summary: Summary) -> list[str]:
    cost = summary.payback
    runs = f"{counted(cost.trials, 'trial')}, {counted(cost.runs, 'run')} in all"
    lines = [f"The search took {search_time(cost)}, {runs}."]
    lines[0] += f" It {cost.stopped}." if cost.stopped else ""
    if cost.saved_share is not None:
        lines[0] += f" The policy saves {percent(cost.saved_share)} of the time of {cost.against}"
        paid = f"; it has paid for itself after {duration(cost.break_even_s)} of training" if cost.break_even_s else ""
        lines[0] += f"{paid or ' (modelled)'}."
    return lines


def _reasons(result: SearchResult) -> list[str]:
    """Return why each kind of layer got its precision, and what mattered."""
    layers, decisions = result.explanation.get("layers", ()), important(result)
    lines = ["", "## Why", ""] if layers or decisions else []
    if layers:
        lines += _table(("layers", "why"), [(f"`{row['layers']}`", str(row["text"])) for row in layers])
    if decisions:
        shares = [(f"`{name}`", time, gap) for name, time, gap in decisions]
        lines += ["", *_table(("decision", "of what moves time", "of what moves divergence"), shares)]
    return lines


def markdown(result: SearchResult, records: Sequence[Run]) -> str:
    """Return the report's text."""
    summary = summarise(result, records)
    lines = [f"# AutoPrec: {markdown_text(summary.title)}", ""]
    lines += [f"**{summary.verdict.capitalize()}.** {markdown_text(summary.reason)}", ""]
    facts = [f"target {result.target or 'this machine'}", "script " + markdown_text(f"`{Path(result.script).name}`")]
    facts += [f"noise floor {percent(summary.noise_floor)}"] if summary.noise_floor is not None else []
    facts += [f"divergence budget {percent(summary.limit)}"] if summary.limit is not None else []
    facts += list(filter(None, [gradient_limit(summary)]))
    facts += [f"times {summary.source}"] if summary.source else []
    lines += ["; ".join(facts).capitalize() + ".", ""]
    over = summary.baseline is not None
    lines += _table(("what", *headings(over_16bit=over)[1:]), [row_cells(row, over_16bit=over) for row in summary.rows])
    if summary.assignment:
        lines += ["", "## Layer by layer", ""]
        lines += _table(("layers", "precision"), [(f"`{k}`", v) for k, v in summary.assignment.items()])
    lines += _reasons(result)
    if result.front:
        rows = [(str(row.get("name", "?")), *row_cells(metrics_row(row, "front"))[1:]) for row in result.front]
        lines += ["", "## The front", "", *_table(("what", *headings(over_16bit=False)[1:]), rows)]
    lines += ["", "## Cost", "", *_cost(summary)]
    if summary.failures:
        lines += [
            "",
            "## Trials that failed",
            "",
            *[f"- {markdown_text(f'{name}: {reason}')}" for name, reason in summary.failures[:20]],
        ]
    if result.notes:
        lines += ["", "## Notes", "", *[f"- {markdown_text(note)}" for note in result.notes]]
    if result.policy and result.verdict == "adopt":
        lines += [
            "",
            "## Use it",
            "",
            "```python",
            f"autoprec.load({json.dumps(visible(result.policy))}).apply(model)",
            "```",
        ]
    return "\n".join(lines) + "\n"


def write_markdown(path: Path | str, result: SearchResult, records: Sequence[Run]) -> Path:
    """Write the report as Markdown, atomically."""
    return write_atomic(path, markdown(result, records))
