"""What a search shows while it runs: one line per event on stderr, a live bar on a terminal only."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from autoprec.tuning.events import SearchInfo
from autoprec.tuning.study.records import SearchResult, TrialRecord

__all__ = ["TerminalProgress", "stderr_console"]

PHASES = {
    "script": "starting the script",
    "graph": "recording one training step",
    "reference": "reference runs and noise floor",
    "verdict": "what could be gained",
    "sensitivity": "gradient error per group and recipe",
    "search": "trials",
    "finalists": "finalists, paired seeds",
    "answer": "writing the policy",
}


def stderr_console() -> Console:
    """Return a console on stderr that honours NO_COLOR."""
    return Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")), highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    seconds = max(0, round(seconds))
    return f"{seconds // 60}:{seconds % 60:02d}"


def describe(record: TrialRecord) -> str:
    """Return one trial in a few words: what it gained, what it cost, or why it failed."""
    if not record.ok:
        return f"{record.status}: {record.reason}"
    m = record.metrics
    return f"{m['speedup']:.2f}x  divergence {m['divergence']:.3%}  {m['memory_bytes'] / 1e6:.0f} MB"


class TerminalProgress:
    """Prints phases, trials, the best so far and the time left.

    Args:
        verbosity: -1 prints nothing but notes, 0 phases and a bar (lines when not on a terminal), 1 every trial.
    """

    def __init__(self, verbosity: int = 0) -> None:
        self._console = stderr_console()
        self._verbosity = verbosity
        self._live = verbosity >= 0 and sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = time.monotonic()

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(f"[{_clock(time.monotonic() - self._started)}] {text}", style=style, markup=False)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def phase(self, name: str, detail: str = "") -> None:
        """Announce a phase."""
        self._end_bar()
        if self._verbosity >= 0:
            self._say(PHASES.get(name, name) + (f": {detail}" if detail else ""), style="bold")

    def started(self, info: SearchInfo) -> None:
        """Show what was found in the script."""
        if self._verbosity < 0:
            return
        model = info.model
        self._say(
            f"{model['class']}, {model['parameters'] / 1e6:.1f} M parameters, {len(info.groups)} groups of layers; "
            f"target {info.target} ({info.source}); trials start by {info.launch}"
        )

    def trial(self, record: TrialRecord, done: int, total: int, best: TrialRecord | None, seconds_left: float) -> None:
        """Show one finished trial."""
        if self._verbosity < 0 or (record.kind in ("reference", "noise") and self._verbosity < 1):
            return
        leader = f"best {best.metrics['speedup']:.2f}x ({best.name})" if best else "best: the script as written"
        count = f"finalist run {done}/{total}" if record.kind == "finalist" else f"{done}/{total}"
        line = f"{count} {record.name}: {describe(record)}"
        if self._live and self._verbosity == 0:
            if self._bar is None:
                columns: tuple[Any, ...] = (
                    TextColumn("{task.description}"),
                    BarColumn(28),
                    TextColumn("{task.fields[tail]}"),
                )
                self._bar = Progress(*columns, console=self._console, transient=True)
                self._task = self._bar.add_task("", total=total, tail="")
                self._bar.start()
            if self._task is not None:
                tail = f"{leader}, {_clock(seconds_left)} left"
                self._bar.update(
                    self._task,
                    completed=done,
                    total=total,
                    description=count if record.kind == "finalist" else f"trial {count}",
                    tail=tail,
                )
        elif self._verbosity > 0 or not record.ok or done % 5 == 0 or done == total:
            self._say(f"{line}   [{leader}; {_clock(seconds_left)} left]")

    def note(self, text: str) -> None:
        """Show a note."""
        self._say(f"note: {text}", style="yellow")

    def finished(self, result: SearchResult) -> None:  # noqa: ARG002 - the command prints the result itself
        """Stop the bar."""
        self._end_bar()

    def close(self) -> None:
        """Stop the bar, whatever happened."""
        self._end_bar()
