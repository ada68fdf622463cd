"""A search's outcome arranged for reading: rows, points, curves, cost; plain data, no layout.

A row is a metric mapping of the result with a ``role`` (``best``, ``reference``, ``preset``); points and curves are
runs. *What a gain is told against* the search decided (``result.baseline``: people run bf16 autocast today, so on a GPU
the headline is the gain over the best 16-bit run that was measured). *Which figure a policy gets* is decided by
:func:`~autoprec.tuning.study.run.pooled`: one that was measured again on several paired seeds has the mean over them
wherever it is shown, so that it never appears with two divergences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoprec.tuning.decide.pareto import front
from autoprec.tuning.decide.reasons import error_share
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import MODELLED, Run, metrics_of, pooled

#: Presets whose loss curves are drawn.
_CURVES = 6


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a report shows.

    Attributes:
        rows: the policy, the reference and the presets, in this order.
        points: a run for every policy, with the figures of all its runs, in the plane of step time and divergence.
        front, best: names of the points that no other beats on both axes, and of the answer (empty where none is one).
        curves: runs of the script's own seed with their losses; ``kind`` is ``reference``, ``best`` or ``preset``.
        noise: relative gaps (low, high) per step that runs of the same precision show.
        baseline: the row of the 16-bit run that gains are told against; None on a CPU, and where none was measured.
        gradient_limit: the largest acceptable gradient error as a fraction of the gradient, as is the noise of its
            mini-batches, ``gradient_noise``.
        runs: how many there were.
        saved_share: the part of a training run's time that the policy saves; ``break_even_s`` the length of a training
            run (measured without the policy) whose savings equal the search's own time. Both are None when nothing is
            saved, the latter also when the figures are modelled for another machine than the one that searched.
        source: where times and memory come from.
    """

    title: str
    verdict: str
    reason: str
    rows: tuple[Mapping[str, Any], ...]
    points: tuple[Run, ...]
    front: frozenset[str]
    best: str
    curves: tuple[Run, ...]
    noise: tuple[tuple[float, float], ...]
    noise_floor: float | None
    limit: float | None
    baseline: Mapping[str, Any] | None
    gradient_limit: float | None
    gradient_noise: float | None
    assignment: dict[str, str]
    runs: int
    saved_share: float | None
    break_even_s: float | None
    failures: tuple[tuple[str, str], ...]
    source: str

    @property
    def over_16bit(self) -> bool:
        """Whether gains over 16 bit are known: a GPU is the target."""
        return any(number(row.get("speedup_over_16bit")) is not None for row in self.rows)

    def row(self, role: str) -> Mapping[str, Any] | None:
        """Return the first row of a role, or None."""
        return next((row for row in self.rows if row["role"] == role), None)


def number(value: Any) -> float | None:
    """Return a finite float, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def source_of(row: Mapping[str, Any]) -> str:
    """Say whether the times of a metric mapping are measured or modelled; empty where that is not known."""
    sources = row.get("sources") or {}
    return " and ".join(sorted({str(sources[key]) for key in ("step_time_ms", "speedup") if key in sources}))


def note_of(row: Mapping[str, Any]) -> str:
    """Return why a row's policy failed, or is not the answer; empty for nothing to say."""
    return str(row.get("reason") or ("" if row.get("status", "ok") == "ok" else row["status"]))


def _points(result: SearchResult, records: Sequence[Run]) -> tuple[tuple[Run, ...], str]:
    """Return one point per policy, the winner where the result says, and the winner's name."""
    axes, best = ("step_time_ms", "divergence"), str(result.best.get("name"))
    found = pooled(records)
    at = {name: value for name in axes if (value := number(result.best.get(name))) is not None}
    if best in found and len(at) == len(axes) and best != str(result.reference.get("name")):
        found[best] = found[best].with_metrics(metrics_of(at, found[best].sources))
    points = tuple(run for run in found.values() if all(number(run.get(name)) is not None for name in axes))
    return points, best if any(run.name == best for run in points) else ""


