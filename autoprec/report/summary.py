"""A search's outcome arranged for reading: rows, points, curves, cost and payback; pure data, no layout.

Two things are decided here, once for the terminal, the page, Markdown and MLflow. *What a gain is told against*: people
run bf16 autocast today, so the headline on a GPU is the gain over the best 16-bit run that was measured; the gain over
the script as written comes second. *Which figure a policy gets*: one that was re-measured on several paired seeds has
the mean over them wherever it is shown, so that it never appears with two divergences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoprec.tuning.decide.reasons import error_share
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run, pooled

#: Formats of 16 bits; a policy that uses no other is one of the runs people have today.
_SIXTEEN_BITS = frozenset({"bf16", "fp16"})


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison: the policy, the reference, or a preset. Missing figures are None.

    ``speedup`` is over the script as written, ``speedup_over_16bit`` over the best 16-bit run, where there is one;
    ``seeds`` are the paired seeds that the figures are of, 0 where that is not known; ``predicted`` says that the
    gradient error is the sensitivity table's, not measured for the policy as a whole.
    """

    name: str
    role: str
    speedup: float | None = None
    speedup_over_16bit: float | None = None
    step_time_ms: float | None = None
    throughput: float | None = None
    memory_bytes: float | None = None
    divergence: float | None = None
    interval: float | None = None
    gradient_error: float | None = None
    source: str = ""
    note: str = ""
    seeds: int = 0
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One policy in the plane of step time (ms) and divergence (a fraction, the mean over its paired seeds)."""

    name: str
    kind: str
    step_time_ms: float
    divergence: float
    front: bool
    best: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses per step of one run."""

    name: str
    kind: str
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Payback:
    """What the search cost and when it is earned back.

    ``saved_share`` is the part of a training run's time that the policy saves; ``break_even_s`` the length of a
    training run (measured without the policy) whose savings equal the search's own ``seconds``. Both are None when
    nothing is saved, or when the figures are modelled for another machine than the one that searched. ``stopped`` says
    why no further trial was run, ``sessions`` how often the search was begun or resumed, ``against`` what is saved of.
    """

    seconds: float
    trials: int
    runs: int
    saved_share: float | None
    break_even_s: float | None
    stopped: str = ""
    sessions: int = 1
    against: str = "a training run"


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a report shows.

    ``baseline`` is the best 16-bit run (None on a CPU, and where none was measured); ``gradient_limit`` the largest
    acceptable gradient error as a fraction of the gradient, like every gradient error here, and like the noise of its
    mini-batches, ``gradient_noise``.
    """

    title: str
    verdict: str
    reason: str
    rows: tuple[Row, ...]
    points: tuple[Point, ...]
    curves: tuple[Curve, ...]
    noise: tuple[tuple[float, float], ...]
    noise_floor: float | None
    limit: float | None
    baseline: Row | None
    gradient_limit: float | None
    gradient_noise: float | None
    assignment: dict[str, str]
    payback: Payback
    failures: tuple[tuple[str, str], ...]
    source: str


def number(value: Any) -> float | None:
    """Return a finite float, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _is_16bit(record: Run) -> bool:
    """Say whether a policy is what people run today: 16-bit formats or none, and 16-bit somewhere."""
    recipes = record.policy.get("recipes") or {}
    used = {str(record.policy.get("default", "keep"))}
    for rule in record.policy.get("layers") or ():
        used |= {str(rule.get("recipe")), *map(str, (rule.get("gemms") or {}).values())}
    formats = {str((recipes.get(name) or {}).get("format")) for name in used - {"keep"}}
    lowered = {str(record.policy.get("activations", "keep"))} - {"keep"}
    return bool(formats | lowered) and formats | lowered <= _SIXTEEN_BITS


def _baseline(result: SearchResult, records: Sequence[Run]) -> str:
    """Return the name of the fastest 16-bit preset measured; empty on a CPU, and where there is none."""
    times = {
        record.name: time
        for record in pooled(records).values()
        if record.kind == "preset" and _is_16bit(record)
        if (time := number(record.get("step_time_ms"))) is not None
    }
    return "" if result.target == "cpu" else min(times, key=lambda name: times[name], default="")


