"""Shared options mean the same in every command that has them."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from autoprec.cli import COMMANDS, cli, options
from tests.cli.helpers import autoprec


def found(name: str) -> dict[str, tuple[object, str | None]]:
    """Return command -> (default, help) of every command that has an option."""
    out = {}
    for command_name in COMMANDS:
        command = cli.get_command(click.Context(cli), command_name)
        assert command is not None
        for param in command.params:
            if isinstance(param, click.Option) and name in param.opts:
                out[command_name] = (param.default, param.help)
    return out


@pytest.mark.parametrize("name", ["--backend"])
def test_one_default_and_one_text_per_option(name: str) -> None:
    commands = found(name)
    assert len(commands) >= 2
    assert len(set(commands.values())) == 1, commands


def test_json_always_says_where_it_goes() -> None:
    for name, (_, text) in found("--json").items():
        assert str(text).rstrip(".").endswith(("on stdout", "on stdout as well")), name


def test_a_value_that_cannot_be_parsed_names_its_option_and_the_fix() -> None:
    @click.command()
    @options.of_search("max_divergence")
    def command(max_divergence: float) -> None:
        click.echo(repr(max_divergence))

    assert CliRunner().invoke(command, []).output == "0.0025\n"
    bad = CliRunner().invoke(command, ["--max-divergence", "much"])
    assert bad.exit_code == 2
    assert "--max-divergence" in bad.output
    assert "0.25%" in bad.output


def test_a_word_that_stands_for_another_is_taken_and_not_shown() -> None:
    taken, refused = (autoprec("search", "--sampler", word, "nowhere.py") for word in ("ours", "our"))
    assert "no such script" in taken.err
    assert "'knapsack', 'tpe', 'random'" in refused.err
