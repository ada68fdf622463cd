"""What counts against a deadline, with a clock and a process table of our own, and with a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.trial.progress import Beat, Deadline, Usage, steps_file, tree_usage


class Machine:
    """One process: at every tick of 1 s it runs for ``ran`` and waits for a CPU for ``waited`` seconds."""

    def __init__(self) -> None:
        self.now = self.cpu = self.waited = 0.0
        self.state, self.known = "R", True

    def tick(self, ran: float, waited: float, state: str = "R") -> None:
        self.now += 1.0
        self.cpu, self.waited, self.state = self.cpu + ran, self.waited + waited, state

    def usage(self, _leader: int) -> dict[int, Usage]:
        return {7: Usage(self.state, self.cpu, self.waited if self.known else None)}

    def deadline(
        self, limit_s: float, steps: Path | None = None, told: Callable[[int], None] | None = None
    ) -> Deadline:
        return Deadline(limit_s, 7, steps, told, usage=self.usage, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("ran", "waited", "state", "ends"),
    [
        (1.0, 0.0, "R", True),  # spins
        (0.0, 0.0, "S", True),  # sleeps, or waits for a lock
        (0.0, 0.0, "D", True),  # a disk that does not answer
        (0.02, 0.98, "R", False),  # one of many on this machine
        (0.0, 0.0, "R", False),  # runnable, and not run at all yet
        (0.0, 0.0, "T", False),  # stopped by somebody
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_only_own_time_counts(ran: float, waited: float, state: str, ends: bool, known: bool) -> None:
    machine = Machine()
    machine.known = known
    deadline = machine.deadline(10.0)
    for _ in range(40):
        machine.tick(ran, waited, state)
        passed = deadline.passed()
    assert passed is ends


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40))
def test_own_time_is_what_the_machine_gave(shares: list[float]) -> None:
    machine = Machine()
    deadline = machine.deadline(1e9)
    machine.tick(1.0, 0.0)
    deadline.passed()
    start = deadline.own_s
    for share in shares:
        machine.tick(max(share, 0.5), 1.0 - max(share, 0.5))
        deadline.passed()
    assert deadline.own_s - start == pytest.approx(sum(max(share, 0.5) for share in shares))


def test_a_step_starts_a_new_deadline(tmp_path: Path) -> None:
    steps = steps_file(tmp_path / "result.json")
    beat, machine = Beat(steps), Machine()
    told: list[int] = []
    deadline = machine.deadline(10.0, steps, told.append)
    for tick in range(60):
        machine.tick(1.0, 0.0)
        if tick % 8 == 0:
            beat()
        assert not deadline.passed()
    assert deadline.steps == 8
    assert told == [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(12):
        machine.tick(1.0, 0.0)
    assert deadline.passed()


def test_a_stopped_process_is_not_hung_and_a_sleeping_one_is() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        assert process.pid in tree_usage(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        while tree_usage(process.pid)[process.pid].state != "T":
            time.sleep(0.01)
        deadline = Deadline(0.4, process.pid)
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            assert not deadline.passed()
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGCONT)
        end = time.monotonic() + 30
        while not deadline.passed() and time.monotonic() < end:
            time.sleep(0.02)
        assert deadline.passed()
    finally:
        process.kill()
        process.wait()
