"""The final table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoprec.report.summary import summarise
from autoprec.report.text import headings, percent, row_cells
from autoprec.tuning.study.records import SearchResult, TrialRecord

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["terminal_table"]


def terminal_table(result: SearchResult, records: Sequence[TrialRecord]) -> Table:
    """Return a rich table: the policy, the reference and the presets, with speed, memory, divergence ± confidence."""
    from rich.table import Table

    summary = summarise(result, records)
    notes = [f"noise floor {percent(summary.noise_floor)}"] if summary.noise_floor is not None else []
    notes += [f"budget {percent(summary.limit)}"] if summary.limit is not None else []
    notes += [f"times and memory {summary.source}"] if summary.source else []
    table = Table(
        title=f"{summary.title} on {result.target or 'this machine'}", caption="; ".join(notes), title_justify="left"
    )
    over = summary.baseline is not None
    for index, heading in enumerate(headings(over_16bit=over)):
        table.add_column(
            heading, justify="left" if index == 0 else "right", overflow="fold" if index == 0 else "ellipsis"
        )
    for row in summary.rows:
        cells = list(row_cells(row, over_16bit=over))
        if row.note:
            cells[0] += f" ({row.note})"
        style = (
            "bold green"
            if row.role == "best" and summary.verdict == "adopt"
            else "bold"
            if row.role == "reference"
            else ""
        )
        table.add_row(*cells, style=style)
    return table
