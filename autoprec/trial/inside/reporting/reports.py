"""Metrics that the script reports: what every report ends in, whoever makes it (:mod:`.pickups`, autoprec.report).

A trial that is asked for a metric goes on after its last step until that was reported once more: an evaluation comes
after the steps that it is of. Reports of a process that the script forked, such as a DataLoader's worker, do not count.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from autoprec.errors import UsageError
from autoprec.trial.losses import Series

#: A trial waits for the metric at most until it has taken so many times its steps.
PATIENCE = 2
#: Names that are kept for the message that the one asked for is not among them.
_MOST_NAMES = 200


def is_number(value: Any) -> bool:
    """Say whether a value is one number: of Python, of NumPy, or in a tensor of one element."""
    if isinstance(value, (int, float)):
        return True
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and math.prod(shape) == 1 and callable(getattr(value, "item", None))


def _number(value: Any) -> float:
    """Return the number that :func:`is_number` sees; NaN for one that cannot be read, such as a fake tensor's."""
    try:
        return float(value if isinstance(value, (int, float)) else value.item())
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return math.nan


class Reports:
    """Collects what the script reports; of a metric that a trial is asked for the values, of others their names."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._asked: Series | None = None
        self._source = ""
        self._rows: dict[int, float] = {}  # by steps done: of several reports between two steps the last counts
        self._total, self._pid = 0, 0
        self.why = ""  # why what a trial measures itself could not be, where that is known
        self._steps: Callable[[], int] = lambda: 0
        self._end: Callable[[], object] = lambda: None

    def ask(self, asked: Series, total: int, steps: Callable[[], int], end: Callable[[], object]) -> None:
        """Keep the values of a metric from here on.

        Args:
            asked: its name, and whether more of it is better.
            total: steps after which the next report of it is the last that is needed.
            steps: returns how many steps are done.
            end: called at that report.
        """
        self._asked, self._total, self._steps, self._end = asked, total, steps, end
        self._pid = os.getpid()

    def add(self, source: str, values: Mapping[str, object]) -> None:
        """Take a report; what is not a number is left out.

        Args:
            source: who makes it. A logger that is told what the script has logged elsewhere reports nothing new: of
                each name the first source counts.
            values: by name.
        """
        numbers = {name: value for name, value in values.items() if isinstance(name, str) and is_number(value)}
        if len(self._names) < _MOST_NAMES:
            self._names |= dict.fromkeys(numbers)
        asked = self._asked
        if asked is None or asked.name not in numbers or os.getpid() != self._pid:
            return
        self._source = self._source or source
        if source == self._source:
            done = self._steps()
            self._rows[done] = _number(numbers[asked.name])
            if done >= self._total:
                self._end()

    def report(self, values: Mapping[str, object]) -> None:
        """Take what the script says itself.

        Raises:
            UsageError: a value is not a number.
        """
        for name, value in values.items():
            if not is_number(value):
                raise UsageError(
                    f"autoprec.report({name}=...) takes a number, not a {type(value).__name__}",
                    fix="a float, or a tensor of one element, such as values.mean()",
                    code="type",
                )
        self.add("autoprec.report", values)

    def gives_up(self, steps: int) -> bool:
        """Say whether a trial that has taken so many steps waits no longer for the metric."""
        return self._asked is None or steps >= PATIENCE * self._total

    @property
    def missing(self) -> str:
        """Why a trial that is to end has nothing to be compared by; empty where it has, or needs nothing."""
        if self._asked is None or self._rows:
            return ""
        because = f": {self.why}" if self.why else ""
        return f"the script did not report {self._asked.name} within {self._steps()} steps{because}"

    @property
    def series(self) -> Series | None:
        """The values so far; None where no metric was asked for."""
        if self._asked is None:
            return None
        asked, rows = self._asked, self._rows
        return Series(asked.name, asked.higher, tuple(rows), tuple(rows.values()), tuple(self._names), self._source)
