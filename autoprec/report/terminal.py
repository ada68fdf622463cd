"""The final table on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import note_of

if TYPE_CHECKING:
    from rich.table import Table


def terminal_table(result: SearchResult) -> Table:
    """Return a rich table: the policy, the reference and the presets, with speed, memory, divergence ± confidence."""
    from rich.table import Table

    table = Table(title=result.title, caption="; ".join(result.facts()), title_justify="left")
    titles, rows = result.comparison()
    for index, heading in enumerate(titles):
        table.add_column(
            heading, justify="left" if index == 0 else "right", overflow="fold" if index == 0 else "ellipsis"
        )
    for row, (name, *cells) in rows:
        note = f" ({text})" if (text := note_of(row)) else ""
        style = (
            "bold green"
            if row["role"] == "best" and result.verdict == "adopt"
            else "bold"
            if row["role"] == "reference"
            else ""
        )
        table.add_row(name + note, *cells, style=style)
    return table
