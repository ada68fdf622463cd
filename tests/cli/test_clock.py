"""The time of a command is that of its process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from autoprec.cli.clock import process_began


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_a_process_began_before_its_first_line() -> None:
    code = "import time; time.sleep(0.3); from autoprec.cli.clock import process_began; print(process_began())"
    before = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    began, after = float(found.stdout), time.monotonic()
    assert before - 0.02 < began < after - 0.3


def test_where_the_system_does_not_say_it_begins_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: "7 (a name with ) in it) S 1 2")
    assert process_began() == pytest.approx(time.monotonic(), abs=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_what_a_shell_did_before_it_became_this_process_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """``bash -c "pip install ... && autoprec search --budget 20m ..."``: the budget was gone before it began."""
    later = time.clock_gettime(time.CLOCK_BOOTTIME) + 600
    monkeypatch.setattr("time.clock_gettime", lambda _clock: later)
    assert process_began() == pytest.approx(time.monotonic(), abs=0.5)
