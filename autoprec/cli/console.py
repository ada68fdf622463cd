"""What the commands print with: consoles that honour NO_COLOR, plain tables, clocks and JSON.

Machine output goes to stdout and nothing else does; whatever happens meanwhile is told on stderr
(:mod:`autoprec.cli.phases`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from autoprec.support.tables import Table
from autoprec.support.text import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

#: Columns of a table that goes to a file or a pipe, where there is not a terminal to ask.
PIPE_WIDTH = 160


def _console(**settings: Any) -> Console:
    """Return a console that spells out what would act on the terminal in any text; styles and tables are rich's own."""
    from rich.console import Console
    from rich.segment import Segment

    class Spelling(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return Spelling(highlight=False, no_color=bool(os.environ.get("NO_COLOR")), **settings)


def stdout_console() -> Console:
    """Return a console on stdout that honours NO_COLOR and does not fold tables at 80 columns in a pipe."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return _console(width=width)


def stderr_console() -> Console:
    """Return a console on stderr that honours NO_COLOR and leaves long lines to the terminal."""
    return _console(stderr=True, soft_wrap=True)


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> RenderableType:
    """Return a table of plain text; the first column, a name, is never folded.

    Args:
        headings: of the columns.
        rows: of as many cells each.
        title: above the table; empty for none.
    """
    return Table(tuple(headings), tuple(map(tuple, rows)), title).rich()


def print_json(document: Any, *, indent: int | None = None) -> None:
    """Print a document on stdout as strict JSON; what is not a finite number is null, as in every file we write."""
    from autoprec.support.files import finite

    click.echo(json.dumps(finite(document), indent=indent, allow_nan=False))


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss``."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def command_began() -> float:
    """Return the ``time.monotonic()`` at which the command was started.

    Now, where it is not known: in a call from Python.
    """
    context = click.get_current_context(silent=True)
    return context.obj if context is not None and isinstance(context.obj, float) else time.monotonic()
