"""Times of probes that other work on the machine disturbs: the least of several passes through all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from autoprec.cost.calibrate.cpu import AGREES

#: After so many seconds by the clock on the wall no further pass begins.
_PATIENCE_S = 40.0
#: A probe's calls take so long together (s), and there are so many passes.
_SHORTEST, _FEWEST_PASSES, _MOST_PASSES = 2e-4, 3, 6


class Clock:
    """The two least times of every probe, which are known by their order: it is the same in every pass."""

    def __init__(self) -> None:
        self.least: list[tuple[float, float]] = []
        self._at = 0

    def begin(self) -> None:
        """Begin a pass."""
        self._at = 0

    def note(self, seconds: float) -> float:
        """Take one more time of the probe whose turn it is, and return its least."""
        at, self._at = self._at, self._at + 1
        if at == len(self.least):
            self.least.append((math.inf, math.inf))
        first, second = sorted((*self.least[at], seconds))[:2]
        self.least[at] = first, second
        return first

    def spread(self) -> float:
        """Return by how much the two least times of a probe differ (a share), exceeded by one probe in ten."""
        gaps = sorted(min(second / first - 1.0, 1.0) for first, second in self.least)
        return gaps[int(0.9 * len(gaps))] if gaps else 1.0

    def pace(self) -> float:
        """Return the mean logarithm of the least times: of two records of a machine the lower was disturbed less."""
        return sum(math.log(first) for first, _ in self.least) / max(1, len(self.least))


CLOCK = Clock()


def in_passes(take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run all probes again and again until they agree; return the last result, with how well they agree.

    ``take`` runs every probe once and fits the rates to the least times so far.
    """
    start = time.monotonic()
    CLOCK.least.clear()
    for number in range(1, _MOST_PASSES + 1):
        CLOCK.begin()
        found = take()
        if (number >= _FEWEST_PASSES and CLOCK.spread() <= AGREES) or time.monotonic() - start > _PATIENCE_S:
            break
    return {**found, "passes": number, "spread": CLOCK.spread(), "pace": CLOCK.pace()}


def elapsed(run: Callable[[], Any], calls: int) -> float:
    """Return the CPU seconds of one of so many calls."""
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls


def best(run: Callable[[], Any]) -> float:
    """Return the least CPU time of one call in seconds over this pass and those before (short calls are repeated)."""
    run()
    once = max(elapsed(run, 1), 1e-7)
    return CLOCK.note(min(once, elapsed(run, int(_SHORTEST / once))) if once < _SHORTEST / 2 else once)


def fit(rows: list[list[float]], times: list[float]) -> list[float]:
    """Return non-negative coefficients of ``times ~ rows @ c`` by least squares on relative errors."""
    weight = 1.0 / np.asarray(times)
    matrix = np.asarray(rows) * weight[:, None]
    active = list(range(matrix.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(matrix[:, active], np.ones(len(times)), rcond=None)
        if (solution >= 0).all() or len(active) == 1:
            break
        active = [index for index, value in zip(active, solution, strict=True) if value >= 0] or active[:1]
    out = [0.0] * matrix.shape[1]
    for index, value in zip(active, solution, strict=True):
        out[index] = max(0.0, float(value))
    return out