def _curves(result: SearchResult, records: Sequence[Run]) -> tuple[Run, ...]:
    """Return the reference's losses, the best policy's and the presets', all of the script's own seed."""
    drawn = [r for r in records if r.ok and r.losses and r.kind not in ("reference", "noise")]
    best = sorted((r for r in drawn if r.name == result.best.get("name")), key=lambda r: (r.kind != "search", r.seed))
    reference = [r for r in records if r.kind == "reference" and r.losses and r.seed == 0]
    if not reference:
        reference = [replace(r, losses=r.reference_losses) for r in best if r.reference_losses]
    out = [replace(r, name="reference", kind="reference") for r in reference[:1]]
    out += [replace(r, kind="best") for r in best[:1]]
    return (*out, *[r for r in drawn if r.kind == "preset" and r not in best[:1]][:_CURVES])


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


def _saved_share(result: SearchResult) -> float | None:
    """Return the share of a training run's time that the policy saves, in 16 bit where that is what people run."""
    plain, over = number(result.best.get("speedup")), number(result.best.get("speedup_over_16bit"))
    speedup = number(result.best.get("effective_speedup")) or plain
    if speedup and plain and over:  # on a GPU hours are counted in 16 bit, not in fp32
        speedup *= over / plain
    return 1 - 1 / speedup if result.verdict == "adopt" and speedup and speedup > 1 else None


def important(result: SearchResult) -> list[tuple[str, str, str]]:
    """Return (decision, share of what moves time, share of what moves divergence) of decisions that moved either.

    A share of less than one percent says nothing that noise would not.
    """
    rows = [d for d in result.explanation.get("importance", ()) if max(d["time_share"], d["error_share"]) >= 0.01]
    return [(str(d["name"]), f"{d['time_share']:.0%}", error_share(d)) for d in rows]


def summarise(result: SearchResult, records: Sequence[Run]) -> Summary:
    """Arrange a result and its runs for a report."""
    label = "the policy" if result.verdict == "adopt" else "fastest candidate"
    # a verdict from the cost model alone has no candidate: its best is the reference itself
    candidate = result.verdict == "adopt" or result.best.get("name") != result.reference.get("name")
    shown = number(result.best.get("step_time_ms")) is not None and candidate
    rows = [{**result.best, "role": "best", "name": label}] if shown else []
    rows.append({**result.reference, "role": "reference", "name": "reference: the script as written"})
    rows += [{**preset, "role": "preset"} for preset in result.presets]
    points, best = _points(result, records)
    floors = [number(source.get("noise_floor")) for source in (result.best, result.reference, result.budget)]
    limit = next((v for k in ("max_divergence", "divergence") if (v := number(result.budget.get(k))) is not None), None)
    share, noise = number(result.budget.get("max_gradient_error")), number(result.budget.get("gradient_noise"))
    usual = share * noise if share is not None and noise is not None else None
    failed = [r for r in records if r.status not in ("ok", "pruned", "duplicate")]
    saved = _saved_share(result)
    return Summary(
        title=result.study_name or "study",
        verdict=result.verdict,
        reason=result.reason,
        rows=tuple(rows),
        points=points,
        front=frozenset(run.name for run in front(points)),
        best=best,
        curves=_curves(result, records),
        noise=_noise_band(records),
        noise_floor=next((floor for floor in floors if floor is not None), None),
        limit=limit,
        baseline=next((row for row in rows if result.baseline and row["name"] == result.baseline), None),
        gradient_limit=number(result.budget.get("gradient_limit")) or usual,
        gradient_noise=noise,
        assignment=_assignment(result, records),
        runs=len(records),
        saved_share=saved,
        break_even_s=result.seconds / saved if saved and MODELLED not in source_of(result.best) else None,
        failures=tuple((r.name, f"{r.status}: {r.reason}" if r.reason else r.status) for r in failed),
        source=next((source for row in rows if (source := source_of(row))), ""),
    )
