"""docs/cli.md is written from the commands: every option, its default, headings, examples."""

from __future__ import annotations

import click

from autoprec.cli import COMMANDS, cli
from autoprec.cli.options import search_groups
from autoprec.cli.scripts.search import EXAMPLES
from tests.documents import reference

TEXT = reference().split("<!--")[0]


def test_every_command_and_option_is_there() -> None:
    for name in COMMANDS:
        assert f"\n## {name}\n" in TEXT
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        section = TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert all(f"`{text}`" in section for text in param.opts), param.name


def test_options_in_groups_are_tables_of_their_own_and_examples_follow() -> None:
    section = TEXT.split("\n## search\n")[1].split("\n## ")[0]
    for heading in search_groups():
        assert f"| {heading} | default | |" in section
    assert "\n".join(EXAMPLES) in section
    assert "| `--trials` N | `30` |" in section


def test_a_bar_in_a_help_text_does_not_end_its_cell() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert rows
    assert all(line.replace("\\|", "").count("|") == 4 for line in rows)
