"""Where our options end and the script's begin."""

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from autoprec.cli.script import OURS_ALONE, refused_options, script_command, split_script
from autoprec.errors import ScriptError

TAKES = {"--trials": True, "--max-divergence": True, "-o": True, "--json": False, "-q": False}


@pytest.mark.parametrize(
    ("line", "own", "script"),
    [
        ("train.py", "", "train.py"),
        ("train.py --trials 3 --json", "", "train.py --trials 3 --json"),
        ("--trials 3 train.py --lr 1", "--trials 3", "train.py --lr 1"),
        ("--trials=3 train.py", "--trials=3", "train.py"),
        ("--max_divergence 0.1 train.py", "--max_divergence 0.1", "train.py"),
        ("--json -q -o p.yaml train.py -o x", "--json -q -o p.yaml", "train.py -o x"),
        ("--json -m pkg.mod --lr 3", "--json", "-m pkg.mod --lr 3"),
        ("train.py -m fast", "", "train.py -m fast"),
        ("--json -- torchrun --nproc 2 train.py", "--json", "-- torchrun --nproc 2 train.py"),
        ("train.py -- x", "", "train.py -- x"),
        ("--trials", "--trials", ""),
        ("--", "", ""),
        ("", "", ""),
    ],
)
def test_the_split(line: str, own: str, script: str) -> None:
    assert split_script(line.split(), TAKES) == (own.split(), script.split())


@given(st.lists(st.sampled_from(["--json", "-q", "--x", "-m", "--", "train.py", "a b", "-o"]), max_size=6))
def test_a_scripts_own_arguments_are_never_touched(arguments: list[str]) -> None:
    assert split_script(["--json", "train.py", *arguments], TAKES) == (["--json"], ["train.py", *arguments])


@script_command("demo")
@click.option("--max-steps", type=int, default=0)
@click.option("--json", "as_json", is_flag=True)
def demo(script: tuple[str, ...], max_steps: int, as_json: bool) -> None:
    """Print what arrived."""
    click.echo(repr((list(script), max_steps, as_json)))


@pytest.mark.parametrize(
    ("line", "arrived"),
    [
        ("--max-steps 3 train.py --max-steps 9", (["train.py", "--max-steps", "9"], 3, False)),
        ("--json -m pkg.mod --json", (["-m", "pkg.mod", "--json"], 0, True)),
        ("-- torchrun train.py", (["--", "torchrun", "train.py"], 0, False)),
        ("train.py --help", (["train.py", "--help"], 0, False)),
    ],
)
def test_a_command_receives_the_scripts_tokens(line: str, arrived: object) -> None:
    result = CliRunner().invoke(demo, line.split())
    assert result.exit_code == 0, result.output
    assert result.output.strip() == repr(arrived)


def test_a_command_without_a_script_says_so() -> None:
    result = CliRunner().invoke(demo, ["--json"])
    assert result.exit_code == 2
    assert "train.py [SCRIPT ARGS]" in result.output


def test_an_unknown_option_before_the_script_is_refused_with_the_nearest() -> None:
    result = CliRunner().invoke(demo, ["--max-step", "3", "train.py"])
    assert result.exit_code == 2
    assert "--max-steps" in result.output


def test_our_own_options_behind_the_script_are_noted_and_passed_on() -> None:
    @script_command("study")
    @click.option("--trials", type=int, default=30)
    @click.option("--seed", type=int, default=0)
    def study(script: tuple[str, ...], trials: int, seed: int) -> None:
        click.echo(repr((list(script), trials, seed)))

    late = CliRunner().invoke(study, ["train.py", "--trials", "6"])
    assert "note: --trials comes after the script" in late.stderr
    assert "['train.py', '--trials', '6'], 30, 0" in late.stdout
    assert not CliRunner().invoke(study, ["--trials", "6", "train.py", "--seed", "1"]).stderr
    assert "--budget" in OURS_ALONE  # a search would take all the time it wants
    for option in ("--budgets", "--budget", "--trial", "--wall-time", "-x"):  # its value is no script
        unknown = CliRunner().invoke(study, [option, "90s", "--trials", "6", "train.py"])
        assert unknown.exit_code == 2
        assert "comes after the script" not in unknown.stderr


@pytest.mark.parametrize(
    ("said", "script", "refused"),
    [
        ("train.py: error: unrecognized arguments: -o x", "train.py -o x", ["-o"]),
        ("train.py: error: unrecognized arguments: --json -q", "train.py --json --lr 1 -q", ["--json", "-q"]),
        ("Error: No such option: -o", "train.py -o x", ["-o"]),
        ("Error: No such option '--json'.", "train.py --json", ["--json"]),
        ("FATAL Flags parsing error: Unknown command line flag 'trials'", "train.py --trials=3", ["--trials"]),
        ("ValueError: Some specified arguments are not used by the HfArgumentParser: ['-o']", "train.py -o x", ["-o"]),
        ("train.py: error: unrecognized arguments: --lr 1", "train.py --lr 1 -o x", []),
        ("train.py: error: unrecognized arguments: --json-lines", "train.py --json-lines --json", []),
        ("RuntimeError: no -o here", "train.py -o x", []),
    ],
)
def test_an_option_of_ours_that_the_script_refuses_is_named(said: str, script: str, refused: list[str]) -> None:
    output = f"the script ended with exit code 2 before its first training step\nusage: train.py [-h]\n{said}"
    assert refused_options(output, script.split(), TAKES) == refused


def test_where_the_script_refuses_our_option_the_mistake_is_not_one_to_report() -> None:
    @script_command("tune")
    @click.option("-o", "--output")
    def tune(script: tuple[str, ...], output: str | None) -> None:
        raise ScriptError(f"it ended\nerror: unrecognized arguments: {script[1]}", fix="please report this")

    def fix(line: str) -> str:
        error = CliRunner().invoke(tune, line.split()).exception
        assert isinstance(error, ScriptError)
        return error.fix

    assert fix("train.py -o x") == "options of autoprec come before the script: autoprec tune -o ... train.py"
    assert fix("train.py --lr 1") == "please report this"
