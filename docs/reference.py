"""Writes docs/cli.md from the commands themselves, so that the page cannot fall behind: ``make docs``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import click

from autoprec.cli import COMMANDS, cli
from autoprec.cli.script import TakesScript

__all__ = ["reference"]

_HEAD = """\
# Command line

```text
autoprec COMMAND [options] ...
```

Commands that take a script take everything after their own options as the script's command line: `train.py [args]`,
`-m package.module [args]`, or `-- torchrun ... train.py [args]`. Options are spelled with dashes; underscores are
accepted. Machine output (`--json`) goes to stdout, progress and errors to stderr. See
[exit codes](#exit-codes) and [environment variables](#environment-variables).

Tab completion: put the line for your shell into its start-up file, `~/.bashrc`, `~/.zshrc` or
`~/.config/fish/completions/autoprec.fish`:

```text
eval "$(_AUTOPREC_COMPLETE=bash_source autoprec)"
eval "$(_AUTOPREC_COMPLETE=zsh_source autoprec)"
_AUTOPREC_COMPLETE=fish_source autoprec | source
```

This page is written by `make docs` from the commands themselves.
"""


def _sentence(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _option_row(option: click.Option, context: click.Context) -> str:
    names = " ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}".replace("|", "\\|")
    default = ""
    if option.required:
        default = "required"
    elif option.show_default and not option.is_flag and option.default is not None:
        default = f"`{option.default}`"
    return f"| {names}{value} | {default} | {_sentence(option.help or '')} |"


def _rare(command: click.Command) -> list[click.Option]:
    """Return the options that ``--help`` leaves out."""
    return [param for param in command.params if isinstance(param, click.Option) and param.hidden]


def _section(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=f"autoprec {name}", parent=None)
    usage = " ".join([f"autoprec {name}", *command.collect_usage_pieces(context)])
    lines = [f"## {name}", "", "```text", usage, "```", "", *inspect.cleandoc(command.help or "").split("\n"), ""]
    for heading, options in _groups(command, context).items():
        if options:
            lines += [f"| {heading} | default | |", "|---|---|---|"]
            lines += [_option_row(option, context) for option in options] + [""]
    examples = command.examples if isinstance(command, TakesScript) else ()
    return lines + (["```sh", *examples, "```", ""] if examples else [])


def _groups(command: click.Command, context: click.Context) -> dict[str, list[click.Option]]:
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    shown = {"option": options}
    if isinstance(command, TakesScript) and command.groups:
        found = command.grouped(context)
        shown = {heading: [param for param in params if param in options] for heading, params in found.items()}
    return shown | {"Rarely needed, not shown by `--help`": _rare(command)}


#: The line of docs/cli.md after which people write: it and all behind it stays as it is.
_BY_HAND = "<!-- What follows is written by hand; `make docs` keeps it. -->"


def reference() -> str:
    """Return the Markdown text of docs/cli.md: every command, then what the page holds that is written by hand."""
    group_context = click.Context(cli, info_name="autoprec")
    lines = [_HEAD]
    for name in COMMANDS:
        command = cli.get_command(group_context, name)
        if command is not None:
            lines += _section(name, command)
    written = (Path(__file__).parent / "cli.md").read_text(encoding="utf-8").partition(_BY_HAND)
    return "\n".join([*lines, "".join(written[1:])]).rstrip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
