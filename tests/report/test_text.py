"""Figures as people read them."""

from __future__ import annotations

import pytest

from autoprec.report.summary import Row
from autoprec.report.text import duration, headings, percent, ratio, row_cells, time_text


def test_a_missing_figure_is_a_dash() -> None:
    assert (ratio(None), percent(None), time_text(None)) == ("–", "–", "–")
    assert set(row_cells(Row("a", "preset"), over_16bit=True)[1:]) == {"–"}


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (0.00016, None, "0.016 %"),
        (0.05, None, "5.00 %"),
        (0.234, None, "23.4 %"),
        (0.0006, 0.0002, "0.060 ± 0.020 %"),
        (-0.2, None, "-20.0 %"),
    ],
)
def test_a_share_keeps_the_digits_that_mean_something(value: float, half_width: float | None, text: str) -> None:
    assert percent(value, half_width) == text


@pytest.mark.parametrize(("ms", "text"), [(9.876, "9.88 ms"), (0.01234, "0.0123 ms"), (588.506, "588.5 ms")])
def test_times_are_in_milliseconds(ms: float, text: str) -> None:
    assert time_text(ms) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (150, "2 min 30 s"), (7260, "2 h 1 min"), (90_000, "1 d 1 h")]
)
def test_a_time_span_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("over_16bit", [False, True])
def test_every_cell_has_its_heading(over_16bit: bool) -> None:
    row = Row("a", "preset", 9.0, 1.2, 8.0, memory_bytes=2.0**30, divergence=1e-4, gradient_error=0.05)
    cells = dict(zip(headings(over_16bit=over_16bit), row_cells(row, over_16bit=over_16bit), strict=True))
    assert cells.pop("") == "a"
    gains = {"over 16-bit": "1.20x", "over the script": "9.00x"} if over_16bit else {"speed": "9.00x"}
    rest = {"step": "8 ms", "memory": "1.00 GiB", "divergence": "0.010 %", "gradient error": "5.00 %"}
    assert cells == gains | rest
