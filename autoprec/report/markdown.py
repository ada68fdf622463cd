"""What a search found as lines of Markdown, for a run's description in MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.report.text import verdict_lines
from autoprec.support.text import markdown_text
from autoprec.tuning.study.records import SearchResult


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
