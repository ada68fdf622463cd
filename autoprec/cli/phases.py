"""Says what a command is doing, from the first second, on stderr: a ticking line on a terminal, plain lines elsewhere.

A command that runs a script cannot know how long that takes to its first training step, so it says what it
waits for and since when, and how long is left as soon as anything countable has begun::

    with Phases() as phases:
        phases.begin("starting train.py")
        ...
        phases.begin("gradient errors", total=60)
        phases.advance(12)
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from autoprec.cli.console import clock, command_began, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Phases:
    """Tells phase after phase; a context manager, so that the line is taken away whatever happens.

    Args:
        quiet: say nothing.

    Attributes:
        live: stderr is a terminal, where one line ticks.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = stderr_console()
        self._quiet = quiet
        self.live = not quiet and sys.stderr.isatty()
        self._began = command_began()
        self._bar: Progress | None = None
        self._task: TaskID
        self._total = 0

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(self, text: str, *, total: int = 0) -> None:
        """Announce a phase; ``total`` counts what :meth:`advance` will report, 0 where nothing can be counted."""
        self._total = total
        if not self.live:
            self.say(text)
            return
        if self._bar is None:
            from rich.progress import (
                BarColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            words = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20))
            times = (TextColumn("{task.fields[count]}"), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*words, *times, console=self._console, transient=True, refresh_per_second=2)
            self._bar.start()
        else:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=total or None, count="")

    def advance(self, done: int, total: int = 0, *, text: str = "") -> None:
        """Report how much of the phase is done, of how many, and what the ticking line shows from now on.

        Args:
            done: steps, trials or passes that ended.
            total: of them; 0 keeps what was said before.
            text: of the ticking line; empty keeps it.
        """
        if self._bar is not None:
            self._total = total or self._total
            count = f"{done}/{self._total}" if self._total else ""
            self._bar.update(self._task, completed=done, total=total or None, description=text or None, count=count)

    def say(self, text: str) -> None:
        """Print a line that stays, with the time since the command began."""
        if not self._quiet:
            self.print(text)

    def print(self, text: str, style: str = "") -> None:
        """Print a line however quiet it was asked to be: a note."""
        self._console.print(f"[{clock(time.monotonic() - self._began)}] {text}", style=style, markup=False)

    def close(self) -> None:
        """Take the ticking line away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
