"""Tables for people: no folding in a pipe, no markup in names, no colour where it is not wanted."""

import io
import json
import time
from contextlib import redirect_stdout

import click
import pytest

from autoprec.__main__ import main
from autoprec.cli.console import clock, command_began, plain_table, print_json, stdout_console
from autoprec.support.units import span_text


def printed(*rows: tuple[str, ...]) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        stdout_console().print(plain_table(("name", "value"), rows))
    return out.getvalue()


def test_long_names_stay_on_one_line_in_a_pipe() -> None:
    name = "transformer.h.11." + "x" * 80
    assert f" {name} " in printed((name, "bf16"))


def test_brackets_are_text() -> None:
    assert "[red]a[/red]" in printed(("[red]a[/red]", "[bold]"))


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in printed(("a", "NO"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in printed(("a", "NO"))


@pytest.mark.parametrize(
    ("seconds", "text", "short"),
    [(0.4, "0.4 s", "0:00"), (61, "61 s", "1:01"), (600, "10 min", "10:00"), (9000, "2.5 h", "150:00")],
)
def test_times_are_told_in_the_unit_a_person_would_use(seconds: float, text: str, short: str) -> None:
    assert (span_text(seconds), clock(seconds)) == (text, short)


def test_many_days_and_times_that_have_passed() -> None:
    assert span_text(86400 * 3) == "3 days"
    assert clock(-3) == "0:00"


def test_json_is_strict_where_a_figure_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": True, "d": None}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None, 1.5]], "b": {"c": True, "d": None}}


def test_a_command_began_before_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search told its time from after Python's own start and the imports."""
    assert command_began() == pytest.approx(time.monotonic(), abs=0.5), "a call from Python begins when it is made"
    with click.Context(click.Command("search"), obj=12.5):
        assert command_began() == 12.5
    given = {}
    monkeypatch.setattr("autoprec.cli.cli.main", lambda **values: given.update(values))
    main()
    assert given["obj"] <= time.monotonic()
