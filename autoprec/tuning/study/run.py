"""One run of the script under one policy and one paired seed: what ran, how it ended, and what was measured.

There is one record of a run. It is made where a host's message is read (:func:`autoprec.tuning.phases.measuring.scored`
and the reference's), stored in the study, fitted by the models, ranked by the decision, and printed by every outlet.
Each of its figures is a :class:`Metric`: a value that says whether it was measured or modelled, and its 95 % interval
where that is known. :data:`METRICS` says once what each figure is: label, unit, direction, and how it is written;
which tables show it, ``study/rows.py`` and ``tracking/view.py`` say; ``_pool`` and ``_RATES``, how several runs are
pooled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autoprec.errors import FileError, StudyError
from autoprec.support.files import with_checksum, without_checksum
from autoprec.support.plain import Document, or_null, rebuild
from autoprec.support.redact import redact_text
from autoprec.support.units import memory_text, percent_text, speed_text, time_text
from autoprec.trial.losses import Series

#: What Optuna decided of a point: ``layer:<group>`` -> choice, and plain parameter names -> values.
Params = Mapping[str, Any]
#: The tag of runs whose trial compiled repeated blocks instead of the whole model.
BY_BLOCK = "by_block"
#: The kind of a run that timed a policy beside the reference: its speed-up has an interval, its losses mean nothing.
DUEL = "duel"
MEASURED, MODELLED = "measured", "modelled"
#: What to do about a damaged study.
REPAIR = (
    "put an intact copy of the database back, or begin again with --study NEW; nothing was changed, and the policies "
    "that were saved are still good"
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run.

    Attributes:
        value: in the unit of :data:`METRICS`; ratios, divergences and gradient errors are fractions.
        source: ``measured`` or ``modelled``.
        low, high: bounds of its two-sided 95 % interval; None where that is not known.
    """

    value: float
    source: str = MEASURED
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What a metric is.

    Attributes:
        label: its heading in a table.
        unit: empty for a ratio or a fraction.
        better: ``higher``, ``lower``, or empty where it is neither.
        text: writes a value for a person.
    """

    label: str
    unit: str
    better: str
    text: Callable[[float], str]


#: Every metric by the name that the database, ``--json``, MLflow and Python use for it.
METRICS = {
    "speedup": About("over the script", "", "higher", speed_text),
    "speedup_over_16bit": About("over 16-bit", "", "higher", speed_text),
    "effective_speedup": About("effective speed-up", "", "higher", speed_text),
    "divergence": About("divergence", "", "lower", percent_text),
    "noise_floor": About("noise floor", "", "", percent_text),
    "gradient_error": About("gradient error", "", "lower", percent_text),
    "memory_bytes": About("memory", "bytes", "lower", memory_text),
    "step_time_ms": About("step", "ms", "lower", time_text),
    "throughput": About("throughput", "steps/s", "higher", "{:.4g} steps/s".format),
    "samples_per_s": About("samples", "samples/s", "higher", "{:.4g} samples/s".format),
}
#: Figures that follow the speed-up where that is taken over several runs.
_RATES = ("throughput", "samples_per_s", "effective_speedup", "speedup_over_16bit")


def error_text(error: float, noise: float | None) -> str:
    """Return a gradient error in percent of the gradient and in units of its noise, where that is known."""
    return f"{100 * error:.3g} %" + (f" ({error / noise:.2g} of the noise)" if noise else "")


def metrics_of(values: Mapping[str, float], source: str | Mapping[str, str] = MEASURED) -> dict[str, Metric]:
    """Return plain values as metrics.

    Args:
        source: where all of them come from, or each by name (``measured`` where it is not named).
    """
    named = {} if isinstance(source, str) else source
    usual = source if isinstance(source, str) else MEASURED
    return {name: Metric(value, named.get(name, usual)) for name, value in values.items()}


#: Bounds of the relative timing noise of a median over the seeds; the latter where it cannot be measured, or is larger.
LEAST_NOISE, MOST_NOISE = 0.01, 0.10


def noise_text(noise: float) -> str:
    """Return what two speed-ups have to be apart by: the noise, which is not known above a bound, or the model's."""
    if noise < LEAST_NOISE:
        return f"the cost model's resolution of {noise:.1%}"
    return f"the timing noise, {noise:.0%} or more" if noise >= MOST_NOISE else f"the timing noise of {noise:.1%}"


