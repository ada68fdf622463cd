"""Click options from the table of :mod:`autoprec.tuning.options`, and the few that several commands share.

Commands that run a script's training under a policy take ``--backend``; those that print a document take ``--json``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autoprec.errors import AutoPrecError, FileError
from autoprec.support import amounts
from autoprec.tuning.options import OPTIONS, PRINTED, Option

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # which is generic from click 8.2 on


def _reader(about: Option) -> Callable[[click.Context, click.Parameter, Any], Any] | None:
    """Return the click callback of an option that is not taken as it is."""
    if about.is_flag and about.default:
        return lambda _context, _parameter, given: not given  # the flag takes it away
    if not about.parse:
        return None

    def parsed(_context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        try:
            return getattr(amounts, about.parse)(value)
        except AutoPrecError as error:
            raise click.BadParameter(f"{error.what}; {error.fix}", param=parameter) from error

    return parsed


class _Words(_Choice):
    """A choice of words that takes further ones, which stand for one of them and are not shown."""

    def __init__(self, about: Option) -> None:
        super().__init__(about.choices)
        self._also = about.also

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word that was meant."""
        return super().convert(self._also.get(value, value), param, ctx)


def _shown(about: Option) -> Any:
    """Return the default as a person writes it."""
    return f"{100 * about.default:g}%" if about.parse == "parse_share" and about.default else about.default


def of_search(name: str, **changes: Any) -> Callable[[F], F]:
    """Return an option of ``autoprec search`` for any command; ``changes`` are what it has otherwise there."""
    about = OPTIONS[name]
    kind: dict[str, Any] = {"default": _shown(about), "show_default": bool(about.default)}
    if about.is_flag:
        kind = {"is_flag": True}
    elif isinstance(about.default, tuple):
        kind = {"multiple": True}
    elif about.choices:
        kind["type"] = _Words(about)
    elif not about.parse and about.default is not None:
        kind["type"] = type(about.default)
    if about.metavar:
        kind["metavar"] = about.metavar
    kind |= {"help": about.help, "hidden": about.hidden, "callback": _reader(about), "envvar": about.envvar or None}
    spellings = [spelling for spelling in (about.flag, about.short) if spelling]
    return click.option(*spellings, name, **(kind | changes))


def search_options(function: F) -> F:
    """Give a command every option of a search, in the order of the table."""
    for name in reversed(OPTIONS):
        function = of_search(name)(function)
    return function


def search_groups() -> dict[str, list[str]]:
    """Return heading -> the options that ``autoprec search --help`` shows under it."""
    found: dict[str, list[str]] = {}
    for about in OPTIONS.values():
        if not about.hidden:
            found.setdefault(about.group, []).append(about.flag)
    return found | {PRINTED: ["--dry-run", "--json", "--quiet", "--verbose"]}


def as_json(what: str) -> Callable[[F], F]:
    """Return ``--json``, received as ``as_json``; ``what`` is printed then."""
    return click.option("--json", "as_json", is_flag=True, help=f"{what} as JSON on stdout.")


def check_absent(path: Path, *, force: bool) -> None:
    """Refuse to overwrite what is there already.

    Raises:
        FileError: it is, and ``force`` is off.
    """
    if path.exists() and not force:
        raise FileError("this file exists", where=str(path), fix="choose another -o, or pass --force")


backend = of_search("backend")
force = click.option("--force", is_flag=True, help="Overwrite files that exist.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress.")
