"""Tables and consoles of the commands that print for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["plain_table", "stdout_console"]

#: Columns of a table that goes to a file or a pipe, where there is no terminal to ask.
PIPE_WIDTH = 160


def stdout_console() -> Console:
    """Return a console on stdout that honours NO_COLOR and does not fold tables at 80 columns in a pipe."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, no_color=bool(os.environ.get("NO_COLOR")), width=width)


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of plain text; the first column, a name, is never folded."""
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=index == 0, overflow="ellipsis" if index == 0 else "fold")
    for row in rows:
        table.add_row(*(Text(cell, style="red" if cell == "NO" else "") for cell in row))
    return table
