"""The report's charts, each from the summary's plain data to SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoprec.reports.summary import Summary
from autoprec.reports.svg import Axis, Chart
from autoprec.support.units import gap_name, time_text
from autoprec.tuning.study.rows import number
from autoprec.tuning.study.run import Run

_KINDS = {"preset": "presets", "search": "found by the search", "finalist": "re-measured on several paired seeds"}
#: Presets drawn as curves, each in a colour of its own (``p0`` ... in the style sheet).
_COLOURS = 6


def pareto_chart(summary: Summary) -> Chart | None:
    """Step time against divergence, one dot per policy, the front joined; None where only the script was run.

    The axis is that of the policies and of the 16-bit run that they are compared with: a script in FP32 may take ten
    times as long, and would press all dots into one corner.
    """
    points = summary.points
    if not points:
        return None
    times, gaps = [run["step_time_ms"] for run in points], [100 * run["divergence"] for run in points]
    positive = [gap for gap in gaps if gap > 0]
    log = bool(positive) and max(positive) > 30 * min(positive)
    limits = [100 * v for v in (summary.result.limit, summary.result.noise_floor) if v]
    shown = [limit for limit in limits if limit < 3 * max(gaps, default=0)]
    reference = number((summary.row("reference") or {}).get("step_time_ms"))
    spread = max(max(times) - min(times), 0.05 * max(times))
    near = reference is not None and min(times) - spread < reference < max(times) + spread
    chart = Chart(
        Axis.over([*times, reference] if near and reference else times, "step time, ms (left is faster)"),
        Axis.over([*gaps, *shown], f"{gap_name(summary.result.metric)}, % (down is better)", zero=not log, log=log),
        f"step time against {gap_name(summary.result.metric)} of every policy",
    )
    dots = [(run, _kind(run, summary), x, y) for run, x, y in zip(points, times, gaps, strict=True)]
    front = sorted((x, y) for run, _, x, y in dots if run.name in summary.front)
    chart.line([x for x, _ in front], [y for _, y in front], "front")
    for run, kind, x, y in sorted(dots, key=lambda dot: dot[1] == "best"):
        chart.point(x, y, f"dot {kind}", f"{run.name}: {x:.3g} ms, {y:.3g} %", size=7 if kind == "best" else 4.5)
    for value, css, label in (
        (summary.result.limit, "limit", "budget"),
        (summary.result.noise_floor, "floor", "noise floor"),
    ):
        if value and 100 * value <= chart.y.high:
            chart.rule(y=100 * value, css=css, label=label)
    if summary.baseline is not None and (base := number(summary.baseline.get("step_time_ms"))) is not None:
        chart.rule(x=base, css="base", label=f"16-bit: {summary.baseline['name']}")
    if near and reference:
        chart.rule(x=reference, css="floor", label=f"the {summary.result.written}")
    for run, kind, x, y in sorted(
        dots, key=lambda d: (d[1] != "best", d[0].name not in summary.front, d[1] != "preset")
    ):
        chart.label(x, y, run.name, "label best" if kind == "best" else "label")
    kinds = {kind for _, kind, _, _ in dots}
    for kind, label in _KINDS.items():
        if kind in kinds:
            chart.legend(f"dot {kind}", label)
    if "best" in kinds:
        chart.legend("dot best", "the policy" if summary.result.verdict == "adopt" else "fastest candidate")
    if reference is not None and not near:
        chart.legend("none", f"the {summary.result.written} takes {time_text(reference)}, beyond the axis")
    return chart


def _kind(run: Run, summary: Summary) -> str:
    """Return what a point is drawn as: the answer, measured again under further seeds, or what its trial was."""
    if run.name == summary.best:
        return "best"
    return "finalist" if "seeds" in run.metrics else run.kind


def _steps(curves: Sequence[Run]) -> int:
    return max((len(curve.losses) for curve in curves), default=0)


def loss_chart(summary: Summary) -> Chart | None:
    """Loss per step of the reference, the policy and the presets; None where only the script was run."""
    if all(curve.kind == "reference" for curve in summary.curves):
        return None
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
    _draw_curves(chart, summary.curves)
    return chart


def gap_chart(summary: Summary) -> Chart | None:
    """Relative gap to the reference's loss per step, with the band that noise alone produces."""
    reference = next((curve for curve in summary.curves if curve.kind == "reference"), None)
    others = [curve for curve in summary.curves if curve.kind != "reference"]
    if reference is None or not others:
        return None
    gaps = [replace(c, losses=_gap(c.losses, reference.losses)) for c in others]
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
    _draw_curves(chart, gaps)
    return chart


def _gap(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, ...]:
    return tuple(100 * (a - b) / abs(b) if b else float("nan") for a, b in zip(losses, reference, strict=False))


def _draw_curves(chart: Chart, curves: Sequence[Run]) -> None:
    """Draw the presets below, the policy on top; each curve is named in the legend."""
    presets = [curve for curve in curves if curve.kind == "preset"]
    for index, curve in enumerate(presets):
        css = f"curve preset p{index % _COLOURS}"
        chart.line(range(len(curve.losses)), curve.losses, css, curve.name)
    for kind, named in (("reference", "the"), ("best", "the policy:")):
        for curve in curves:
            if curve.kind == kind:
                chart.line(range(len(curve.losses)), curve.losses, f"curve {kind}", curve.name)
                chart.legend(f"curve {kind}", f"{named} {curve.name}")
    for index, curve in enumerate(presets):
        chart.legend(f"curve preset p{index % _COLOURS}", curve.name)
