"""The final table on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import headings, note_of, over_16bit, row_cells

if TYPE_CHECKING:
    from rich.table import Table


def terminal_table(result: SearchResult) -> Table:
    """Return a rich table: the policy, the reference and the presets, with speed, memory, divergence ± confidence."""
    from rich.table import Table

    table = Table(title=result.title, caption="; ".join(result.facts()), title_justify="left")
    over = over_16bit(result.rows())
    for index, heading in enumerate(headings(over_16bit=over)):
        table.add_column(
            heading, justify="left" if index == 0 else "right", overflow="fold" if index == 0 else "ellipsis"
        )
    for row in result.rows():
        cells = list(row_cells(row, over_16bit=over))
        if note := note_of(row):
            cells[0] += f" ({note})"
        style = (
            "bold green"
            if row["role"] == "best" and result.verdict == "adopt"
            else "bold"
            if row["role"] == "reference"
            else ""
        )
        table.add_row(*cells, style=style)
    return table
