"""What a search leaves behind, as plain frozen data: one record per trial, one result per study.

The report, the tracker and ``--json`` read nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from autoprec.support.files import with_checksum, without_checksum
from autoprec.support.plain import or_null, rebuild
from autoprec.support.redact import redact_text

#: The tag of records whose trial compiled repeated blocks instead of the whole model.
BY_BLOCK = "by_block"
_RATES = ("throughput", "samples_per_s", "effective_speedup", "speedup_over_16bit")


def headline(metrics: Mapping[str, Any]) -> str:
    """Return the gain as it is told first: over the 16-bit run where that is known (a GPU), else over the script."""
    over = metrics.get("speedup_over_16bit")
    return f"{over:.2f}x over 16-bit" if over is not None else f"{metrics['speedup']:.2f}x over the script"


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One finished trial.

    Attributes:
        number: 0, 1, 2, ... in order of asking; finalist and reference runs have their own numbers.
        kind: ``reference``, ``noise`` (the benign perturbation), ``preset``, ``search`` or ``finalist``.
        name: what a person calls it: a preset's name, or ``trial 17``.
        params: what Optuna decided (``layer:<group>`` -> choice, and other parameters).
        policy: the policy document that ran; empty for the reference.
        status: ``ok``, ``pruned``, ``duplicate`` or a failure of :mod:`autoprec.trial.protocol`, with ``reason``.
        metrics: the names that every output uses: throughput (steps/s), samples_per_s, step_time_ms, memory_bytes,
            divergence, noise_floor, gradient_error, speedup, effective_speedup (ratios and divergence as fractions);
            on a GPU target also speedup_over_16bit, once the 16-bit run was measured.
        sources: metric name -> ``measured`` or ``modelled``.
        losses: per step; ``reference_losses`` the paired reference's.
        tags: any of preset, finalist, pareto, best, infeasible, pruned, unreliable (its times; ``reason`` says why).
        started, seconds: epoch seconds of the start, and duration.
        seed: which paired seed (0 is the script's own).
    """

    number: int
    kind: str
    name: str
    params: dict[str, Any]
    policy: dict[str, Any]
    status: str
    reason: str = ""
    tail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    tags: tuple[str, ...] = ()
    started: float = 0.0
    seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Hide secrets in what the script said: records go to databases, reports and tracking servers."""
        object.__setattr__(self, "reason", redact_text(self.reason))
        object.__setattr__(self, "tail", redact_text(self.tail))

    @property
    def ok(self) -> bool:
        """True when it was measured to its end."""
        return self.status == "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; non-finite losses become null."""
        curves = {"losses": or_null(self.losses), "reference_losses": or_null(self.reference_losses)}
        return asdict(self) | curves

    def to_stored(self) -> dict[str, Any]:
        """Return the form that a study's database holds: :meth:`to_json` and its checksum."""
        return with_checksum(self.to_json())

    @classmethod
    def from_stored(cls, document: dict[str, Any], *, where: str = "record") -> TrialRecord:
        """Rebuild from :meth:`to_stored`.

        Raises:
            FileError: it is not what was stored.
        """
        return cls.from_json(without_checksum(document, where=where))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrialRecord:
        return rebuild(cls, document)


def pooled(records: Iterable[TrialRecord]) -> dict[str, TrialRecord]:
    """Return every policy that was measured, by name: its first run, with the figures of all its paired runs.

    The speed-up is the median over the runs that compiled the model as the script does, where there are any, and what
    else is of time follows it, and the memory is theirs; the divergence is the mean over paired seeds, and
    ``metrics["seeds"]`` says over how many.
    """
    runs: dict[str, list[TrialRecord]] = {}
    for record in sorted(records, key=lambda r: (r.kind == "finalist", r.seed)):
        if record.ok and record.kind not in ("reference", "noise"):
            runs.setdefault(record.name, []).append(record)
    return {name: _pool(of_one) for name, of_one in runs.items()}


def _pool(runs: Sequence[TrialRecord]) -> TrialRecord:
    first = runs[0]
    if len(runs) == 1 or not {"speedup", "divergence"} <= first.metrics.keys():
        return first
    whole = [run for run in runs if BY_BLOCK not in run.tags] or runs
    speedup = statistics.median(run.metrics["speedup"] for run in whole)
    faster = speedup / first.metrics["speedup"]
    told = {name: value * faster for name, value in first.metrics.items() if name in _RATES}
    gaps = {run.seed: run.metrics["divergence"] for run in runs}  # under one seed the whole model's run is the later
    told |= {"speedup": speedup, "step_time_ms": first.metrics["step_time_ms"] / faster, "seeds": float(len(gaps))}
    told |= {name: whole[0].metrics[name] for name in ("memory_bytes",) if name in whole[0].metrics}
    told["divergence"] = statistics.fmean(gaps.values())
    return replace(first, metrics={**first.metrics, **told})


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search: exactly what ``autoprec search --json`` prints, plus what the report draws.

    ``verdict`` is ``adopt``, ``stay``, or ``undecided`` where a search was cut short before anything could be said:
    no policy is written then. ``cut_short`` says what was left out, ``resume`` is the command that goes on; both are
    empty where nothing was left out; ``stopped`` says why no further trial was run ("converged after 9 of 30 trials:
    ..."), and is in ``trials`` of the JSON document, too.
    ``best``, ``reference`` and the members of ``presets`` and ``front`` are metric
    mappings (presets and front carry ``name`` beside them); ``interval`` in ``best`` is the half width of the
    divergence's confidence interval over the finalist seeds. ``explanation`` is that of
    :func:`autoprec.tuning.decide.reasons.explanation`, or of ``stay_explanation`` where no trial was needed.
    ``study_name`` is ``study`` in JSON.
    ``rejected`` says, by name, why a finalist is not acceptable, ``not_taken`` why another that was measured to be
    faster is not the answer: too few paired seeds, or faster by no more than the timing noise.
    """

    verdict: str
    reason: str
    policy: str
    best: dict[str, Any]
    reference: dict[str, Any]
    presets: tuple[dict[str, Any], ...]
    front: tuple[dict[str, Any], ...]
    trials: dict[str, int]
    study_name: str
    storage: str
    mlflow: dict[str, Any]
    seconds: float
    target: str = ""
    script: str = ""
    budget: dict[str, Any] = field(default_factory=dict)
    sensitivity: tuple[dict[str, Any], ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    explanation: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    not_taken: dict[str, str] = field(default_factory=dict)
    cut_short: str = ""
    resume: str = ""
    stopped: str = ""

    def __post_init__(self) -> None:
        """Hide secrets in what is said: notes may quote the script's own output."""
        for name in ("reason", "cut_short", "script", "resume"):
            object.__setattr__(self, name, redact_text(getattr(self, name)))
        object.__setattr__(self, "notes", tuple(map(redact_text, self.notes)))

    def to_json(self) -> dict[str, Any]:
        out = {"study" if key == "study_name" else key: value for key, value in asdict(self).items()}
        return out | {"trials": {**self.trials, "stopped": self.stopped}}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        named = {"study_name" if key == "study" else key: value for key, value in document.items()}
        named["trials"] = {name: count for name, count in named["trials"].items() if name != "stopped"}
        return rebuild(cls, named)
