"""Tables for people: no folding in a pipe, no markup in names, no colour where it is not wanted."""

import io
from contextlib import redirect_stdout

import pytest

from autoprec.cli.tables import plain_table, stdout_console


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
