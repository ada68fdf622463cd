"""What a command is doing is told from its first second, on stderr, and never where it was asked to be quiet."""

from __future__ import annotations

import io
import sys
import time

import pytest

from autoprec.cli.phases import Phases


def test_a_phase_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases() as phases:
        phases.begin("running train.py")
        assert capsys.readouterr().err == "[0:00] running train.py\n"


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(quiet=True) as phases:
        phases.begin("a", total=2)
        phases.advance(1)
        phases.say("b")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_one_ticking_line_and_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Phases() as phases:
        phases.begin("running [bold] train.py", total=3)
        phases.advance(2)
        time.sleep(0.3)
    assert "running [bold] train.py" in terminal.getvalue()
    assert "2/3" in terminal.getvalue()
    assert phases._bar is None
