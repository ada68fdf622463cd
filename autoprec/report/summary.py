"""A search's outcome arranged for reading: rows, points, curves, cost and payback; pure data, no layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoprec.tuning.study.records import SearchResult, TrialRecord

__all__ = ["Curve", "Payback", "Point", "Row", "Summary", "metrics_row", "number", "summarise"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison: the policy, the reference, or a preset. Missing figures are None."""

    name: str
    role: str
    speedup: float | None = None
    step_time_ms: float | None = None
    throughput: float | None = None
    memory_bytes: float | None = None
    divergence: float | None = None
    interval: float | None = None
    gradient_error: float | None = None
    source: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One trial in the plane of step time (ms) and divergence (a fraction)."""

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
    nothing is saved, or when the figures are modelled for another machine than the one that searched.
    """

    seconds: float
    trials: int
    saved_share: float | None
    break_even_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a report shows."""

    title: str
    verdict: str
    reason: str
    rows: tuple[Row, ...]
    points: tuple[Point, ...]
    curves: tuple[Curve, ...]
    noise: tuple[tuple[float, float], ...]
    noise_floor: float | None
    limit: float | None
    assignment: dict[str, str]
    sensitivity: tuple[dict[str, Any], ...]
    payback: Payback
    failures: tuple[tuple[str, str], ...]
    source: str


def number(value: Any) -> float | None:
    """Return a finite float, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _by_name(records: Iterable[TrialRecord]) -> dict[str, TrialRecord]:
    return {record.name: record for record in records if record.ok}


def _source(metrics: Mapping[str, Any], record: TrialRecord | None) -> str:
    own = metrics.get("sources")
    sources = own if isinstance(own, Mapping) and own else (record.sources if record else {})
    kinds = {str(sources[key]) for key in ("step_time_ms", "speedup") if key in sources}
    if isinstance(metrics.get("source"), str):
        return str(metrics["source"])
    return " and ".join(sorted(kinds))


def metrics_row(
    metrics: Mapping[str, Any], role: str, records: Mapping[str, TrialRecord] | None = None, name: str = ""
) -> Row:
    """Return a metric mapping of a result as a row; ``records`` (by name) tell measured from modelled."""
    label = str(name or metrics.get("name") or role)
    record = (records or {}).get(str(metrics.get("name", "")))
    keys = ("speedup", "step_time_ms", "throughput", "memory_bytes", "divergence", "interval", "gradient_error")
    note = str(metrics.get("reason") or ("" if metrics.get("status", "ok") == "ok" else metrics["status"]))
    return Row(
        label, role, **{key: number(metrics.get(key)) for key in keys}, source=_source(metrics, record), note=note
    )


def _points(result: SearchResult, records: Sequence[TrialRecord]) -> tuple[Point, ...]:
    """Return a point per trial, and one for the policy: its mean over the finalist seeds."""
    front = {str(row.get("name")) for row in result.front}
    out = []
    for record in records:
        time, gap = number(record.metrics.get("step_time_ms")), number(record.metrics.get("divergence"))
        if record.ok and record.kind not in ("noise", "reference") and time is not None and gap is not None:
            on_front = record.kind != "finalist" and ("pareto" in record.tags or record.name in front)
            out.append(Point(record.name, record.kind, time, gap, on_front, False))
    time, gap = number(result.best.get("step_time_ms")), number(result.best.get("divergence"))
    if time is not None and gap is not None and out:
        out.append(Point(str(result.best.get("name", "the policy")), "best", time, gap, False, True))
    return tuple(out)


def _curves(result: SearchResult, records: Sequence[TrialRecord]) -> tuple[Curve, ...]:
    """Return the reference's losses, the best policy's and the presets', all of the script's own seed."""
    out: list[Curve] = []
    reference = next((r for r in records if r.kind == "reference" and r.losses and r.seed == 0), None)
    if reference is not None:
        out.append(Curve("reference", "reference", reference.losses))
    best_name = str(result.best.get("name", ""))
    best = [r for r in records if r.ok and r.losses and ("best" in r.tags or r.name == best_name)]
    best.sort(key=lambda r: (r.kind != "search", r.seed))
    for record in best[:1]:
        if reference is None and record.reference_losses:
            out.append(Curve("reference", "reference", record.reference_losses))
        out.append(Curve(record.name, "best", record.losses))
    presets = [r for r in records if r.ok and r.kind == "preset" and r.losses and r not in best[:1]]
    out += [Curve(r.name, "preset", r.losses) for r in presets[:6]]
    return tuple(out)


def _noise_band(records: Sequence[TrialRecord]) -> tuple[tuple[float, float], ...]:
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


def _assignment(result: SearchResult, records: Sequence[TrialRecord]) -> dict[str, str]:
    name = str(result.best.get("name", ""))
    for record in records:
        if record.ok and ("best" in record.tags or record.name == name) and record.params:
            return {key[6:]: str(value) for key, value in record.params.items() if key.startswith("layer:")}
    return {}


def _payback(result: SearchResult) -> Payback:
    speedup = number(result.best.get("effective_speedup")) or number(result.best.get("speedup"))
    saved = 1 - 1 / speedup if result.verdict == "adopt" and speedup and speedup > 1 else None
    here = "modelled" not in _source(result.best, None)
    total = sum(value for value in result.trials.values() if isinstance(value, int))
    break_even = result.seconds / saved if saved and here else None
    return Payback(result.seconds, total, saved, break_even)


def summarise(result: SearchResult, records: Sequence[TrialRecord]) -> Summary:
    """Arrange a result and its trials for a report."""
    named = _by_name(records)
    best = number(result.best.get("step_time_ms"))
    label = "the policy" if result.verdict == "adopt" else "fastest candidate"
    # a verdict from the cost model alone has no candidate: its best is the reference itself
    candidate = result.verdict == "adopt" or result.best.get("name") != result.reference.get("name")
    rows = [metrics_row(result.best, "best", named, label)] if best is not None and candidate else []
    rows.append(metrics_row(result.reference, "reference", named, "reference: the script as written"))
    rows += [metrics_row(preset, "preset", named) for preset in result.presets]
    floors = [number(source.get("noise_floor")) for source in (result.best, result.reference, result.budget)]
    limit = next((v for k in ("max_divergence", "divergence") if (v := number(result.budget.get(k))) is not None), None)
    failed = [r for r in records if r.status not in ("ok", "pruned", "duplicate")]
    return Summary(
        title=result.study or "study",
        verdict=result.verdict,
        reason=result.reason,
        rows=tuple(rows),
        points=_points(result, records),
        curves=_curves(result, records),
        noise=_noise_band(records),
        noise_floor=next((floor for floor in floors if floor is not None), None),
        limit=limit,
        assignment=_assignment(result, records),
        sensitivity=result.sensitivity,
        payback=_payback(result),
        failures=tuple((r.name, f"{r.status}: {r.reason}" if r.reason else r.status) for r in failed),
        source=next((row.source for row in rows if row.source), ""),
    )
