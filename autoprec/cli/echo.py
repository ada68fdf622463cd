"""Lines on stdout and stderr. Names from files and scripts are shown on a terminal, never obeyed."""

from __future__ import annotations

import click

from autoprec.support.text import visible


def echo(line: str, *, err: bool = False) -> None:
    """Print a line as :func:`click.echo` does, characters that act on a terminal spelled out."""
    click.echo(visible(line), err=err)
