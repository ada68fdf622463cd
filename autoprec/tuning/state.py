"""What a search has learnt so far: trials, references, gradient errors; how long it took, and what was reported.

Runs are durable (they are written to the study before anything else reads them); the rest is rebuilt on ``--resume``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from autoprec.precision.recipes import AS_WRITTEN
from autoprec.support.plain import Document
from autoprec.support.redact import redact_text
from autoprec.support.units import counted
from autoprec.tuning.decide.decision import Rules, gradient_limit
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.decide.noise import Baseline, uninformative
from autoprec.tuning.decide.problem import VARIANT
from autoprec.tuning.decide.ranking import Ranking
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.events import Listener
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.schedule import CACHED_COMPILE, CLOSING_S
from autoprec.tuning.study.run import Run, headline, over_what
from autoprec.tuning.study.study import StudyStore

#: How many times :data:`CLOSING_S` they may be where the machine is not idle (14 s at a load of 9 on two cores).
MOST_LOADED = 4.0


def compared(options: SearchOptions, baseline: Baseline) -> list[tuple[float, Baseline]]:
    """Return what runs are compared by, as the budget of each and what is known of the script's own gaps.

    Args:
        options: its limits.
        baseline: of the loss, or of the metric that was asked for, with the losses beside it where they count as well.
    """
    beside = [] if baseline.loss is None else [(options.max_divergence, baseline.loss)]
    return [(options.tolerance, baseline), *beside]


def rules_of(options: SearchOptions, baseline: Baseline, noise: float | None) -> Rules:
    """Return what makes a policy acceptable.

    Args:
        options: its limits.
        baseline: what is known of the script itself.
        noise: mini-batch gradient noise, relative to the gradient's norm; None where it is unknown.
    """
    (tolerance, own), *beside = compared(options, baseline)
    blank = any(uninformative(budget, one) is not None for budget, one in ((tolerance, own), *beside))
    most = gradient_limit(noise, options.max_gradient_error, uninformative=blank)
    loss = next((Rules(budget, one, most, None, noise) for budget, one in beside), None)
    return Rules(tolerance, own, most, options.memory_limit, noise, loss)


@dataclass(slots=True)
class Seconds:
    """Seconds that the phases of a search took, None before they ended; only the phase beside a field writes it."""

    verdict_s: float | None = None  # the engine: until the bound was known
    first_step_s: float | None = None  # the engine: the script's first step, and what it compiled for that
    reference_run_s: float | None = None  # the reference: its first run
    compile_s: float | None = None  # by_block: of the whole model, with nothing cached
    cached_compile_s: float | None = None  # by_block: the same where torch's cache holds all of it
    step_s: float | None = None  # by_block: a step of the reference's first run
    sensitivity_s: float | None = None  # sensitivity: the table
    error_run_s: float | None = None  # sensitivity: the last gradient error of a whole policy
    finalists_s: float | None = None  # finalists: further paired seeds
    duels_s: float | None = None  # duels

    @property
    def cached_share(self) -> float:
        """The share of the seconds to compile that are left where torch's cache holds what is compiled."""
        return (self.cached_compile_s or 0.0) / self.compile_s if self.compile_s else CACHED_COMPILE

    def to_json(self) -> dict[str, float]:
        """Return those that are known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Work:
    """What the trials took together, over all threads; counted by :class:`~autoprec.tuning.paired.PairedRunner`.

    Attributes:
        starts: number of trials; ``start_s_sum`` is what they took until their first step.
        training_s: what they took from there to their end.
        trial_wall_s: wall time of all of them, as the driver saw it.
        passes: forward and backward passes, wherever and however fast they were run.
    """

    starts: float = 0.0
    start_s_sum: float = 0.0
    training_s: float = 0.0
    trial_wall_s: float = 0.0
    passes: float = 0.0

    def plus(self, other: Work) -> Work:
        """Return the sum of both."""
        return Work(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def start_s(self) -> float:
        """Seconds of a trial until its first step, on average; 0 before there was one."""
        return self.start_s_sum / max(1.0, self.starts)

    def to_json(self) -> dict[str, float]:
        """Return all by name; nothing before there was a trial."""
        return asdict(self) if self.starts else {}


@dataclass(slots=True)
class SearchState:
    """What one search has learnt. Every attribute has one writer, which is named beside it.

    Attributes:
        options: what makes a trial acceptable, and better than another.
        started: ``time.monotonic()`` when the search began.
        variants: how each variant went, as rows of the result.
        only_sixteen_bit: the space was narrowed to 16-bit policies.
        own: the reference under the script's own seed (reference).
        whole: where runs compile blocks (:mod:`autoprec.tuning.by_block`), the same as the script compiles it
            (reference).
        needed_s: seconds that the whole search usually takes; 0 before the reference was measured (reference).
        table: gradient errors by group and choice; None until they were measured (sensitivity).
        refused: policies that people write by hand and that cannot be run here, with the reason (trials).
        backend: who runs quantised layers, as a row of a policy's evidence; empty before it was decided, and where
            nothing was timed (trials).
        measured_errors: gradient errors of whole policies, by their records' names; all others are predicted
            (finalists).
        ranking: every policy that was tried, judged (finalists).
        seconds: what the phases took.
        notes: all that was reported (:meth:`note`).
        cut_short: what was left out for want of time; empty when the search came to its own end (:meth:`cut`).
        ended: why no further trial was run; empty where none was asked for (:meth:`end`).
    """

    store: StudyStore
    listener: Listener
    options: SearchOptions
    started: float
    variants: Sequence[Document] = ()
    only_sixteen_bit: bool = False
    own: Reference | None = None
    whole: Reference | None = None
    needed_s: float = 0.0
    table: SensitivityTable | None = None
    refused: dict[str, str] = field(default_factory=dict)
    backend: Document = field(default_factory=dict)
    measured_errors: dict[str, float] = field(default_factory=dict)
    ranking: Ranking = field(default_factory=Ranking)
    seconds: Seconds = field(default_factory=Seconds)
    notes: list[str] = field(default_factory=list)
    cut_short: list[str] = field(default_factory=list)
    ended: str = ""

    def variant(self, run: Run | None) -> Document:
        """Return the row of a run's variant, the reference's where none is named; empty for the script as given."""
        chosen = next((row["name"] for row in self.variants if row.get("chosen")), "")
        name = run.params.get(VARIANT, chosen) if run is not None else chosen
        return next((row for row in self.variants if row["name"] == name), {})

    def elapsed(self) -> float:
        """Return the seconds since the search began."""
        return time.monotonic() - self.started

    def note(self, text: str) -> None:
        """Report something a person should know, and keep it for the result, with what is secret in it hidden."""
        text = redact_text(text)
        self.notes.append(text)
        self.listener.note(text)

    def cut(self, text: str) -> None:
        """Report, and remember, that something was left out."""
        text = redact_text(text)
        if text not in self.cut_short:
            self.cut_short.append(text)
            self.note(text)

    def end(self, text: str) -> None:
        """Report, and remember, why no further trial is run."""
        self.ended = text
        self.note(text)

    @property
    def stopped(self) -> str:
        """Why no further trial was run, as the result says it; where 16 bit alone was tried, the verdict says why."""
        return "tried 16 bit alone" if self.ended and self.only_sixteen_bit else self.ended

    def seconds_per_run(self) -> float:
        """Return what one short run takes: the median trial of this study, before the first one the reference."""
        seconds = [record.seconds for record in self.store.learned() if record.ok]
        return statistics.median(seconds) if seconds else self.seconds.reference_run_s or 0.0

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
        return (self.seconds.error_run_s or self.seconds.reference_run_s or 0.0) + CLOSING_S * loaded

    @property
    def reference(self) -> Reference:
        """The reference under the script's own seed; ask for it once it was measured."""
        assert self.own is not None
        return self.own

    @property
    def written(self) -> Reference:
        """The reference under the script's own seed, compiled as the script compiles it."""
        return self.whole or self.reference

    @property
    def gradient_noise(self) -> float | None:
        """Mini-batch gradient noise, relative to the gradient's norm; None where it is unknown."""
        return self.table.noise if self.table is not None else None

    def rules(self, baseline: Baseline | None = None) -> Rules:
        """Return what makes a policy acceptable.

        Args:
            baseline: what its loss is compared with, where that is more than what one seed has told of the script.
        """
        own = self.own.baseline if self.own is not None else Baseline(0.0)  # stopped before it was measured
        rules = rules_of(self.options, own, self.gradient_noise)
        if baseline is None:
            return rules
        # where the first seed's loss could not judge, the gradient's limit stays as strict under further ones
        loss = replace(rules.loss, baseline=baseline.loss) if rules.loss and baseline.loss else rules.loss
        return replace(rules, baseline=baseline, loss=loss)

    def gradient_limit(self) -> float | None:
        """Return the largest acceptable relative gradient error, None for no limit."""
        return self.rules().max_gradient

    def exceeded(self, record: Run) -> tuple[str, ...]:
        """Name the metrics of a run that are beyond their limits."""
        return self.rules().exceeded(record.figures)

    def acceptable(self, record: Run) -> bool:
        """Say whether a trial was measured, and is within every limit."""
        return record.ok and bool(record.metrics) and not self.exceeded(record)

    def cost(self, record: Run) -> float:
        """Return what the objective minimises, of a run."""
        return objective_cost(record.figures, self.options.objective)

    @property
    def reference_text(self) -> str:
        """What everything is compared with, in words."""
        return over_what(self.options.reference, AS_WRITTEN)

    def measured_text(self) -> str:
        """Return what was measured of the study so far, for a search that ends before one policy is acceptable."""
        tried = [record for record in self.store.learned() if record.ok]
        if tried:
            names = "; ".join(f"{record.name} ({headline(record.to_row())})" for record in tried[:3])
            more = f" and {len(tried) - 3} more" if len(tried) > 3 else ""
            return f"{counted(len(tried), 'trial')} measured, and no policy is acceptable yet: {names}{more}"
        return f"{self.reference_text} was measured, and no policy yet" if self.own else "nothing was measured yet"

    def acceptable_ones(self) -> list[Run]:
        """Return the acceptable trials so far, the best first."""
        return sorted((r for r in self.store.learned() if self.acceptable(r)), key=self.cost)

    def best(self) -> Run | None:
        """Return the best of those that are surely acceptable; before there is one, of those that may be; or None."""
        sure = [r for r in self.store.learned() if r.ok and r.name in self.ranking.sure]
        fine = sure or [r for r in self.acceptable_ones() if r.name not in self.ranking.breaking]
        return min(fine, key=self.cost, default=None)


def objective_cost(metrics: Mapping[str, float], objective: str) -> float:
    """Return what an objective minimises: milliseconds, bytes, or (``balanced``) their product."""
    if objective == "memory":
        return metrics["memory_bytes"]
    if objective == "balanced":
        return metrics["step_time_ms"] * metrics["memory_bytes"]
    return metrics["step_time_ms"]
