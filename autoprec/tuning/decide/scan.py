"""The adaptive sensitivity scan: which probes to run, coarse ones first and finer ones where layers differ.

A probe is one forward and backward pass with some groups quantised. On a small model every group is probed under every
choice. On a large one that would be thousands of passes, so each *family* (the same layer in every block) is probed as
a whole under every choice; the passes that are left bisect, under the choice of most error, the ranges of blocks that
have most of it, and the other choices are given the same profile over depth.

The error that one batch shows is in part particular to that batch, the more so the fewer rows its GEMMs have. A script
with tiny batches is therefore probed on several of them where the budget allows, and the squared errors are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest

from autoprec.graph.report import GraphReport
from autoprec.precision.recipes import KEEP
from autoprec.trial.protocol import GradientErrors, Probe
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.table import (
    SensitivityTable,
    families,
    group_probe,
    mixed_probes,
    parameter_probes,
    plan_probes,
)

#: Rows (tokens) that a table should rest on, and the most batches that are probed to get there. Over 256 rows the
#: predicted and the measured error of random mixtures correlate at 0.96 to 0.97 (benchmarks/search/quality.py).
_ROWS, _MOST_BATCHES = 256, 4


def scan_batches(report: GraphReport) -> int:
    """Return on how many batches each probe should run, from the rows of the recorded step's GEMMs."""
    rows = max((gemm.m for layer in report.tunable for gemm in layer.gemms if gemm.role == "fprop"), default=_ROWS)
    return min(_MOST_BATCHES, max(1, math.ceil(_ROWS / max(rows, 1))))


class SensitivityScan:
    """Asks for probes in rounds until no further pass pays.

    ::

        scan = SensitivityScan(problem)
        while probes := scan.next_round():
            scan.add(*(run(probes, later=k) for k in range(scan.batches)))  # answers of sensitivity trials
        table = scan.table()

    Args:
        max_passes: forward and backward passes to spend at most, the reference pass of each round included.
        room: passes that may be spent instead if every group can then be asked under every choice.
        batches: on how many batches, see :func:`scan_batches`, every question should be asked if there is room.

    Attributes:
        batches: on how many batches every question is to be asked.
        unanswered: questions that no batch had time for; the table has them from the same group and choice.
    """

    def __init__(self, problem: Problem, max_passes: int = 60, room: int = 0, batches: int = 1) -> None:
        self.problem, self.max_passes = problem, max_passes
        self._families = families(problem)
        self._squares: dict[str, list[float]] = {}  # of each probe, one for each batch
        self._noise: float | None = None
        self._hardly_moved: list[str] | None = None
        self._asked: set[str] = set()
        self._rounds = 0
        self._passes = 0
        self.unanswered = 0
        every, room = len(plan_probes(problem)) + 1, max(room, max_passes)
        self._complete = every <= room
        self.batches = max(1, min(batches, room // every))

    @property
    def passes(self) -> int:
        """Forward and backward passes asked for so far."""
        return self._passes * self.batches

    @property
    def knows_noise(self) -> bool:
        """Whether an answer had the gradient noise: no further one has to measure it."""
        return self._noise is not None

    def next_round(self) -> list[Probe]:
        """Return the next probes to run; empty when the scan is done."""
        if self._rounds == 0:
            probes = spread(plan_probes(self.problem) if self._complete else self._coarse())
        elif self._complete or self._rounds > 5 or self.unanswered:
            probes = []
        else:
            probes = self._splits()
        probes = [probe for probe in probes if probe.id not in self._asked]
        if probes:
            self._rounds += 1
            self._passes += len(probes) + 1
            self._asked |= {probe.id for probe in probes}
        return probes

    def add(self, *answers: GradientErrors) -> None:
        """Store the answers to the probes of a round, one for each batch."""
        for found in answers:
            for probe in found.probes:
                self._squares.setdefault(probe.id, []).append(probe.error**2)
            before = found.hardly_moved if self._hardly_moved is None else self._hardly_moved
            self._hardly_moved = [name for name in before if name in found.hardly_moved]  # on no batch at all
            self._noise = found.gradient_noise if self._noise is None else self._noise
        self.unanswered = len(self._asked - self._squares.keys())

    def table(self) -> SensitivityTable:
        """Return what is known by now; a probe that was not finite on some batch is not finite."""
        squares = {probe: sum(of_one) / len(of_one) for probe, of_one in self._squares.items()}
        table = SensitivityTable.of(self.problem, squares, self._noise)
        return replace(table, passes=self.passes, hardly_moved=tuple(self._hardly_moved or ()))

    def _coarse(self) -> list[Probe]:
        """Return one probe per family and choice, the parameters, and as many mixed checks as leave room to split."""
        out = []
        for family in self._families:
            for choice in self.problem.groups[family[0]].choices:
                if choice != KEEP:
                    out.append(group_probe(self.problem, family, choice))
        out += parameter_probes(self.problem)
        return out + mixed_probes(self.problem)

    def _splits(self) -> list[Probe]:
        """Return the halves to measure: of the segments that have most of the error."""
        room = self.max_passes - self._passes - 1
        error2, found = self.table().error2, list[tuple[float, tuple[int, ...], str]]()
        for family in self._families:
            squares = {c: self._sum(tuple(family), c) or 0.0 for c in self.problem.groups[family[0]].choices}
            pilot = max(squares, key=squares.__getitem__)  # the choice whose profile matters most
            column = error2[:, self.problem.choice_names.index(pilot)]
            segments = [segment for segment in self._leaves(family, pilot) if len(segment) > 1 and squares[pilot]]
            found += [(float(column[list(segment)].sum()), segment, pilot) for segment in segments]
        found.sort(key=lambda item: -item[0])
        batch = (room + 1) // 2 if self._rounds < 5 and room > 3 else room
        # one half is measured, the other is the difference: a pass per number that matters
        return [group_probe(self.problem, segment[: len(segment) // 2], c) for _, segment, c in found[: max(0, batch)]]

    def _sum(self, segment: tuple[int, ...], choice: str) -> float | None:
        """Return the squared error of a segment; None where it is not known, or not finite."""
        squares = self._squares.get(f"{','.join(map(str, segment))}|{choice}", [math.inf])
        return sum(squares) / len(squares) if all(map(math.isfinite, squares)) else None

    def _leaves(self, family: list[int], choice: str) -> list[tuple[int, ...]]:
        """Return the finest segments of a family, second halves included, in order of depth."""
        pending, leaves = [tuple(family)], []
        while pending:
            segment = pending.pop()
            half = len(segment) // 2
            if len(segment) > 1 and self._sum(segment[:half], choice) is not None:
                pending += [segment[half:], segment[:half]]
            else:
                leaves.append(segment)
        return leaves


def spread(probes: Iterable[Probe]) -> list[Probe]:
    """Return the probes in an order of which every beginning says most of all groups and choices.

    A scan may run out of time. What is missing then follows from the same group and the same choice, so these come in
    turns; what nothing else says (activations and attention) comes second, checks of what the table predicts last.
    """
    of: dict[str, list[Probe]] = {}
    for probe in probes:
        of.setdefault(probe.id.partition("|")[0], []).append(probe)
    alone, mixed = of.pop("parameter", []), of.pop("mixed", [])
    rows = [row[turn % len(row) :] + row[: turn % len(row)] for turn, row in enumerate(of.values())]
    groups = [probe for turn in zip_longest(*rows) for probe in turn if probe is not None]
    return [*groups[:1], *alone, *groups[1:], *mixed]
