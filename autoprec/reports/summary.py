"""A search's outcome arranged for reading: rows, points, curves, cost; plain data, no layout.

Rows are those of the result (:mod:`autoprec.tuning.study.rows`); points and curves are runs. *What a gain is given
over* the search decided (``result.baseline``: people run bf16 autocast today, so on a GPU the headline is the gain over
the best 16-bit run that was measured). *Which figure a policy gets* is decided by
:func:`~autoprec.tuning.study.run.pooled`: one that was measured again on several paired seeds has the mean over them
wherever it is shown, so that it never appears with two divergences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.tuning.decide.pareto import front
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import Row, number, source_of
from autoprec.tuning.study.run import MODELLED, Run, metrics_of, pooled

#: Presets whose loss curves are drawn.
_CURVES = 6


@dataclass(frozen=True, slots=True)
class Summary:
    """What a report shows of a search beside its result.

    Attributes:
        rows: of the result: the policy, the reference and the presets, in this order.
        points: a run for every policy, with the figures of all its runs, in the plane of step time and divergence.
        front, best: names of the points that no other beats on both axes, and of the answer (empty where none is one).
        curves: runs of the script's own seed with their losses; ``kind`` is ``reference``, ``best`` or ``preset``.
        noise: relative gaps (low, high) per step that runs of the same precision show.
        baseline: the row of the 16-bit run that gains are given over; None on a CPU, and where none was measured.
        runs: how many there were.
        saved_share: the part of a training run's time that the policy saves; ``break_even_s`` the length of a training
            run (measured without the policy) whose savings equal the search's own time. Both are None when nothing is
            saved, the latter also when the figures are modelled for another machine than the one that searched.
        failures: names of runs that failed, and why.
    """

    result: SearchResult
    rows: tuple[Row, ...]
    points: tuple[Run, ...]
    front: frozenset[str]
    best: str
    curves: tuple[Run, ...]
    noise: tuple[tuple[float, float], ...]
    baseline: Row | None
    runs: int
    saved_share: float | None
    break_even_s: float | None
    failures: tuple[tuple[str, str], ...]

    def row(self, role: str) -> Row | None:
        """Return the first row of a role, or None."""
        return next((row for row in self.rows if row["role"] == role), None)


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


def _saved_share(result: SearchResult) -> float | None:
    """Return the share of a training run's time that the policy saves, in 16 bit where that is what people run."""
    plain, over = number(result.best.get("speedup")), number(result.best.get("speedup_over_16bit"))
    speedup = number(result.best.get("effective_speedup")) or plain
    if speedup and plain and over:  # on a GPU hours are counted in 16 bit, not in fp32
        speedup *= over / plain
    return 1 - 1 / speedup if result.verdict == "adopt" and speedup and speedup > 1 else None


def summarise(result: SearchResult, records: Sequence[Run]) -> Summary:
    """Arrange a result and its runs for a report."""
    rows, (points, best), saved = result.rows(), _points(result, records), _saved_share(result)
    failed = [r for r in records if r.status not in ("ok", "pruned", "duplicate")]
    return Summary(
        result=result,
        rows=rows,
        points=points,
        front=frozenset(run.name for run in front(points)),
        best=best,
        curves=_curves(result, records),
        noise=_noise_band(records),
        baseline=next((row for row in rows if result.baseline and row["name"] == result.baseline), None),
        runs=len(records),
        saved_share=saved,
        break_even_s=result.seconds / saved if saved and MODELLED not in source_of(result.best) else None,
        failures=tuple((r.name, f"{r.status}: {r.reason}" if r.reason else r.status) for r in failed),
    )
