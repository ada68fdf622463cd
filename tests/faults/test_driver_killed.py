"""kill -9 of the driver at random moments: nothing completed is lost or repeated, and the answer is the same."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import pytest

from autoprec.policy import load_policy
from tests.faults import driver
from tests.warm import Forked


def start(folder: Path, *words: str) -> Forked:
    return Forked(driver.main, *words, cwd=folder)


def completed(output: str) -> list[str]:
    """Lines of trials that were told before the process died; a torn last line does not count."""
    return [line for line in output.splitlines(keepends=True) if line.startswith("trial ") and line.endswith("\n")]


def searched(lines: list[str]) -> list[str]:
    """Those of trials, not of further paired seeds."""
    return [line for line in lines if line.split()[1] in ("preset", "search")]


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["driver.py", "plain", "12", "0.0"])
    driver.main()  # in this process, which then has imported what every fork needs
    expected = len(searched(completed(capsys.readouterr().out)))
    assert expected >= 4

    rng = random.Random(0)
    told: list[str] = []
    kills = 0
    for attempt in range(6):
        begun = (tmp_path / "autoprec-runs" / "cut" / "study.db").exists()
        process = start(tmp_path, "cut", "12", "0.05", *(["resume"] if begun else []))
        seen = ""
        if attempt < 5:
            for _ in range(rng.randint(1, 25)):
                seen += process.readline()
            time.sleep(rng.uniform(0.0, 0.2))
            process.send_signal(signal.SIGKILL)
        output = seen + process.communicate()
        kills += process.returncode == -signal.SIGKILL
        told += completed(output)
        assert process.returncode in (0, -signal.SIGKILL), output
        if process.returncode == 0:
            break
    else:
        pytest.fail("the last start did not finish the study")
    assert kills >= 2
    trials = searched(told)
    assert len(trials) == len(set(trials)), "a trial ran twice"
    assert expected - kills <= len(trials) <= expected, "a kill may fall between storing a trial and telling it"
    finalists = [line for line in told if line.split()[1] == "finalist"]
    assert len(finalists) >= len(set(finalists))
    one, two = load_policy(tmp_path / "plain.yaml"), load_policy(tmp_path / "cut.yaml")
    assert one.layers == two.layers
    assert one.evidence["speedup"] == two.evidence["speedup"]
    print(f"{kills} kills, {len(set(trials))} trials, 0 lost, 0 repeated")


@pytest.mark.slow
def test_sigterm_and_sigint_keep_the_best_so_far(tmp_path: Path) -> None:
    process = start(tmp_path, "one", "50", "0.1")
    for line in iter(process.readline, ""):
        if line.startswith("trial search"):
            break
    else:
        pytest.fail("it ended before its first trial")
    process.send_signal(signal.SIGINT)
    process.communicate(30)
    assert process.returncode != 0
    assert load_policy(tmp_path / "one.yaml").evidence["reason"].startswith("interrupted")
