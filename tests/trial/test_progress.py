"""What counts against a deadline, with a clock of our own."""

from __future__ import annotations

from pathlib import Path

from autoprec.trial.progress import Beat, Deadline, steps_file


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_starts_a_new_deadline(tmp_path: Path) -> None:
    steps, clock = steps_file(tmp_path / "result.json"), Clock()
    beat = Beat(steps)
    told: list[int] = []
    deadline = Deadline(10.0, steps, told.append, clock=clock)
    for tick in range(60):
        clock.now += 1.0
        if tick % 8 == 0:
            beat()
        assert not deadline.passed()
    assert deadline.steps == 8
    assert told == [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(12):
        clock.now += 1.0
        passed = deadline.passed()
    assert passed


def test_time_in_which_nobody_looked_is_not_held_against_a_trial() -> None:
    """The driver was stopped (Ctrl-Z, a laptop that slept), and its trials with it."""
    clock = Clock()
    deadline = Deadline(10.0, clock=clock)
    clock.now += 3600.0
    assert not deadline.passed()
    for _ in range(12):
        clock.now += 1.0
        passed = deadline.passed()
    assert passed
