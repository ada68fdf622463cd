"""A line on the terminal obeys nobody."""

from __future__ import annotations

import pytest

from autoprec.cli.echo import echo


def test_a_line_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    echo("plain")
    echo("\x1b[2Jname\u202e", err=True)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("plain\n", "\\x1b[2Jname\\u202e\n")
