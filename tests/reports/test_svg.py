"""Axes and ticks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.reports.svg import Axis, Chart, nice_ticks

FINITE = st.floats(-1e9, 1e9)


@given(FINITE, FINITE)
def test_ticks_lie_inside_and_are_few(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 12
    room = (high - low) * 1e-6
    assert all(low - room <= tick <= high + room for tick in ticks) or high == low


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_every_value_is_placed_inside(values: list[float]) -> None:
    axis = Axis.over(values, "x")
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values)


def test_logarithmic_axes_place_decades_evenly() -> None:
    axis = Axis(1.0, 100.0, "x", log=True)
    assert axis.place(10.0) == pytest.approx(0.5)
    assert axis.ticks() == [1.0, 3.0, 10.0, 30.0, 100.0]


def test_a_gap_breaks_a_line() -> None:
    chart = Chart(Axis(0, 3, "x"), Axis(0, 1, "y"), "t")
    chart.line([0, 1, 2, 3], [0.1, math.nan, 0.2, 0.3], "c")
    assert chart.text().count("<polyline") == 2


def test_labels_of_the_chart_do_not_cover_each_other() -> None:
    chart = Chart(Axis(0, 10, "x"), Axis(0, 10, "y"), "t")
    written = [chart.label(5 + 0.05 * n, 5 + 0.05 * n, f"a rather long name {n}") for n in range(20)]
    assert written[0]
    assert not all(written)
    boxes = chart._taken
    for index, (left, top, right, bottom) in enumerate(boxes):
        for a, b, c, d in boxes[:index]:
            assert not (a < right and left < c and b < bottom and top < d)


def test_a_rules_label_covers_no_dot() -> None:
    """The name of the noise floor was once written under the dots beside it."""
    chart = Chart(Axis(0.0, 10.0, "x"), Axis(0.0, 10.0, "y"), "t")
    chart.point(9.6, 5.1, "dot", "a run")
    chart.rule(y=5.0, css="floor", label="noise floor")
    (_, top, _, bottom), (left, label_top, right, label_bottom) = chart._taken
    assert label_top >= bottom or label_bottom <= top or right < chart.at(9.6, 5.1)[0]
    assert left > 0


@pytest.mark.parametrize("first", ["label", "rule", "line"])
def test_no_line_runs_over_a_label(first: str) -> None:
    """The front struck through the names of the two policies that it joins."""
    chart = Chart(Axis(0, 10, "x"), Axis(0, 10, "y"), "t")
    draw = {
        "label": lambda: chart.label(2, 2, "all bf16"),
        "rule": lambda: chart.rule(css="floor", label="noise floor", y=5),
        "line": lambda: chart.line([2, 8], [2, 2], "front"),
    }
    for name in sorted(draw, key=lambda name: name != first):
        draw[name]()
    text = chart.text()
    assert max(text.rfind("<polyline"), text.rfind('<line class="floor"')) < text.find('<text class="label"')
    assert text.rfind("<polyline") < text.find('<text class="note"')
