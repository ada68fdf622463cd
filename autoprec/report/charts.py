"""The report's charts, each from the summary's plain data to SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.report.summary import Curve, Point, Summary
from autoprec.report.svg import Axis, Chart

__all__ = ["gap_chart", "loss_chart", "pareto_chart"]

_KINDS = {"preset": "presets", "search": "found by the search", "finalist": "finalists, re-measured"}


def pareto_chart(summary: Summary) -> Chart | None:
    """Step time against divergence, one dot per trial, the front joined; None when nothing was measured."""
    points = summary.points
    if not points:
        return None
    gaps = [100 * point.divergence for point in points]
    positive = [gap for gap in gaps if gap > 0]
    log = bool(positive) and max(positive) > 30 * min(positive)
    limits = [100 * v for v in (summary.limit, summary.noise_floor) if v]
    shown = [limit for limit in limits if limit < 3 * max(gaps, default=0)]
    reference = next((row.step_time_ms for row in summary.rows if row.role == "reference"), None)
    times = [point.step_time_ms for point in points] + ([reference] if reference else [])
    chart = Chart(
        Axis.over(times, "step time, ms (left is faster)"),
        Axis.over([*gaps, *shown], "divergence, % (down is better)", zero=not log, log=log),
        "step time against divergence of every trial",
    )
    for value, css, label in ((summary.limit, "limit", "budget"), (summary.noise_floor, "floor", "noise floor")):
        if value and 100 * value <= chart.y.high:
            chart.rule(y=100 * value, css=css, label=label)
    front = sorted((p for p in points if p.front), key=lambda p: p.step_time_ms)
    chart.line([p.step_time_ms for p in front], [100 * p.divergence for p in front], "front")
    for point in sorted(points, key=lambda p: p.best):
        hint = f"{point.name}: {point.step_time_ms:.3g} ms, {100 * point.divergence:.3g} %"
        css = "dot best" if point.best else f"dot {point.kind}"
        chart.point(point.step_time_ms, 100 * point.divergence, css, hint, size=7 if point.best else 4.5)
    _label_points(chart, points)
    for kind, label in _KINDS.items():
        if any(point.kind == kind for point in points):
            chart.legend(f"dot {kind}", label)
    chart.legend("dot best", "the policy" if summary.verdict == "adopt" else "fastest candidate")
    return chart


def _label_points(chart: Chart, points: Sequence[Point]) -> None:
    for point in points:
        if point.best:
            chart.text_at(point.step_time_ms, 100 * point.divergence, point.name)


def _steps(curves: Sequence[Curve]) -> int:
    return max((len(curve.losses) for curve in curves), default=0)


def loss_chart(summary: Summary) -> Chart | None:
    """Loss per step of the reference, the policy and the presets."""
    finite = [loss for curve in summary.curves for loss in curve.losses if math.isfinite(loss)]
    if not finite:
        return None
    chart = Chart(
        Axis(0, max(_steps(summary.curves) - 1, 1), "optimizer step"), Axis.over(finite, "loss"), "loss per step"
    )
    reference = next((curve for curve in summary.curves if curve.kind == "reference"), None)
    if reference is not None and summary.noise:
        steps = min(len(reference.losses), len(summary.noise))
        low = [reference.losses[i] * (1 + summary.noise[i][0]) for i in range(steps)]
        high = [reference.losses[i] * (1 + summary.noise[i][1]) for i in range(steps)]
        chart.band(range(steps), low, high, "band")
        chart.legend("band", "noise band")
    _draw_curves(chart, summary.curves, summary.curves)
    return chart


def gap_chart(summary: Summary) -> Chart | None:
    """Relative gap to the reference's loss per step, with the band that noise alone produces."""
    reference = next((curve for curve in summary.curves if curve.kind == "reference"), None)
    others = [curve for curve in summary.curves if curve.kind != "reference"]
    if reference is None or not others:
        return None
    gaps = [Curve(c.name, c.kind, _gap(c.losses, reference.losses)) for c in others]
    values = [v for curve in gaps for v in curve.losses if math.isfinite(v)]
    values += [100 * edge for pair in summary.noise for edge in pair]
    chart = Chart(
        Axis(0, max(_steps(gaps) - 1, 1), "optimizer step"),
        Axis.over(values, "loss gap to the reference, %", zero=True),
        "relative loss gap per step",
    )
    if summary.noise:
        steps = range(len(summary.noise))
        chart.band(steps, [100 * a for a, _ in summary.noise], [100 * b for _, b in summary.noise], "band")
        chart.legend("band", "what a rounding of the initial weights alone does")
    chart.rule(y=0.0, css="zero", label="")
    _draw_curves(chart, gaps, gaps)
    return chart


def _gap(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, ...]:
    return tuple(100 * (a - b) / abs(b) if b else float("nan") for a, b in zip(losses, reference, strict=False))


def _draw_curves(chart: Chart, curves: Sequence[Curve], named: Sequence[Curve]) -> None:
    for curve in sorted(curves, key=lambda c: ("preset", "reference", "best").index(c.kind)):
        chart.line(range(len(curve.losses)), curve.losses, f"curve {curve.kind}", curve.name)
    for kind, label in (("reference", "reference"), ("best", "the policy"), ("preset", "presets")):
        if any(curve.kind == kind for curve in named):
            chart.legend(f"curve {kind}", label)
