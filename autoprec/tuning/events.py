"""What a search tells whoever listens: the terminal, the tracker, a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoprec.support.plain import Document
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run


@dataclass(frozen=True, slots=True)
class SearchInfo:
    """What is known once the script has been looked at.

    ``options`` are those of the search by name, ``folder`` is the script's.
    """

    study: str
    study_dir: str
    storage: str
    script: str
    target: str
    source: str
    launch: str
    device: str
    model: Document
    groups: dict[str, tuple[str, ...]]
    trials: int
    resume_command: str
    notes: tuple[str, ...] = field(default=())
    options: Document = field(default_factory=dict)
    folder: str = ""


class Listener:
    """Receives the events of one search, in order, from one thread; must return quickly and never raise."""

    def phase(self, name: str, detail: str = "") -> None:
        """A phase begins: script, graph, reference, sensitivity, search, finalists, duel, answer."""

    def started(self, info: SearchInfo) -> None:
        """The script reached its first training step and its operators are known."""

    def trial(self, record: Run, done: int, total: int, best: Run | None, seconds_left: float) -> None:
        """A trial ended; ``best`` is the best acceptable one so far.

        Args:
            record: its run.
            done, total: runs of its kind that ended, and those that are planned at most.
            best: the best acceptable run so far; None where that is the script as written.
            seconds_left: how long the search usually takes from here on; at most, with a time budget.
        """

    def note(self, text: str) -> None:
        """Something a person should know."""

    def finished(self, result: SearchResult) -> None:
        """The search ended."""


class Listeners(Listener):
    """Forwards every event to several listeners; one that raises is dropped, and the search goes on."""

    def __init__(self, *members: Listener) -> None:
        self._members = list(members)
        self.dropped: list[str] = []

    def _each(self, event: str, *values: Any) -> None:
        failed = []
        for member in list(self._members):
            try:
                getattr(member, event)(*values)
            except Exception as error:  # an observer must never end a search
                self._members.remove(member)
                self.dropped.append(f"{type(member).__name__}.{event}: {type(error).__name__}: {error}")
                failed.append(f"{type(member).__name__} failed and is told no more ({error}); the search goes on")
        for text in failed:
            self._each("note", text)

    def phase(self, name: str, detail: str = "") -> None:
        self._each("phase", name, detail)

    def started(self, info: SearchInfo) -> None:
        self._each("started", info)

    def trial(self, record: Run, done: int, total: int, best: Run | None, seconds_left: float) -> None:
        self._each("trial", record, done, total, best, seconds_left)

    def note(self, text: str) -> None:
        self._each("note", text)

    def finished(self, result: SearchResult) -> None:
        self._each("finished", result)
