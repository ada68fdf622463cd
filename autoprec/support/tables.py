"""One table, three readers: plain text (``print``), rich (a terminal), HTML (a notebook).

Policies, audits and results of a search say what their table holds; :class:`Shown` shows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from autoprec.support.text import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Cells that a reader must not overlook.
_ALARMING = ("NO",)


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text, a line above, and lines below."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return aligned columns; the last is as long as it is."""
        rows = [self.headings, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.headings) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in rows
        ]
        return "\n".join(filter(None, [self.title, *lines, *self.notes]))

    def html(self) -> str:
        """Return a table of plain HTML; text of others is escaped, and what would act is spelled."""

        def cells(row: tuple[str, ...], tag: str) -> str:
            shown = (f"<b>{c}</b>" if c in _ALARMING else escape(visible(c)) for c in row)
            return "<tr>" + "".join(f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in shown) + "</tr>"

        head = f"<caption>{escape(visible(self.title))}</caption>" if self.title else ""
        body = "".join(cells(row, "td") for row in self.rows)
        below = "".join(f"<div>{escape(visible(note))}</div>" for note in self.notes)
        return f"<table>{head}<thead>{cells(self.headings, 'th')}</thead><tbody>{body}</tbody></table>{below}"

    def rich(self) -> RenderableType:
        """Return what ``rich.print`` and consoles draw."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for index, heading in enumerate(self.headings):
            table.add_column(heading, no_wrap=index == 0, overflow="ellipsis" if index == 0 else "fold")
        for row in self.rows:
            table.add_row(*(Text(visible(cell), style="red" if cell in _ALARMING else "") for cell in row))
        above = [Text(visible(self.title), style="bold")] if self.title else []
        return Group(*above, table, *(Text(visible(note)) for note in self.notes))


class Shown(ABC):
    """Has a table, and shows it wherever it is printed."""

    __slots__ = ()

    @abstractmethod
    def table(self) -> Table:
        """Return the table."""

    def __str__(self) -> str:
        return self.table().text()

    def __rich__(self) -> RenderableType:
        return self.table().rich()

    def _repr_html_(self) -> str:
        return self.table().html()
