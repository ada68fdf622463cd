"""Lines on stdout and stderr. They may hold names of anybody's: a terminal shows those, and obeys none of them."""

from __future__ import annotations

import click

from autoprec.support.text import visible


def echo(line: str, *, err: bool = False) -> None:
    """Print a line as :func:`click.echo` does, characters that act on a terminal spelled out."""
    click.echo(visible(line), err=err)
