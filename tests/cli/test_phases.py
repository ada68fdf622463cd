"""What a command is doing is told from its first second, on stderr, and never where it was asked to be quiet."""

from __future__ import annotations

import io
import sys
import time

import pytest

from autoprec.cli.phases import Phases


def wait_for(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    seen = ""
    for _ in range(200):
        seen += capsys.readouterr().err
        if text in seen:
            break
        time.sleep(0.02)
    return seen


def test_a_phase_is_told_at_once_and_again_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(still_s=0.05) as phases:
        phases.begin("running train.py")
        assert capsys.readouterr().err == "[0:00] running train.py\n"
        assert "[0:00] still running train.py (0:00)" in wait_for("still running", capsys)


def test_what_can_be_counted_tells_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(still_s=0.05) as phases:
        phases.begin("gradient errors", total=4)
        assert phases.left_s() is None
        time.sleep(0.1)
        phases.advance(1)
        left = phases.left_s()
        assert left is not None
        assert 0.25 < left < 5
        assert "still gradient errors (1/4, 0:00, about 0:0" in wait_for("about", capsys)


def test_an_estimate_that_was_passed_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(still_s=0.05) as phases:
        phases.begin("gradient errors")
        phases.advance(1, ends_s=0.0)
        told = wait_for("still", capsys)
    assert "left" not in told


def test_a_bound_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(still_s=0.05) as phases:
        phases.begin("trials")
        phases.advance(1, 4, ends_s=60.0, at_most=True)
        assert "still trials (1/4, 0:00, at most about 1:00 left)" in wait_for("still", capsys)


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(quiet=True, still_s=0.01) as phases:
        phases.begin("a", total=2)
        phases.advance(1)
        phases.say("b")
        time.sleep(0.05)
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
