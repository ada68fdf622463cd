"""Ctrl-C once and twice, SIGTERM, SIGHUP: out at once, the best so far is saved, and the printed command continues."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoprec.policy import load_policy
from tests.faults import cli_driver, driver
from tests.warm import Forked

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).with_name("cli_driver.py")
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, delay: str, *words: str) -> Forked:
    return Forked(cli_driver.main, delay, "search", "--no-mlflow", "-v", *words, cwd=folder)


@pytest.fixture(autouse=True, scope="module")
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One search in this process, which then has imported what every fork needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("imported"))
        patch.setattr(sys, "argv", ["driver.py", "s", "1", "0.0"])
        driver.main()


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT,), 130),
        ((signal.SIGINT,) * 30, 130),
        ((signal.SIGTERM,), 143),
        ((signal.SIGHUP, signal.SIGTERM), 143),
    ],
    ids=["ctrl-c", "many ctrl-c", "sigterm", "closed terminal"],
)
def test_a_signal_ends_the_search_at_once_and_the_printed_command_continues(
    tmp_path: Path, signals: tuple[int, ...], code: int
) -> None:
    process = start(tmp_path, "0.1", "--trials", "12", "--study", "s", "--sampler", "random")
    lines: list[str] = []
    while sum("of 12 trials" in line for line in lines) < 3:
        lines.append(process.readline())
        assert lines[-1], "".join(lines)
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.002)
    rest = process.communicate(30)
    assert process.returncode == code, rest
    assert time.monotonic() - began < 5.0
    assert "Traceback" not in rest
    assert "the best policy so far" in rest
    assert load_policy(tmp_path / "policy.yaml").evidence["reason"].startswith("interrupted")
    command = re.search(r"^ +(autoprec search .*)$", rest, flags=re.MULTILINE)
    assert command is not None, rest
    words = [word for word in shlex.split(command[1])[2:] if word not in ("train.py", "--force")]
    assert "--resume" in words
    if code == 143:  # the others would only repeat it
        return
    again = start(tmp_path, "0", *_without(words, "--space", "--steps"))
    output = again.communicate(60)
    assert again.returncode == 0, output
    print(f"{len(signals)} signals: exit {code}, resumed to its end")


def _without(words: list[str], *options: str) -> list[str]:
    """Leave out options, and their values, that the driver adds itself."""
    out, skip = [], False
    for word in words:
        if not skip and word not in options:
            out.append(word)
        skip = word in options
    return out


def test_a_running_trial_is_not_waited_for(tmp_path: Path) -> None:
    process = start(tmp_path, "60", "--trials", "12", "--study", "s")
    while "recording" not in process.readline():
        pass
    time.sleep(0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = process.communicate(30)
    assert process.returncode == 130, output
    assert time.monotonic() - began < 5.0
    assert "nothing was measured yet" in output


def test_nohup_is_respected(tmp_path: Path) -> None:
    words = f"nohup {shlex.quote(sys.executable)} {shlex.quote(str(DRIVER))} 0.05 search --no-mlflow -v --trials 8"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["sh", "-c", f"exec {words}"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    while b"trials" not in (line := process.stdout.readline()):
        assert line, "it ended before its first trial"
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