#: What a metric mapping and a row have in common.
_FIGURES = (
    *("speedup", "speedup_over_16bit", "step_time_ms", "throughput"),
    *("memory_bytes", "divergence", "interval", "gradient_error"),
)


def _by_name(records: Iterable[Run]) -> dict[str, Run]:
    return {record.name: record for record in records if record.ok}


def _source(metrics: Mapping[str, Any], record: Run | None) -> str:
    own = metrics.get("sources")
    sources = own if isinstance(own, Mapping) and own else (record.sources if record else {})
    kinds = {str(sources[key]) for key in ("step_time_ms", "speedup") if key in sources}
    if isinstance(metrics.get("source"), str):
        return str(metrics["source"])
    return " and ".join(sorted(kinds))


def metrics_row(metrics: Mapping[str, Any], role: str, records: Mapping[str, Run] | None = None, name: str = "") -> Row:
    """Return a metric mapping of a result as a row; ``records`` (by name) tell measured from modelled."""
    label = str(name or metrics.get("name") or role)
    record = (records or {}).get(str(metrics.get("name", "")))
    note = str(metrics.get("reason") or ("" if metrics.get("status", "ok") == "ok" else metrics["status"]))
    figures: dict[str, Any] = {key: number(metrics.get(key)) for key in _FIGURES}
    seeds, predicted = int(number(metrics.get("seeds")) or 0), metrics.get("gradient_error_source") == "predicted"
    return Row(label, role, **figures, source=_source(metrics, record), note=note, seeds=seeds, predicted=predicted)


def _points(result: SearchResult, records: Sequence[Run]) -> tuple[Point, ...]:
    """Return one point per policy; a policy that was re-measured lies at its mean, the winner where the result says."""
    best = str(result.best.get("name"))
    found: dict[str, tuple[str, float, float]] = {}
    for record in pooled(records).values():
        time, gap = number(record.get("step_time_ms")), number(record.get("divergence"))
        if time is not None and gap is not None:
            found[record.name] = ("finalist" if "seeds" in record.metrics else record.kind, time, gap)
    time, gap = number(result.best.get("step_time_ms")), number(result.best.get("divergence"))
    if time is not None and gap is not None and found and best != str(result.reference.get("name")):
        found[best] = ("best", time, gap)
    return tuple(
        Point(name, kind, t, g, on_front, kind == "best")
        for (name, (kind, t, g)), on_front in zip(found.items(), _front([v[1:] for v in found.values()]), strict=True)
    )


def _front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Say of each (time, divergence) whether no other is better in one and no worse in the other."""
    out, lowest, fastest = [False] * len(points), math.inf, math.inf
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        time, gap = points[index]
        if gap < lowest or (gap == lowest and time == fastest):
            out[index], lowest, fastest = True, gap, time
    return out


def _curves(result: SearchResult, records: Sequence[Run]) -> tuple[Curve, ...]:
    """Return the reference's losses, the best policy's and the presets', all of the script's own seed."""
    out: list[Curve] = []
    reference = next((r for r in records if r.kind == "reference" and r.losses and r.seed == 0), None)
    if reference is not None:
        out.append(Curve("reference", "reference", reference.losses))
    best_name = str(result.best.get("name", ""))
    named = [r for r in records if r.ok and r.losses and r.kind not in ("reference", "noise")]
    best = [r for r in named if r.name == best_name]
    best.sort(key=lambda r: (r.kind != "search", r.seed))
    for record in best[:1]:
        if reference is None and record.reference_losses:
            out.append(Curve("reference", "reference", record.reference_losses))
        out.append(Curve(record.name, "best", record.losses))
    presets = [r for r in records if r.ok and r.kind == "preset" and r.losses and r not in best[:1]]
    out += [Curve(r.name, "preset", r.losses) for r in presets[:6]]
    return tuple(out)


def _noise_band(records: Sequence[Run]) -> tuple[tuple[float, float], ...]:
    """Return, per step, the relative gaps (low, high) that runs of the same precision show: what noise looks like."""
    runs = [r for r in records if r.kind == "noise" and r.ok and r.losses and r.reference_losses]
    steps = min((min(len(r.losses), len(r.reference_losses)) for r in runs), default=0)
    band = []
    for step in range(steps):
        gaps = [
            abs(r.losses[step] - r.reference_losses[step]) / max(abs(r.reference_losses[step]), 1e-12) for r in runs
        ]
        widest = max((gap for gap in gaps if math.isfinite(gap)), default=0.0)
        band.append((-widest, widest))
    return tuple(band)


def _assignment(result: SearchResult, records: Sequence[Run]) -> dict[str, str]:
    name = str(result.best.get("name", ""))
    for record in records:
        if record.ok and record.name == name and record.params:
            return {key[6:]: str(value) for key, value in record.params.items() if key.startswith("layer:")}
    return {}


def _payback(result: SearchResult, runs: int) -> Payback:
    plain, over = number(result.best.get("speedup")), number(result.best.get("speedup_over_16bit"))
    speedup = number(result.best.get("effective_speedup")) or plain
    if speedup and plain and over:  # on a GPU nobody who counts hours trains in fp32
        speedup *= over / plain
    saved = 1 - 1 / speedup if result.verdict == "adopt" and speedup and speedup > 1 else None
    here = "modelled" not in _source(result.best, None)
    total = sum(value for value in result.trials.values() if isinstance(value, int))
    break_even = result.seconds / saved if saved and here else None
    sessions = int(result.timings.get("sessions", 1))
    against = "a training run in 16 bit" if over else "a training run"
    return Payback(result.seconds, total, runs, saved, break_even, result.stopped, sessions, against)


def _told_against(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Give every row its gain over the 16-bit run ``baseline``, where it has none."""
    base = next((row.step_time_ms for row in rows if row.role == "preset" and row.name == baseline), None)
    return [
        replace(row, speedup_over_16bit=base / row.step_time_ms)
        if base and row.step_time_ms and row.speedup_over_16bit is None
        else row
        for row in rows
    ]


