"""The command line is frozen: a new command or option is a deliberate change of this list."""

import click
import pytest

from autoprec.cli import COMMANDS, cli
from autoprec.cli.script import TakesScript
from autoprec.tuning.options import OPTIONS
from tests.cli.helpers import autoprec

SURFACE = {
    "demo": "",
    "search": " ".join([about.flag for about in OPTIONS.values() if not about.hidden])
    + " --dry-run --json --quiet --verbose",
    "inspect": "--json --policy --sensitivity --space --target",
    "estimate": "--batch --config --cost-scale --json --policy --recompute --seq --shards --space --target",
    "run": "--audit --backend --policy",
    "check": "--backend --json --numerics --policy --sensitivity --steps --strict",
    "verify": "--backend --json --max-change --max-divergence --max-gradient-error --policy --seeds --steps",
    "transfer": ("--batch --force --from --json --output --role --seq --spot --target"),
    "show": "--lean --json --schema",
    "lint": "--baseline --format --json --strict --target",
    "export": "--allow-lossy --force --layers --output --to",
    "doctor": "--json --targets",
    "ui": "--port --sync",
}
TAKES_SCRIPT = {"search", "inspect", "estimate", "run", "check", "verify", "lint"}


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def options(name: str) -> list[click.Option]:
    """Return what ``--help`` shows; a hidden option is for command lines that AutoPrec itself prints."""
    return [param for param in command(name).params if isinstance(param, click.Option) and not param.hidden]


def test_the_commands_are_exactly_these() -> None:
    assert list(COMMANDS) == list(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_the_options_are_exactly_these(name: str) -> None:
    found = {text for option in options(name) for text in (*option.opts, *option.secondary_opts)}
    assert {text for text in found if text.startswith("--")} == set(SURFACE[name].split())


@pytest.mark.parametrize("name", SURFACE)
def test_every_command_and_option_explains_itself(name: str) -> None:
    assert command(name).help
    silent = [option.opts[0] for option in options(name) if not option.help]
    assert silent == []


@pytest.mark.parametrize("name", SURFACE)
def test_help_works_and_costs_no_torch(name: str) -> None:
    found = autoprec(name, "--help")
    assert found.code == 0
    assert found.out.startswith(f"Usage: autoprec {name} ")


def test_commands_that_take_a_script_take_it_the_same_way() -> None:
    assert {name for name in SURFACE if isinstance(command(name), TakesScript)} == TAKES_SCRIPT


@pytest.mark.parametrize("name", sorted(TAKES_SCRIPT))
def test_a_script_that_does_not_exist_is_exit_2_everywhere(name: str, tmp_path: object) -> None:
    policy = f"{tmp_path}/p.yaml"
    with open(policy, "w", encoding="utf-8") as stream:
        stream.write("schema: autoprec.policy/1\n")
    needed = ["--policy", policy] if "--policy" in SURFACE[name] else []
    found = autoprec(name, *needed, "nowhere/train.py", "--lr", "1")
    assert found.code == 2, found.err
    assert "nowhere/train.py" in found.err


def test_words_that_mean_the_same_are_spelled_the_same() -> None:
    """One spelling per idea across commands: seconds are --timeout, machine output --json, the file --output."""
    words = {word for line in SURFACE.values() for word in line.split()}
    assert not words & {"--out", "--time-limit", "--policy-file", "--n-trials", "--study-name"}


def test_a_person_can_read_the_whole_surface() -> None:
    assert len(SURFACE) <= 15
    assert len(SURFACE["search"].split()) <= 31
    assert sum(len(line.split()) for line in SURFACE.values()) <= 90
