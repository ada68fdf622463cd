"""Turns of trials on one device."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from autoprec.trial.inside.observe.turn import take_turn, wait_for_start


def test_a_turn_lasts_as_long_as_its_process_and_is_not_inherited(tmp_path: Path) -> None:
    turn, (reader, writer) = tmp_path / "turn", os.pipe()
    holder = os.fork()
    if not holder:
        take_turn(turn, lambda: None)
        if not os.fork():  # a worker of a data loader, which outlives it
            os.close(reader)
            os.close(writer)
            time.sleep(20)
            os._exit(0)
        os.write(writer, b"x")
        time.sleep(1.5)
        os._exit(0)
    os.read(reader, 1)
    began, alive = time.monotonic(), []
    waiting = os.fork()
    if not waiting:
        take_turn(turn, lambda: alive.append(1))
        os._exit(0 if alive else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == 0
    assert 1.0 < time.monotonic() - began < 15.0
    os.waitpid(holder, 0)


def test_a_trial_is_timed_when_the_process_beside_it_has_arrived(tmp_path: Path) -> None:
    starting, alive = tmp_path / "starting", list[int]()
    wait_for_start(starting, lambda: alive.append(1))  # nobody starts
    starting.touch()
    threading.Timer(1.5, starting.unlink).start()
    began = time.monotonic()
    wait_for_start(starting, lambda: alive.append(1))
    assert 1.0 < time.monotonic() - began < 15.0
    assert alive
