"""The report as Markdown: for a pull request, a wiki, or a run's description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from autoprec.report.summary import summarise
from autoprec.report.text import cost_text, variant_cells, verdict_lines
from autoprec.support.files import write_atomic
from autoprec.support.text import markdown_text, visible
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---" if index == 0 else "---:" for index in range(len(headings))]
    return ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (headings, marks, *rows)]


def verdict(result: SearchResult) -> list[str]:
    """Return the verdict as lines: one, and a list of its caveats."""
    first, *caveats = verdict_lines(result)
    listed = ["", *(f"- {markdown_text(line)}" for line in caveats)] if caveats else []
    return [f"**{result.verdict.capitalize()}.** {markdown_text(first)}", *listed]


def comparison(result: SearchResult) -> list[str]:
    """Return the table of the policy, the script as written and the presets, as lines."""
    titles, rows = result.comparison()
    return _table(("what", *titles[1:]), [cells for _, cells in rows])


def why(result: SearchResult, most: int | None = None) -> list[str]:
    """Return as lines why each kind of layer got its precision (the first ``most`` kinds)."""
    rows = [(f"`{row['layers']}`", str(row["text"])) for row in result.explanation.get("layers", ())[:most]]
    return ["", "## Why", "", *_table(("layers", "why"), rows)] if rows else []


def markdown(result: SearchResult, records: Sequence[Run]) -> str:
    """Return the report's text."""
    summary = summarise(result, records)
    lines = [f"# AutoPrec: {markdown_text(result.study_name or 'study')}", ""]
    lines += [*verdict(result), ""]
    about = [f"target {result.target or 'this machine'}", "script " + markdown_text(f"`{Path(result.script).name}`")]
    lines += ["; ".join(about + result.facts()).capitalize() + ".", ""]
    lines += comparison(result)
    if summary.assignment:
        lines += ["", "## Layer by layer", ""]
        lines += _table(("layers", "precision"), [(f"`{k}`", v) for k, v in summary.assignment.items()])
    lines += why(result)
    if result.front:
        titles, rows = result.comparison(result.front)
        named = [(str(row.get("name", "?")), *cells[1:]) for row, cells in rows]
        lines += ["", "## The front", "", *_table(("what", *titles[1:]), named)]
    if result.variants:
        lines += ["", "## Variants", "", *_table(*variant_cells(result))]
    lines += ["", "## Cost", "", cost_text(summary)]
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
