"""The final table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoprec.report.summary import note_of, summarise
from autoprec.report.text import facts, headings, row_cells
from autoprec.support.tables import Table as Plain
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run

if TYPE_CHECKING:
    from rich.table import Table


def result_table(result: SearchResult) -> Plain:
    """Return the same rows as text, for what has a result and not its trials: ``print(result)``, a notebook."""
    summary = summarise(result, ())
    over = summary.over_16bit
    rows = tuple(tuple(row_cells(row, over_16bit=over)) for row in summary.rows)
    notes = ("; ".join(facts(summary)), f"verdict: {result.verdict}. {result.reason}")
    title = f"{summary.title} on {result.target or 'this machine'}"
    return Plain(headings(over_16bit=over), rows, title, tuple(filter(None, notes)))


def terminal_table(result: SearchResult, records: Sequence[Run]) -> Table:
    """Return a rich table: the policy, the reference and the presets, with speed, memory, divergence ± confidence."""
    from rich.table import Table

    summary = summarise(result, records)
    table = Table(
        title=f"{summary.title} on {result.target or 'this machine'}",
        caption="; ".join(facts(summary)),
        title_justify="left",
    )
    over = summary.over_16bit
    for index, heading in enumerate(headings(over_16bit=over)):
        table.add_column(
            heading, justify="left" if index == 0 else "right", overflow="fold" if index == 0 else "ellipsis"
        )
    for row in summary.rows:
        cells = list(row_cells(row, over_16bit=over))
        if note := note_of(row):
            cells[0] += f" ({note})"
        style = (
            "bold green"
            if row["role"] == "best" and summary.verdict == "adopt"
            else "bold"
            if row["role"] == "reference"
            else ""
        )
        table.add_row(*cells, style=style)
    return table
