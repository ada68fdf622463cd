"""Trials that compile beside each other, and are timed one at a time."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from autoprec.trial.inside.observe.turns import Turn

COMPILES_S, TIMED_S = 0.6, 0.1


def trial(path: Path, log: Path, name: str) -> int:
    """Start a process that compiles, is timed, and ends without a word, as a trial does."""
    pid = os.fork()
    if pid:
        return pid
    turn = Turn(path)
    turn.beside_others()
    begun = time.monotonic()
    time.sleep(COMPILES_S)
    turn.alone()
    timed = time.monotonic()
    time.sleep(TIMED_S)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{name} {begun} {timed} {time.monotonic()}\n")
    os._exit(0)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_compile_at_once_and_none_computes_while_another_is_timed(tmp_path: Path, count: int) -> None:
    log = tmp_path / "log"
    for pid in [trial(tmp_path / "turns", log, str(k)) for k in range(count)]:
        assert os.waitpid(pid, 0)[1] == 0
    rows = sorted([float(x) for x in line.split()[1:]] for line in log.read_text().splitlines())
    assert len(rows) == count
    timed = sorted((start, end) for _, start, end in rows)
    assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(timed))
    for begun, own, _ in rows:  # its compiler overlaps nobody's timed steps
        assert all(end <= begun + 1e-3 or begun + COMPILES_S <= start + 1e-3 for start, end in timed if start != own)
    assert count == 1 or rows[1][0] < rows[0][0] + COMPILES_S  # two compilers were at work at once


def test_a_trial_that_is_killed_while_it_compiles_or_is_timed_lets_others_go_on(tmp_path: Path) -> None:
    for timed in (False, True):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            turn = Turn(tmp_path / "turns")
            turn.beside_others()
            if timed:
                turn.alone()
            os.write(writer, b"x")
            time.sleep(60.0)
        os.read(reader, 1)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        assert os.waitpid(trial(tmp_path / "turns", tmp_path / "log", "next"), 0)[1] == 0


def test_a_fork_of_a_trial_does_not_hold_its_turn(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        turn = Turn(tmp_path / "turns")
        turn.alone()
        if not os.fork():  # a worker that outlives it
            time.sleep(5.0)
            os._exit(0)
        os.write(writer, b"x")
        os._exit(0)
    os.read(reader, 1)
    os.waitpid(pid, 0)
    began = time.monotonic()
    assert os.waitpid(trial(tmp_path / "turns", tmp_path / "log", "next"), 0)[1] == 0
    assert time.monotonic() - began < 3.0
