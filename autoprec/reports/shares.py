"""What each decision did: its share of the gained time and of the divergence, each with its 95 % interval drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from autoprec.support.units import gap_name

#: Width and height of the drawing in a cell, and how far an axis reaches at most (as shares).
_WIDTH, _HEIGHT, _LEAST, _MOST = 120, 18, -0.5, 1.5
#: What the whole gain may lie outside the interval, relative, before the fit is doubted.
_NEAR = 0.05
_FITTED = "Times and divergence are fitted to the runs of this search, not measured one by one."
_MODELLED = (
    "Times are the cost model's: how wrong it may be is in the interval of the speed-up, not in these. "
    "Divergence is fitted to the runs of this search."
)


def _bounds(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    """Return the ends of a column's axis: those of its intervals, and always from 0 to 1."""
    found = [row[name] for row in rows if row.get(name)]
    low, high = min((one["low"] for one in found), default=0.0), max((one["high"] for one in found), default=1.0)
    return max(_LEAST, min(0.0, low)), min(_MOST, max(1.0, high))


def _drawn(share: Mapping[str, float], bounds: tuple[float, float]) -> str:
    """Return the drawing of an interval: a line with a dot on it, beside the axis of no share."""
    low, high = bounds

    def at(value: float) -> str:
        place = (min(max(value, low), high) - low) / (high - low)
        return f"{5 + place * (_WIDTH - 10):.1f}"

    middle = _HEIGHT / 2
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">'
        f'<line class="zero" x1="{at(0.0)}" y1="0" x2="{at(0.0)}" y2="{_HEIGHT}"/>'
        f'<line class="reach" x1="{at(share["low"])}" y1="{middle}" x2="{at(share["high"])}" y2="{middle}"/>'
        f'<circle class="dot best" cx="{at(share["value"])}" cy="{middle}" r="4"/></svg>'
    )


def _cell(share: Mapping[str, float] | None, bounds: tuple[float, float]) -> str:
    if not share:
        return "<td>–</td>"
    value, low, high = (f"{100 * share[end]:.0f}" for end in ("value", "low", "high"))
    return f"<td>{_drawn(share, bounds)}<span>{value} % [{low}, {high}]</span></td>"


def _saved(row: Mapping[str, Any]) -> str:
    found = row["saved_ms"]
    low, high = f"{found['low']:.2g}", f"{found['high']:.2g}"
    if low == high:  # a model of times is sure of them
        return f"{found['value']:.3g} ms"
    return f"{found['value']:.3g} ms <span>[{low}, {high}]</span>"


def share_chart(rows: Sequence[Mapping[str, Any]], metric: str = "") -> str:
    """Return the HTML of the decisions of a policy; empty without any.

    Args:
        rows: of :func:`autoprec.tuning.decide.sampler.shares.decision_shares`.
        metric: what divergences are of, where not of the losses.
    """
    decisions = [row for row in rows if row["decision"] != "together"]
    if not decisions:
        return ""
    times, gaps = _bounds(decisions, "time_share"), _bounds(decisions, "divergence_share")
    titles = ("decision", "saves of a step", "of the gained time", f"of the squared {gap_name(metric)}")
    lines = ["<tr>" + "".join(f"<th>{escape(title)}</th>" for title in titles) + "</tr>"]
    for row in decisions:
        changed = f"{row['choice']} over {row['over']}" if row["choice"] != row["over"] else str(row["choice"])
        cells = _cell(row["time_share"], times) + _cell(row["divergence_share"], gaps)
        lines.append(
            f"<tr><td><code>{escape(str(row['decision']))}</code><br><small>{escape(changed)}</small></td>"
            f'<td class="range">{_saved(row)}</td>{cells}</tr>'
        )
    for row in rows:
        if row["decision"] == "together":
            lines.append(
                f'<tr class="reference"><td>together</td><td class="range">{_saved(row)}</td><td></td><td></td></tr>'
            )
    return f'<div class="wide"><table class="forest">{"".join(lines)}</table></div>'


def share_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the chart is made of, and what is not in it."""
    source = _FITTED if any(row["source"] == "fitted" for row in rows) else _MODELLED
    told = [row for row in rows if row["decision"] != "together"]
    doubt = "".join(
        f" As a whole the policy saves {row['whole_ms']:.3g} ms of a step, which the fit does not explain: its shares "
        "of the time are doubtful."
        for row in rows
        if (whole := row.get("whole_ms")) is not None
        and not row["saved_ms"]["low"] - _NEAR * abs(whole) <= whole <= row["saved_ms"]["high"] + _NEAR * abs(whole)
    )
    unknown = (
        " The gain of all of them together cannot be told from none, so it has no shares."
        if told and all(row["time_share"] is None for row in told)
        else ""
    )
    return (
        f"{source} A line is the 95 % interval of what the models still take for possible; shares add up to 100 %, and "
        f"what makes things better than the baseline has a negative one.{unknown}{doubt}"
    )
