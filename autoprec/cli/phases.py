"""Says what a command is doing, from the first second, on stderr: a ticking line on a terminal, plain lines elsewhere.

A command that runs somebody's script cannot know how long that takes to its first training step, so it says what it
waits for and since when, and how long is left as soon as anything countable has begun::

    with Phases() as phases:
        phases.begin("starting train.py")
        ...
        phases.begin("gradient errors", total=60)
        phases.advance(12)
"""

from __future__ import annotations

import sys
import threading
import time

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from autoprec.cli.console import clock, command_began, stderr_console

#: Where no line ticks, a phase that lasts longer is told about at this interval, in seconds.
STILL_S = 15.0


class Phases:
    """Tells phase after phase; a context manager, so that the line is taken away whatever happens.

    Args:
        quiet: say nothing.
        still_s: seconds between two lines about a phase that lasts, where stderr is not a terminal.

    Attributes:
        live: stderr is a terminal, where one line ticks.
    """

    def __init__(self, *, quiet: bool = False, still_s: float = STILL_S) -> None:
        self._console = stderr_console()
        self._quiet, self._still_s = quiet, still_s
        self.live = not quiet and sys.stderr.isatty()
        self._began, self._phase_began = command_began(), time.monotonic()
        self._text, self._done, self._total = "", 0, 0
        self._ends: float | None = None
        self._at_most = ""
        self._said = self._phase_began
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._over = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(self, text: str, *, total: int = 0) -> None:
        """Announce a phase; ``total`` counts what :meth:`advance` will report, 0 where nothing can be counted."""
        self._text, self._done, self._total, self._ends = text, 0, total, None
        self._at_most = ""
        self._phase_began = time.monotonic()
        if self._quiet:
            return
        if not self.live:
            self.say(text)
        elif self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20))
            self._bar = Progress(*columns, TextColumn("{task.fields[tail]}"), console=self._console, transient=True)
            self._task = self._bar.add_task(text, total=None, tail="")
            self._bar.start()
        self._show()
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="autoprec-phases", daemon=True)
            self._ticker.start()

    def advance(
        self, done: int, total: int = 0, *, text: str = "", ends_s: float | None = None, at_most: bool = False
    ) -> None:
        """Report how much of the phase is done.

        Args:
            done: how many are done.
            total: of how many, where that has changed.
            text: what the ticking line shows from now on.
            ends_s: seconds left, where somebody knows better than the average so far.
            at_most: they are a bound.
        """
        self._done, self._total, self._text = done, total or self._total, text or self._text
        self._ends = None if ends_s is None else time.monotonic() + ends_s
        self._at_most = "at most " if at_most else ""
        self._show()

    def say(self, text: str) -> None:
        """Print a line that stays, with the time since the command began."""
        self._said = time.monotonic()
        if not self._quiet:
            self.print(text)

    def print(self, text: str, style: str = "") -> None:
        """Print a line however quiet it was asked to be: a note."""
        self._console.print(f"[{clock(time.monotonic() - self._began)}] {text}", style=style, markup=False)

    def left_s(self) -> float | None:
        """Return the seconds left of a phase that is counted, None while that is not known."""
        if self._ends is not None:
            return max(0.0, self._ends - time.monotonic())
        if not self._done or self._done > self._total:
            return None
        passed = time.monotonic() - self._phase_began
        return passed / self._done * (self._total - self._done)

    def close(self) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _tail(self) -> str:
        left = self.left_s()
        counted = f"{self._done}/{self._total}, " if self._total else ""
        # an estimate that was passed says nothing
        remaining = f", {self._at_most}about {clock(left)} left" if left else ""
        return f"{counted}{clock(time.monotonic() - self._phase_began)}{remaining}"

    def _show(self) -> None:
        bar = self._bar
        if bar is not None and self._task is not None:
            total = self._total or None
            bar.update(self._task, description=self._text, total=total, completed=self._done, tail=self._tail())

    def _tick(self) -> None:
        interval = 1.0 if self.live else self._still_s
        while not self._over.wait(interval):
            if self.live:
                self._show()
            elif time.monotonic() - self._said >= interval:
                self.say(f"still {self._text} ({self._tail()})")
