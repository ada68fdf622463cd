"""Parallel coordinates: a line a policy, across what was decided about it and what came of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from autoprec.report.summary import Summary
from autoprec.report.svg import Axis
from autoprec.tuning.study.run import Run

#: Decisions that are drawn, those first that moved time and divergence most, and characters of a value's name.
_MOST, _LONGEST = 4, 17
_WIDTH, _HEIGHT, _TOP, _SIDE = 760, 340, 34, 70


def _decisions(summary: Summary, runs: Sequence[Run]) -> list[str]:
    """Return the parameters that differ among the runs, the most important first."""
    rows = summary.result.explanation["importance"]
    shares = {row["name"]: row["time_share"] + row["error_share"] for row in rows}
    names = dict.fromkeys(name for run in runs for name in run.params)
    differ = [name for name in names if len({str(run.params.get(name)) for run in runs}) > 1]
    return sorted(differ, key=lambda name: -shares.get(name, 0.0))[:_MOST]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def parallel_chart(summary: Summary) -> str:
    """Return the chart as HTML; empty where fewer than three policies, or nothing but one decision, can be compared."""
    runs = [run for run in summary.points if run.params]
    if len(runs) < 3 or not summary.result.explanation.get("importance"):
        return ""
    decisions = _decisions(summary, runs)
    figures = {"step_time_ms": "step, ms", "divergence": "divergence, %"}
    if not decisions:
        return ""
    places: dict[str, dict[str, float]] = {}
    axes: list[tuple[str, list[tuple[float, str]]]] = []
    for name in decisions:
        values = sorted({str(run.params.get(name, "-")) for run in runs})
        at = {value: (index + 0.5) / len(values) for index, value in enumerate(values)}
        places[name] = {run.name: at[str(run.params.get(name, "-"))] for run in runs}
        axes.append((name, [(place, value) for value, place in at.items()]))
    for name, title in figures.items():
        scale = 100.0 if name == "divergence" else 1.0
        axis = Axis.over([scale * run[name] for run in runs], title)
        places[title] = {run.name: axis.place(scale * run[name]) for run in runs}
        axes.append((title, [(axis.place(tick), f"{tick:.4g}") for tick in axis.ticks()]))
    return _drawn(summary, runs, axes, places)


def _drawn(
    summary: Summary, runs: Sequence[Run], axes: Sequence[tuple[str, list[tuple[float, str]]]],
    places: dict[str, dict[str, float]],
) -> str:  # fmt: skip
    step = (_WIDTH - 2 * _SIDE) / (len(axes) - 1)

    def at(index: int, place: float) -> tuple[float, float]:
        return round(_SIDE + index * step, 1), round(_TOP + (1 - place) * (_HEIGHT - _TOP - 16), 1)

    parts = []
    for run in sorted(runs, key=lambda run: (run.name == summary.best, run.name in summary.front)):
        if not all(math.isfinite(places[name][run.name]) for name, _ in axes):
            continue
        points = " ".join("{},{}".format(*at(index, places[name][run.name])) for index, (name, _) in enumerate(axes))
        css = "best" if run.name == summary.best else "preset p1" if run.name in summary.front else "reference thin"
        parts.append(f'<polyline class="curve {css}" points="{points}"><title>{escape(run.name)}</title></polyline>')
    for index, (name, marks) in enumerate(axes):
        (x, low), (_, high) = at(index, 0.0), at(index, 1.0)
        parts.append(f'<line class="zero" x1="{x}" y1="{low}" x2="{x}" y2="{high}"/>')
        title = _cut(name.removeprefix("layer:"))
        parts.append(
            f'<text class="axis" x="{x}" y="{14 if index % 2 else 26}" text-anchor="middle">{escape(title)}</text>'
        )
        for place, value in marks:
            parts.append(f'<text class="label" x="{x + 4}" y="{at(index, place)[1] - 3}">{escape(_cut(value))}</text>')
    keys = (
        ("curve best", "the policy"),
        ("curve preset p1", "no other is better in both"),
        ("curve reference", "other"),
    )
    legend = "".join(f'<span class="key"><i class="{css}"></i>{label}</span>' for css, label in keys)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="decisions and figures of every policy">'
        f"{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"
    )
