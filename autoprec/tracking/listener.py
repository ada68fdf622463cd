"""A search's listener that tells the tracker: the only code of tracking that ``autoprec search`` touches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autoprec.report.html import write_charts
from autoprec.tracking.origin import commit_of, versions
from autoprec.tracking.spool import named_uri
from autoprec.tracking.tracker import Tracker
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run

_FILES = ("report.html", "report.md", "result.json")


class TrackingListener:
    """Forwards a search's events to a :class:`Tracker`; see :class:`autoprec.tuning.events.Listener`.

    Args:
        runs_dir: ``autoprec-runs``; the default store is ``mlflow.db`` in it.
        tracking_uri: MLflow store; default as in :meth:`Tracker.open`.
        experiment: MLflow experiment; default as in :meth:`Tracker.open`.
    """

    def __init__(self, runs_dir: Path | str, *, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        named_uri(tracking_uri)  # refused before anything is run
        self._runs_dir, self._uri, self._experiment = Path(runs_dir), tracking_uri, experiment
        self._tracker: Tracker | None = None
        self._study_dir: Path | None = None
        self._finished = False

    def phase(self, name: str, detail: str = "") -> None:
        """Phases are for the terminal."""

    def note(self, text: str) -> None:
        """Notes are in the result."""

    def started(self, info: SearchInfo) -> None:
        self._study_dir = Path(info.study_dir)
        self._tracker = Tracker.open(
            self._study_dir, study=info.study, tracking_uri=self._uri, experiment=self._experiment
        )
        document: dict[str, Any] = asdict(info)
        document["groups"] = len(info.groups)
        # flat, beside what the script told: steps, seed, budget_s, ...; empty ones say nothing
        folder = document.pop("folder")
        asked = {key: value for key, value in document.pop("options").items() if value not in ("", None)}
        document = {**asked, **document, "version": versions(), **commit_of(folder)}
        self._tracker.study_started(document)

    def trial(self, record: Run, done: int, total: int, best: Run | None, seconds_left: float) -> None:  # noqa: ARG002
        if self._tracker is not None:
            self._tracker.trial(record, _groups(record))

    def finished(self, result: SearchResult) -> None:
        """The outcome is recorded by :meth:`attach`, which the command calls once the policy is written."""

    def attach(self, result: SearchResult, study_dir: Path | str) -> SearchResult:
        """Record the outcome and return it with its ``mlflow`` part filled in; never raises."""
        if self._tracker is None:
            return result
        with contextlib.suppress(Exception):  # an observer must never end a search
            self._study_dir = Path(study_dir)
            artifacts = [Path(result.policy)] if result.policy else []
            recorded = self._tracker.recorded()  # by earlier sessions of a resumed study, too
            artifacts += write_charts(self._study_dir / "charts", result, recorded)
            for record in self._marked(recorded, result):
                self._tracker.trial(record, _groups(record))
            found = self._tracker.finished(result, artifacts)
            self._finished = True
            return replace(result, mlflow=found)
        return result

    @staticmethod
    def _marked(recorded: Sequence[Run], result: SearchResult) -> list[Run]:
        """Return the records whose marks are known only now: on the front, the best, rejected, or no longer so.

        A resumed study may have another answer than before, and its best may be a trial of the session before.
        """
        front = {row.get("name") for row in result.front}
        own = [r for r in recorded if r.ok and r.kind in ("preset", "search")]
        own = own or [r for r in recorded if r.ok and r.kind == "finalist"]
        out = []
        for record in own:
            marks = {"pareto"} if record.name in front and record.name not in result.rejected else set()
            marks |= {"best"} if record.name == result.best.get("name") else set()
            marks |= {"infeasible"} if record.name in result.rejected else set()
            tags = (*(tag for tag in record.tags if tag not in ("pareto", "best", "infeasible")), *sorted(marks))
            if set(tags) != set(record.tags):
                out.append(replace(record, tags=tags))
        return out

    def close(self, timeout_s: float | None = None) -> None:
        """Attach the reports and end the run (KILLED when the search did not finish); never raises."""
        if self._tracker is None:
            return
        with contextlib.suppress(Exception):
            if self._finished and self._study_dir is not None:
                self._tracker.attach([path for name in _FILES if (path := self._study_dir / name).exists()])
            if timeout_s is None and not self._finished:
                timeout_s = 1.0  # somebody pressed Ctrl-C: the background process writes the rest
            self._tracker.close(timeout_s, status="FINISHED" if self._finished else "KILLED")
        self._tracker = None


def _groups(record: Run) -> dict[str, str]:
    return {key[6:]: str(value) for key, value in record.params.items() if key.startswith("layer:")}