def reference_name(reference: str) -> str:
    """Return the name of the runs of a reference: ``script``, ``fp32`` or ``bf16``."""
    return "script as written" if reference == "script" else f"script in {reference}"


def over_what(reference: str, written: str = "the script") -> str:
    """Return what a gain over a reference is over: ``script`` (as ``written`` says it), ``fp32`` or ``bf16``."""
    return written if reference == "script" else f"the {reference} reference"


def headline(row: Mapping[str, Any], reference: str = "script") -> str:
    """Return the gain that is given first: over the 16-bit run where that is known (a GPU), else over the reference.

    Args:
        row: metrics by name.
        reference: what the speed-up is over: ``script``, ``fp32`` or ``bf16``.
    """
    name, what = "speedup_over_16bit", "16-bit"
    if row.get(name) is None:
        name, what = "speedup", over_what(reference)
    return f"{speed_text(row[name], *row.get('intervals', {}).get(name, ()))} over {what}"


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run; ``run["speedup"]`` is the value of a metric.

    Attributes:
        number: 0, 1, 2, ... in order of asking; finalist and reference runs have their own numbers.
        kind: ``reference``, ``noise`` (the benign perturbation), ``preset``, ``search``, ``finalist`` or
            ``duel``.
        name: what a person calls it: a preset's name, or ``trial 17``.
        params: what Optuna decided (``layer:<group>`` -> choice, and other parameters).
        policy: the policy document that ran; empty for the reference.
        status: ``ok``, ``pruned``, ``duplicate`` or a failure of :mod:`autoprec.trial.protocol`, with ``reason`` and
            ``tail``, the last lines of its output.
        metrics: by the names of :data:`METRICS`; empty where it failed. On a GPU target also ``speedup_over_16bit``,
            once the 16-bit run was measured.
        losses: per step; ``reference_losses`` the paired reference's.
        metric: what the two are compared by where that is not their losses; ``higher``: more of it is better.
        values: what was reported of it; ``reference_values`` by the paired reference.
        tags: any of preset, finalist, pareto, best, infeasible, pruned, unreliable (its times; ``reason`` says why).
        started, seconds: epoch seconds of the start, and duration.
        seed: which paired seed (0 is the script's own).
    """

    number: int
    kind: str
    name: str
    params: Params
    policy: Document
    status: str
    reason: str = ""
    tail: str = ""
    metrics: dict[str, Metric] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    metric: str = ""
    higher: bool = False
    values: tuple[float, ...] = ()
    reference_values: tuple[float, ...] = ()
    tags: tuple[str, ...] = ()
    started: float = 0.0
    seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Hide secrets in what the script said: runs go to databases, reports and tracking servers."""
        object.__setattr__(self, "reason", redact_text(self.reason))
        object.__setattr__(self, "tail", redact_text(self.tail))

    @property
    def ok(self) -> bool:
        """True when it was measured to its end."""
        return self.status == "ok"

    @property
    def curve(self) -> tuple[float, ...]:
        """What it is compared by, lower being better: its losses, or what it reported of the metric asked for."""
        return Series(self.metric, self.higher, values=self.values).curve if self.metric else self.losses

    @property
    def reference_curve(self) -> tuple[float, ...]:
        """The same of its paired reference."""
        values = self.reference_values
        return Series(self.metric, self.higher, values=values).curve if self.metric else self.reference_losses

    def __getitem__(self, name: str) -> float:
        """Return the value of a metric.

        Raises:
            KeyError: the run has none of this name.
        """
        return self.metrics[name].value

    def get(self, name: str) -> float | None:
        """Return the value of a metric; None where the run has none of this name."""
        found = self.metrics.get(name)
        return None if found is None else found.value

    @property
    def figures(self) -> dict[str, float]:
        """The values of all metrics by name."""
        return {name: metric.value for name, metric in self.metrics.items()}

    @property
    def sources(self) -> dict[str, str]:
        """Where each metric comes from: ``measured`` or ``modelled``."""
        return {name: metric.source for name, metric in self.metrics.items()}

    @property
    def intervals(self) -> dict[str, tuple[float | None, float | None]]:
        """Bounds of the metrics whose interval is known."""
        bounds = ((name, (metric.low, metric.high)) for name, metric in self.metrics.items())
        return {name: bound for name, bound in bounds if bound != (None, None)}

    @property
    def gain(self) -> dict[str, float | None]:
        """Its speed-up, with bounds ``low`` and ``high`` (None where they are not known)."""
        found = self.metrics["speedup"]
        return {"speedup": found.value, "low": found.low, "high": found.high}

    def to_row(self) -> Document:
        """Return its metrics as a row of a result: values by name, ``sources``, and ``intervals`` where known."""
        values: Document = {name: self[name] for name in METRICS if name in self.metrics}
        bounds = {"intervals": self.intervals} if self.intervals else {}
        return values | {"name": self.name, "sources": self.sources} | bounds

    def with_metrics(self, more: Mapping[str, Metric]) -> Run:
        """Return a copy with further metrics, or others of the same names."""
        return replace(self, metrics=self.metrics | dict(more))

    def to_json(self) -> Document:
        """Return the JSON form: values, ``sources`` and ``intervals`` by name; non-finite losses become null."""
        out = {one.name: getattr(self, one.name) for one in fields(self)}
        parts = {"metrics": self.figures, "sources": self.sources, "intervals": self.intervals}
        curves = ("losses", "reference_losses", "values", "reference_values")
        return out | parts | {name: or_null(getattr(self, name)) for name in curves}

    def to_stored(self) -> Document:
        """Return what a study's database holds: attributes that Optuna's tables and plots show, figures among them.

        ``record`` is the rest of :meth:`to_json`, with the checksum of the whole: each figure is held once.
        """
        whole = with_checksum(self.to_json())
        shown = {name: value for name, value in self.figures.items() if math.isfinite(value)}
        whole["metrics"] = {name: value for name, value in self.figures.items() if name not in shown}
        about = {"kind": self.kind, "name": self.name, "status": self.status, "reason": self.reason}
        return {**shown, **about, "seed": self.seed, "tags": ", ".join(self.tags), "record": whole}

    @classmethod
    def from_stored(cls, attributes: Mapping[str, Any], *, where: str) -> Run:
        """Rebuild from :meth:`to_stored`.

        Raises:
            StudyError: it is not what was stored.
        """
        document = attributes.get("record")
        try:
            if not isinstance(document, dict):
                raise FileError("is damaged: its record is missing", where=where)
            shown = {name: attributes[name] for name in document.get("sources", ()) if name in attributes}
            whole = document | {"metrics": {**document.get("metrics", {}), **shown}}
            return cls.from_json(without_checksum(whole, where=where))
        except (FileError, TypeError, ValueError) as error:
            what = error.what if isinstance(error, FileError) else f"cannot be read: {error}"
            raise StudyError(what, where=where, fix=REPAIR) from error

    @classmethod
    def from_json(cls, document: Document) -> Run:
        """Rebuild from :meth:`to_json`; a metric whose interval was not stored has none."""
        sources, intervals = document.get("sources", {}), document.get("intervals", {})
        metrics = {
            name: Metric(value, sources.get(name, MEASURED), *intervals.get(name, ()))
            for name, value in document.get("metrics", {}).items()
        }
        return rebuild(cls, document | {"metrics": metrics})


def pooled(runs: Iterable[Run], *, to_rank: bool = False) -> dict[str, Run]:
    """Return every policy that was measured, by name: its first run, with the figures of all its paired runs.

    The speed-up is that of its duel, with its interval, that of a duel of blocks only ``to_rank``: whole models were
    once a quarter off (:func:`last_duels`). Without a duel it is the median over the runs that compiled the model as
    the script does, where there are any, whose memory counts then. What else is of time follows it; the divergence is
    the mean over paired seeds, and ``metrics["seeds"]`` says over how many.
    """
    by_name: dict[str, list[Run]] = {}
    runs = list(runs)
    duels = last_duels(runs)
    if not to_rank:
        duels = {name: _without_bounds(duel) if BY_BLOCK in duel.tags else duel for name, duel in duels.items()}
    for run in sorted(runs, key=lambda r: (r.kind == "finalist", r.seed)):
        if run.ok and run.kind not in ("reference", "noise"):
            by_name.setdefault(run.name, []).append(run)
    return {name: _pool(of_one, duels.get(name)) for name, of_one in by_name.items()}


def last_duels(runs: Iterable[Run]) -> dict[str, Run]:
    """Return what is known of each policy's speed, by name: its last duel, of whole models where it was in one.

    Speeds in duels of blocks are those of whole models as far as what was in both says.
    """
    blocks: dict[str, Run] = {}
    whole: dict[str, Run] = {}
    for run in (run for run in runs if run.kind == DUEL and run.ok):
        (blocks if BY_BLOCK in run.tags else whole)[run.name] = run
    logs = [math.log(whole[name]["speedup"] / blocks[name]["speedup"]) for name in whole if name in blocks]
    off = math.exp(statistics.fmean(logs)) if logs else 1.0
    return {name: _times_as_fast(run, off) for name, run in blocks.items()} | whole


def _without_bounds(duel: Run) -> Run:
    return duel.with_metrics({name: replace(one, low=None, high=None) for name, one in duel.metrics.items()})


def _times_as_fast(duel: Run, factor: float) -> Run:
    """Return a duel whose policy is so many times as fast."""
    factors = {"speedup": factor, "step_time_ms": 1.0 / factor}
    metrics = {name: duel.metrics[name] for name in factors if name in duel.metrics and factor != 1.0}
    return duel.with_metrics(
        {
            name: replace(
                metric,
                value=metric.value * factors[name],
                low=None if metric.low is None else metric.low * factors[name],
                high=None if metric.high is None else metric.high * factors[name],
            )
            for name, metric in metrics.items()
        }
    )


def _pool(runs: Sequence[Run], duel: Run | None) -> Run:
    runs = [run for run in runs if run.kind != DUEL] or runs
    first = runs[0]
    if not {"speedup", "divergence"} <= first.metrics.keys() or (len(runs) == 1 and duel is None):
        return first
    whole = [run for run in runs if BY_BLOCK not in run.tags] or runs
    median = replace(first.metrics["speedup"], value=statistics.median(run["speedup"] for run in whole))
    speedup = duel.metrics["speedup"] if duel is not None else median
    faster = speedup.value / first["speedup"]
    rates = {name: replace(one, value=one.value * faster) for name in _RATES if (one := first.metrics.get(name))}
    values = {"step_time_ms": first["step_time_ms"] / faster}
    if len(runs) > 1:
        gaps = {run.seed: run["divergence"] for run in runs}  # under one seed the whole model's run is the later
        values |= {"seeds": float(len(gaps)), "divergence": statistics.fmean(gaps.values())}
        values |= {name: whole[0][name] for name in ("memory_bytes",) if name in whole[0].metrics}
    return first.with_metrics(rates | metrics_of(values, first.sources) | {"speedup": speedup})
