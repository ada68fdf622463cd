"""Figures as people read them."""

from __future__ import annotations

import pytest

from autoprec.report.text import duration, headings, percent, row_cells, shown


def test_a_missing_figure_is_a_dash() -> None:
    assert (percent(None), shown("divergence", {"divergence": float("nan")})) == ("–", "–")
    assert set(row_cells({"name": "a"}, over_16bit=True)[1:]) == {"–"}


@pytest.mark.parametrize(("half_width", "text"), [(None, "0.060 %"), (0.0002, "0.060 ± 0.020 %")])
def test_a_divergence_has_the_half_width_of_its_interval(half_width: float | None, text: str) -> None:
    assert shown("divergence", {"divergence": 0.0006, "interval": half_width}) == text


def test_a_predicted_gradient_error_is_marked() -> None:
    row = {"gradient_error": 0.05, "gradient_error_source": "predicted"}
    assert shown("gradient_error", row) == "~ 5.00 %"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (150, "2 min 30 s"), (7260, "2 h 1 min"), (90_000, "1 d 1 h")]
)
def test_a_time_span_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("over_16bit", [False, True])
def test_every_cell_has_its_heading(over_16bit: bool) -> None:
    row = {"name": "a", "speedup": 9.0, "speedup_over_16bit": 1.2, "step_time_ms": 8.0, "memory_bytes": 2.0**30}
    row |= {"divergence": 1e-4, "gradient_error": 0.05}
    cells = dict(zip(headings(over_16bit=over_16bit), row_cells(row, over_16bit=over_16bit), strict=True))
    assert cells.pop("") == "a"
    gains = {"over 16-bit": "1.20x", "over the script": "9.00x"} if over_16bit else {"speed": "9.00x"}
    rest = {"step": "8 ms", "memory": "1.00 GiB", "divergence": "0.010 %", "gradient error": "5.00 %"}
    assert cells == gains | rest
