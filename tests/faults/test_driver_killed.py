"""kill -9 of the driver at random moments: nothing completed is lost or repeated, and the answer is the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoprec.policy import load_policy

DRIVER = Path(__file__).with_name("driver.py")
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(DRIVER), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def completed(output: str) -> list[str]:
    """Lines of trials that were told before the process died; a torn last line does not count."""
    return [line for line in output.splitlines(keepends=True) if line.startswith("trial ") and line.endswith("\n")]


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_policy(tmp_path: Path) -> None:
    plain = start(tmp_path, "plain", "12", "0.0")
    plain.communicate(timeout=120)
    assert plain.returncode == 0

    rng = random.Random(0)
    told: list[str] = []
    kills = 0
    for attempt in range(40):
        begun = (tmp_path / "autoprec-runs" / "cut" / "study.db").exists()
        process = start(tmp_path, "cut", "12", "0.12", *(["resume"] if begun else []))
        began = time.monotonic()
        deadline = rng.uniform(0.5, 2.0) + 4.0 * (attempt > 3)
        try:
            output, _ = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            output, _ = process.communicate()
            kills += 1
        assert time.monotonic() - began < 120
        told += completed(output)
        assert process.returncode in (0, -signal.SIGKILL), output
        if process.returncode == 0:
            break
    else:
        pytest.fail("forty starts did not finish one study")
    assert kills >= 2
    searched = [line for line in told if line.split()[1] in ("preset", "search")]
    assert len(searched) == len(set(searched)) == 12
    finalists = [line for line in told if line.split()[1] == "finalist"]
    assert len(finalists) >= len(set(finalists))
    one, two = load_policy(tmp_path / "plain.yaml"), load_policy(tmp_path / "cut.yaml")
    assert one.layers == two.layers
    assert one.evidence["speedup"] == two.evidence["speedup"]
    print(f"{kills} kills, {len(set(searched))} trials, 0 lost, 0 repeated")


@pytest.mark.slow
def test_sigterm_and_sigint_keep_the_best_so_far(tmp_path: Path) -> None:
    process = start(tmp_path, "one", "50", "0.1")
    assert process.stdout is not None
    seen = ""
    while seen.count("trial preset") < 3:
        seen += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert load_policy(tmp_path / "one.yaml").evidence["reason"].startswith("interrupted")
