"""Rows of a result, and their figures as people read them."""

from __future__ import annotations

import pytest

from autoprec.tuning.study.rows import headings, note_of, number, over_16bit, percent, row_cells, shown, source_of
from autoprec.tuning.study.run import Metric, Run


def test_a_row_says_where_its_figures_come_from() -> None:
    assert source_of({"speedup": 2.0, "sources": {"speedup": "modelled"}}) == "modelled"
    assert (source_of({}), note_of({}), note_of({"status": "ok"})) == ("", "", "")
    assert note_of({"name": "b", "status": "pruned"}) == "pruned"


def test_only_finite_numbers_are_numbers() -> None:
    assert number(3) == 3.0
    assert [number(v) for v in (float("nan"), float("-inf"), True, None, "1")] == [None] * 5


def test_a_missing_figure_is_a_dash() -> None:
    assert (percent(None), shown("divergence", {"divergence": float("nan")})) == ("–", "–")
    assert set(row_cells({"name": "a"}, over_16bit=True)[1:]) == {"–"}


@pytest.mark.parametrize(("half_width", "text"), [(None, "0.060 %"), (0.0002, "0.060 ± 0.020 %")])
def test_a_divergence_has_the_half_width_of_its_interval(half_width: float | None, text: str) -> None:
    assert shown("divergence", {"divergence": 0.0006, "interval": half_width}) == text


def test_a_predicted_gradient_error_is_marked() -> None:
    row = {"gradient_error": 0.05, "gradient_error_source": "predicted"}
    assert shown("gradient_error", row) == "~ 5.00 %"


@pytest.mark.parametrize("over_16bit", [False, True])
def test_every_cell_has_its_heading(over_16bit: bool) -> None:
    row = {"name": "a", "speedup": 9.0, "speedup_over_16bit": 1.2, "step_time_ms": 8.0, "memory_bytes": 2.0**30}
    row |= {"divergence": 1e-4, "gradient_error": 0.05}
    cells = dict(zip(headings(over_16bit=over_16bit), row_cells(row, over_16bit=over_16bit), strict=True))
    assert cells.pop("") == "a"
    gains = {"over 16-bit": "1.20x", "over the script": "9.00x"} if over_16bit else {"speed": "9.00x"}
    rest = {"step": "8 ms", "memory": "1.00 GiB", "divergence": "0.010 %", "gradient error": "5.00 %"}
    assert cells == gains | rest


def test_gains_over_16_bit_have_a_column_where_they_are_known() -> None:
    assert over_16bit([{}, {"speedup_over_16bit": 1.0}])
    assert not over_16bit([{"speedup": 2.0}])


def test_the_script_is_named_with_its_own_precision() -> None:
    """22.13x over the script beside 1.27x: an fp32 script, and bf16 autocast."""
    assert headings(over_16bit=True, written="fp32")[2] == "over the script (fp32)"


def test_a_figure_is_shown_with_its_interval_where_that_is_known() -> None:
    row = Run(0, "search", "a", {}, {}, "ok", metrics={"speedup": Metric(1.31, "measured", 1.29, 1.33)}).to_row()
    assert row == {
        "speedup": 1.31,
        "name": "a",
        "sources": {"speedup": "measured"},
        "intervals": {"speedup": (1.29, 1.33)},
    }
    assert shown("speedup", row) == "1.31x (1.29x to 1.33x)"
    assert shown("speedup", {**row, "intervals": {}}) == "1.31x"
