"""Contenders that start and compile side by side, and are timed in turns: one trains while the others wait.

Separate runs on a GPU differ by its clocks and temperature. So each contender is a process (``contender.py``) that is
ready once its graphs are compiled, and a round asks each for a block of steps, in random order. The ratio of two
blocks of one round is what is compared; its median over rounds has a 95 % interval. Every block is a line of JSON in
``rounds.jsonl`` as soon as it is there: a machine that is taken away takes nothing measured along.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.trial.intervals import FEWEST, median_interval  # noqa: E402

#: Seconds for which one contender is timed in a round; so long a block hides what a launch costs.
BLOCK_S, MOST_STEPS = 1.0, 20
#: Rounds after which nothing more is learnt, and without which an interval says little.
MOST_ROUNDS = 16


@dataclass(frozen=True)
class Timed:
    """What is known of one contender: milliseconds a step of each round, or why there are none."""

    name: str
    rounds: tuple[float, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str = ""


@dataclass
class _Process:
    name: str
    popen: subprocess.Popen[bytes]
    log: IO[str]
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    steps: int = 1
    #: What was read and not yet taken: select() does not see lines that a buffered reader holds.
    unread: bytes = b""

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """Return the next line that it prints, None when there is none in time or it has ended."""
        assert self.popen.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.popen.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self.unread.partition(b"\n")
                if newline:
                    self.unread = rest
                    with contextlib.suppress(json.JSONDecodeError):
                        return dict(json.loads(line))
                    continue
                if not waiting.select(max(0.0, deadline - time.monotonic())):
                    return None
                more = os.read(self.popen.stdout.fileno(), 1 << 16)
                if not more:
                    return None
                self.unread += more

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()

    def why(self) -> str:
        self.log.flush()
        said = Path(self.log.name).read_text(errors="replace").strip().splitlines()
        return (said or [f"exit {self.popen.poll()}"])[-1][:200]


def race(
    names: Sequence[str], asked: dict[str, Any], out: Path, *, ready_by: float, until: float, seed: int = 0
) -> list[Timed]:
    """Start the contenders, wait until all are ready or ``ready_by``, and time them in turns.

    Args:
        names: precisions of ``contender.py``; the first is what the others are compared with.
        asked: what else it is asked for: model, compiled, micro_batches.
        out: folder of logs and of ``rounds.jsonl``.
        ready_by, until: seconds of :func:`time.monotonic`.
        seed: of the order within rounds.
    """
    out.mkdir(parents=True, exist_ok=True)
    started = [_start(name, asked, out) for name in names]
    try:
        for process in started:
            _await(process, ready_by)
        found: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(seed)
        with (out / "rounds.jsonl").open("a") as rows:
            for process in (one for one in started if not one.failed):
                _size(process, until)
            for number in range(MOST_ROUNDS):
                if time.monotonic() > until:
                    break
                _round(number, [one for one in started if not one.failed], order, found, rows, until)
        return [Timed(one.name, tuple(found[one.name]), one.facts, one.failed) for one in started]
    finally:
        for process in started:
            process.close()


def _start(name: str, asked: dict[str, Any], out: Path) -> _Process:
    words = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "contender.py")]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    log = (out / f"{name.replace('/', '-').replace(':', '-')}.log").open("w+")
    popen = subprocess.Popen(
        [*words, json.dumps(asked | {"precision": name})],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    return _Process(name, popen, log)


def _await(process: _Process, deadline: float) -> None:
    ready = process.answer(deadline)
    if ready is not None:
        process.facts = ready
        return
    late = time.monotonic() >= deadline
    process.popen.kill() if late else process.popen.wait()
    process.failed = "not compiled in time" if late else process.why()


def _block(process: _Process, deadline: float) -> list[float]:
    assert process.popen.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.popen.stdin.write(f"{process.steps}\n".encode())
        process.popen.stdin.flush()
    answer = process.answer(deadline)
    if answer is None:
        late = time.monotonic() >= deadline
        process.popen.kill() if late else process.popen.wait()
        process.failed = "a block was not done in time" if late else process.why()
        return []
    return [float(ms) for ms in answer["ms"]]


def _size(process: _Process, until: float) -> None:
    """Choose how many steps are a block, by one that is not counted."""
    process.steps = 2
    ms = _block(process, until + 30.0)
    if ms:
        process.steps = max(2, min(MOST_STEPS, round(1e3 * BLOCK_S / max(1e-3, ms[-1]))))


def _round(
    number: int,
    running: list[_Process],
    order: random.Random,
    found: dict[str, list[float]],
    rows: IO[str],
    until: float,
) -> None:
    order.shuffle(running)
    blocks = {one.name: ms for one in running if (ms := _block(one, until + 30.0))}
    if len(blocks) == len(running):  # a round in which one failed compares the others with nothing
        for name, ms in blocks.items():
            found[name].append(statistics.median(ms))
            rows.write(json.dumps({"round": number, "name": name, "ms": ms}) + "\n")
        rows.flush()


def table(timed: Sequence[Timed], items_per_step: float = 0.0) -> list[str]:
    """Return the table: speed over the first contender with its interval, milliseconds, items/s, memory."""
    lines = ["| precision | over the first | ms a step | items/s | GB | ready s | loss | rounds |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|"]
    base = timed[0].rounds
    for one in timed:
        if one.failed or not one.rounds:
            lines.append(f"| {one.name} | failed: {one.failed or 'no round was done'} | | | | | | |")
            continue
        middle, low, high = median_interval([b / own for b, own in zip(base, one.rounds, strict=False)] or [1.0])
        within = f" [{low:.3f}, {high:.3f}]" if len(one.rounds) >= FEWEST else " (too few rounds for an interval)"
        ms = statistics.median(one.rounds)
        speed = f"{1e3 * items_per_step / ms:,.0f}" if items_per_step else "-"
        facts = one.facts
        lines.append(
            f"| {one.name} | {middle:.3f}x{within if one is not timed[0] else ''} | {ms:.2f} | {speed} | "
            f"{facts.get('memory_bytes', 0) / 1e9:.1f} | {facts.get('ready_s', 0):.0f} | {facts.get('loss', 0):.4f} | "
            f"{len(one.rounds)} |"
        )
    return lines


def groups(names: Sequence[str], bytes_each: float, free: float) -> list[list[str]]:
    """Split contenders so that those of one group fit on the device; the first is in each, for the comparison."""
    first, *others = names
    together = max(1, int(free // bytes_each) - 1)
    return [[first, *others[i : i + together]] for i in range(0, max(1, len(others)), together)]
