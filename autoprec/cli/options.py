"""Options that several commands share: one spelling, one default, one help text, one way to parse.

Commands that run a script's training under a policy take ``--backend``; those that print a document take ``--json``;
a search takes ``--max-divergence``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from autoprec.errors import AutoPrecError

F = TypeVar("F", bound=Callable[..., Any])


def parsed(parse: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a click callback that parses an option by a function of :mod:`autoprec.tuning.options`."""

    def callback(_context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        from autoprec.tuning import options

        try:
            return getattr(options, parse)(value)
        except AutoPrecError as error:
            raise click.BadParameter(f"{error.what}; {error.fix}", param=parameter) from error

    return callback


def as_json(what: str) -> Callable[[F], F]:
    """Return ``--json``, received as ``as_json``; ``what`` is printed then."""
    return click.option("--json", "as_json", is_flag=True, help=f"{what} as JSON on stdout.")


def timeout(until: str) -> Callable[[F], F]:
    """Return ``--timeout`` in seconds."""
    return click.option("--timeout", default=600.0, show_default=True, metavar="SECONDS", help=until)


backend = click.option("--backend", default="auto", show_default=True, metavar="NAME", help="Who runs the GEMMs.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress.")
max_divergence = click.option(
    "--max-divergence",
    default="0.25%",
    show_default=True,
    callback=parsed("parse_share"),
    metavar="SHARE",
    help="Largest acceptable mean relative loss gap.",
)
