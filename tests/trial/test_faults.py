"""Whatever a trial does, it ends, is classified with its cause, and leaves no process behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.processes import marked_processes
from autoprec.trial.protocol import TrainSpec

FAULTS = {
    "exception": ("crashed", "ValueError: the data are corrupt"),
    "exit": ("too_short", "ended after 3 of"),
    "hard_exit": ("crashed", "exit code 3"),
    "segfault": ("crashed", "SIGSEGV"),
    "abort": ("crashed", "SIGABRT"),
    "hang": ("hung", "no result within"),
    "stubborn_hang": ("hung", "no result within"),
    "deadlock": ("hung", "no result within"),
    "nan": ("diverged", "step 4"),
    "oom": ("oom", ""),
    "memory_error": ("oom", "MemoryError"),
    "killed": ("oom", "SIGKILL"),
    "endless_output": ("hung", "no result within"),
    "orphans": ("crashed", "exit code 7"),
}
HANGING = ("hang", "stubborn_hang", "deadlock", "endless_output")


@pytest.mark.slow
def test_every_fault_is_classified_and_the_next_trial_runs(host: Any, tmp_path: Path) -> None:
    order = tmp_path / "fault.txt"
    order.write_text("none")
    with host("faults.py", str(order)) as runner:
        before = runner.run(TrainSpec(steps=4))
        seen = {}
        for fault in FAULTS:
            order.write_text(fault)
            limit = 60.0 if fault not in HANGING else 3.0 if fault == "endless_output" else 1.0  # which starts first
            seen[fault] = runner.run(TrainSpec(steps=20, timeout_s=limit))
        order.write_text("none")
        after = runner.run(TrainSpec(steps=4))
        mark = runner.mark
        left = [p for p in marked_processes(mark) if p != runner._host.pid]
    assert before.ok
    assert after.losses == before.losses
    for fault, (status, reason) in FAULTS.items():
        result = seen[fault]
        assert result.status == status, (fault, result.status, result.reason, result.tail)
        assert reason in result.reason, (fault, result.reason)
    assert seen["exception"].tail.count("the data are corrupt") >= 1
    assert len(seen["exception"].losses) == 3
    assert "still here" in seen["endless_output"].tail
    assert len(seen["endless_output"].tail) < 20_000
    assert left == []
    time.sleep(0.05)
    assert marked_processes(mark) == []
