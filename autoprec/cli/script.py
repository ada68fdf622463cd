"""How a command takes a training script: everything after our own options belongs to the script.

``autoprec search [options] train.py [script args]``, ``-m package.module [args]``, or ``-- torchrun ... train.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from autoprec.cli.echo import echo
from autoprec.errors import ScriptError

#: Options that hardly any training script has: after the script's name they are probably in the wrong place.
OURS_ALONE = frozenset(
    {
        *("--trials", "--space", "--study", "--storage", "--sampler", "--target", "--cost-scale"),
        *("--max-divergence", "--max-change", "--max-gradient-error", "--max-memory", "--policy", "--budget"),
    }
)

#: Where a command keeps its option strings between reading its arguments and running.
_TAKES = "autoprec.takes_value"
#: How the parsers of arguments that scripts use refuse one: argparse, click, absl, transformers.
_REFUSED = re.compile(
    r"unrecogni[sz]ed|no such option|unknown (?:command.line )?(?:option|flag|argument)|not used by", re.I
)

F = TypeVar("F", bound=Callable[..., Any])


def split_script(args: list[str], takes_value: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Split a command line into (our options, the script's tokens).

    Args:
        args: the tokens after the command's name.
        takes_value: every option string of the command (dashed), and whether a value follows it.

    The script begins at ``--``, at ``-m``, or at the first token that is neither an option nor the value of one.
    What begins there is passed on untouched, whatever it looks like; a leading ``--`` stays, for it says "launcher".
    """
    index = 0
    while index < len(args):
        token = args[index]
        if token == "--":
            return args[:index], args[index:] if len(args) > index + 1 else []
        if token == "-m" or not token.startswith("-") or token == "-":
            return args[:index], args[index:]
        name, equals, _ = token.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("_", "-")
        index += 2 if takes_value.get(name, False) and not equals else 1
    return args, []


def refused_options(output: str, script: Sequence[str], ours: Iterable[str]) -> list[str]:
    """Return those arguments of a script that its own parser refused, and that are options of the command.

    Args:
        output: the error, with what the script printed.
        script: the script's tokens.
        ours: every option string of the command, with its dashes.
    """
    said = " ".join(line for line in output.splitlines() if _REFUSED.search(line))
    given = dict.fromkeys(token.partition("=")[0] for token in script[1:])
    # absl leaves the dashes out
    return [
        name
        for name in given
        if name in ours and re.search(rf"(?<![\w-])(?:{name}|'{name.lstrip('-')}')(?![\w-])", said)
    ]


class TakesScript(click.Command):
    """A command whose last argument is a whole command line.

    Attributes:
        groups: heading -> options under it, in the order of ``--help``; empty for a command with few options.
        examples: command lines shown below them.
        takes: what the usage line says of the last argument.
    """

    groups: Mapping[str, Sequence[str]] = {}
    examples: Sequence[str] = ()
    takes = "train.py [SCRIPT ARGS]..."

    def grouped(self, ctx: click.Context) -> dict[str, list[click.Parameter]]:
        """Return the options by heading; those that no group names come last, under ``Options``."""
        left = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        out: dict[str, list[click.Parameter]] = {}
        for heading, names in self.groups.items():
            by_name = {name: param for param in left for name in param.opts}
            out[heading] = [by_name[name] for name in names]
            left = [param for param in left if param not in out[heading]]
        return out | {"Options": list(left)}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading, and the examples below them."""
        for heading, params in self.grouped(ctx).items():
            rows = [row for param in params if (row := param.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"{'':>{formatter.current_indent}}{line}\n" for line in self.examples))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read our own options, and leave the script's tokens untouched (:func:`split_script`).

        Raises:
            click.NoSuchOption: an unknown option before the script.
        """
        takes_value = {
            name: not (option.is_flag or option.count)
            for option in self.params
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        ctx.meta[_TAKES] = takes_value
        own, script = split_script(list(args), takes_value)
        late = [t for t in script[1:] if t.partition("=")[0] in OURS_ALONE & takes_value.keys()]
        try:
            return super().parse_args(ctx, [*own, "--", *script])
        except click.NoSuchOption as error:
            late = []  # what was taken for the script may be the value of the option that there is not
            message = f"{error.message} Arguments of the script itself come after the script's name."
            raise click.NoSuchOption(error.option_name, message, error.possibilities, error.ctx) from error
        finally:
            if late and script[0] != "--":
                echo(f"note: {late[0]} comes after the script, so it is the script's; ours come before it", err=True)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; where the script refuses an option that is one of ours, say where that belongs."""
        try:
            return super().invoke(ctx)
        except ScriptError as error:
            words = ctx.params.get("script", ())
            if misplaced := refused_options(error.what, words, ctx.meta[_TAKES]):
                named = " ".join(words[: 2 if words[0].startswith("-") else 1])
                own = f"autoprec {self.name} {' '.join(misplaced)} ... {named}"
                error.fix = f"options of autoprec come before the script: {own}"
            raise

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return what the usage line says after the command."""
        return ["[OPTIONS]", self.takes]


def script_command(
    name: str,
    *,
    required: bool = True,
    groups: Mapping[str, Sequence[str]] | None = None,
    examples: Sequence[str] = (),
    takes: str = TakesScript.takes,
    **settings: Any,
) -> Callable[[F], TakesScript]:
    """Declare a command whose function receives the script's tokens as ``script: tuple[str, ...]``.

    Use it as the outermost decorator, above the options.

    Args:
        name: of the command.
        required: whether there has to be a script.
        groups: heading -> options under it in ``--help``; None for one list.
        examples: command lines below the options.
        takes: what the usage line says of the script.
        settings: of :func:`click.command`.
    """

    def decorate(function: F) -> TakesScript:
        wrapped = click.argument("script", nargs=-1, required=required, type=click.UNPROCESSED)(function)
        command = click.command(name, cls=TakesScript, **settings)(wrapped)
        command.groups, command.examples, command.takes = groups or {}, examples, takes
        return command

    return decorate