def important(result: SearchResult) -> list[tuple[str, str, str]]:
    """Return (decision, share of what moves time, share of what moves divergence) of decisions that moved either.

    A share of less than one percent says nothing that noise would not.
    """
    rows = [d for d in result.explanation.get("importance", ()) if max(d["time_share"], d["error_share"]) >= 0.01]
    return [(str(d["name"]), f"{d['time_share']:.0%}", error_share(d)) for d in rows]


def summarise(result: SearchResult, records: Sequence[Run]) -> Summary:
    """Arrange a result and its trials for a report."""
    named = _by_name(records)
    best = number(result.best.get("step_time_ms"))
    label = "the policy" if result.verdict == "adopt" else "fastest candidate"
    # a verdict from the cost model alone has no candidate: its best is the reference itself
    candidate = result.verdict == "adopt" or result.best.get("name") != result.reference.get("name")
    rows = [metrics_row(result.best, "best", named, label)] if best is not None and candidate else []
    rows.append(metrics_row(result.reference, "reference", named, "reference: the script as written"))
    rows += [metrics_row(preset, "preset", named) for preset in result.presets]
    baseline = _baseline(result, records)
    rows = _told_against(rows, baseline)
    floors = [number(source.get("noise_floor")) for source in (result.best, result.reference, result.budget)]
    limit = next((v for k in ("max_divergence", "divergence") if (v := number(result.budget.get(k))) is not None), None)
    share, noise = number(result.budget.get("max_gradient_error")), number(result.budget.get("gradient_noise"))
    usual = share * noise if share is not None and noise is not None else None
    failed = [r for r in records if r.status not in ("ok", "pruned", "duplicate")]
    return Summary(
        title=result.study_name or "study",
        verdict=result.verdict,
        reason=result.reason,
        rows=tuple(rows),
        points=_points(result, records),
        curves=_curves(result, records),
        noise=_noise_band(records),
        noise_floor=next((floor for floor in floors if floor is not None), None),
        limit=limit,
        baseline=next((row for row in rows if baseline and row.role == "preset" and row.name == baseline), None),
        gradient_limit=number(result.budget.get("gradient_limit")) or usual,
        gradient_noise=noise,
        assignment=_assignment(result, records),
        payback=_payback(result, len(records)),
        failures=tuple((r.name, f"{r.status}: {r.reason}" if r.reason else r.status) for r in failed),
        source=next((row.source for row in rows if row.source), ""),
    )
