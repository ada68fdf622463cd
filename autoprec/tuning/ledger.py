"""What a search has learnt so far: trials, references, gradient errors; how long it took, and what was reported.

Runs are durable (they are written to the study before anything else reads them); the rest is rebuilt on ``--resume``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoprec.tuning.decide.decision import Rules, gradient_limit
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.decide.noise import Baseline, uninformative
from autoprec.tuning.decide.problem import VARIANT
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.events import Listener
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.schedule import CLOSING_S
from autoprec.tuning.study.run import Run
from autoprec.tuning.study.study import StudyStore

#: How many times :data:`CLOSING_S` they may be where the machine is not idle (14 s at a load of 9 on two cores).
MOST_LOADED = 4.0


@dataclass(slots=True)
class Ledger:
    """The books of one search.

    Attributes:
        options: what makes a trial acceptable, and better than another.
        started: ``time.monotonic()`` when the search began.
        references: the reference run by paired seed; seed 0 is the script's own.
        whole: where runs compile blocks (:mod:`autoprec.tuning.by_block`), references as the script compiles them.
        table: gradient errors by group and choice; None until they were measured.
        measured_errors: gradient errors of whole policies, by their records' names; all others are predicted.
        accepted, refused: names of policies that are surely acceptable, and of those that break a limit.
        timings: seconds by phase, and what else is counted.
        cut_short: what was left out for want of time; empty when the search came to its own end.
        stopped: why no further trial was run; empty where none was asked for.
        needed_s: seconds that the whole search usually takes; 0 before the reference was measured.
        variants: how each variant went, as rows of the result.
    """

    store: StudyStore
    listener: Listener
    options: SearchOptions
    started: float
    references: dict[int, Reference] = field(default_factory=dict)
    whole: dict[int, Reference] = field(default_factory=dict)
    table: SensitivityTable | None = None
    measured_errors: dict[str, float] = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    timings: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cut_short: list[str] = field(default_factory=list)
    stopped: str = ""
    needed_s: float = 0.0
    variants: list[dict[str, Any]] = field(default_factory=list)

    def variant(self, run: Run | None) -> dict[str, Any]:
        """Return the row of a run's variant, the reference's where none is named; empty for the script as given."""
        chosen = next((row["name"] for row in self.variants if row.get("chosen")), "")
        name = run.params.get(VARIANT, chosen) if run is not None else chosen
        return next((row for row in self.variants if row["name"] == name), {})

    def elapsed(self) -> float:
        """Return the seconds since the search began."""
        return time.monotonic() - self.started

    def note(self, text: str) -> None:
        """Report something a person should know, and keep it for the result."""
        self.notes.append(text)
        self.listener.note(text)

    def cut(self, text: str) -> None:
        """Tell, and remember, that something was left out."""
        if text not in self.cut_short:
            self.cut_short.append(text)
            self.note(text)

    def seconds_per_run(self) -> float:
        """Return what one short run takes: the median trial of this study, before the first one the reference."""
        seconds = [record.seconds for record in self.store.learned() if record.ok]
        return statistics.median(seconds) if seconds else self.timings.get("reference_run_s", 0.0)

    def seconds_per_seed(self, setup_s: float, at_once: int) -> float:
        """Return what one more paired seed takes: the median of this study, before the first one an estimate.

        Args:
            setup_s: until the script is at its first step, under a new seed.
            at_once: runs beside each other: the policy's and its reference's.
        """
        seconds = [record.seconds for record in self.store.records if record.kind == "finalist" and record.ok]
        return statistics.median(seconds) if seconds else setup_s + 2 * self.seconds_per_run() / min(2, at_once)

    def seconds_to_close(self) -> float:
        """Return what is left to do after the last run: the gradient error of what is adopted, policy and reports."""
        loaded = min(MOST_LOADED, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
        return self.timings.get("error_run_s", self.timings.get("reference_run_s", 0.0)) + CLOSING_S * loaded

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to a running total of :attr:`timings`."""
        self.timings[name] = self.timings.get(name, 0.0) + seconds

    @property
    def reference(self) -> Reference:
        """The reference under the script's own seed."""
        return self.references[0]

    @property
    def written(self) -> Reference:
        """The reference under the script's own seed, compiled as the script compiles it."""
        return self.whole.get(0, self.reference)

    @property
    def gradient_noise(self) -> float | None:
        """Mini-batch gradient noise, relative to the gradient's norm; None where it is unknown."""
        return self.table.noise if self.table is not None else None

    def rules(self, baseline: Baseline | None = None) -> Rules:
        """Return what makes a policy acceptable.

        Args:
            baseline: what its loss is compared with, where that is more than what one seed has told of the script.
        """
        own = self.references[0].baseline if self.references else Baseline(0.0)  # stopped before it was measured
        asked, blank = self.options, uninformative(self.options.max_divergence, own) is not None
        most = gradient_limit(self.gradient_noise, asked.max_gradient_error, uninformative=blank)
        return Rules(asked.max_divergence, baseline or own, most, asked.memory_limit, self.gradient_noise)

    def gradient_limit(self) -> float | None:
        """Return the largest acceptable relative gradient error, None for no limit."""
        return self.rules().max_gradient

    def exceeded(self, record: Run) -> tuple[str, ...]:
        """Name the metrics of a run that are beyond their limits."""
        return self.rules().exceeded(record.figures)

    def acceptable(self, record: Run) -> bool:
        """Say whether a trial was measured, and is within every limit."""
        return record.ok and bool(record.metrics) and not self.exceeded(record)

    def rank(self, record: Run) -> float:
        """Return what the objective minimises, of a run."""
        return rank(record.figures, self.options.objective)

    def acceptable_ones(self) -> list[Run]:
        """Return the acceptable trials so far, the best first."""
        return sorted((r for r in self.store.learned() if self.acceptable(r)), key=self.rank)

    def best(self) -> Run | None:
        """Return the best of those that are surely acceptable; before there is one, of those that may be; or None."""
        sure = [r for r in self.store.learned() if r.ok and r.name in self.accepted]
        fine = sure or [r for r in self.acceptable_ones() if r.name not in self.refused]
        return min(fine, key=self.rank, default=None)


def rank(metrics: Mapping[str, float], objective: str) -> float:
    """Return what an objective minimises: milliseconds, bytes, or (``balanced``) their product."""
    if objective == "memory":
        return metrics["memory_bytes"]
    if objective == "balanced":
        return metrics["step_time_ms"] * metrics["memory_bytes"]
    return metrics["step_time_ms"]
