from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.trial.losses import Series, loss_units


def test_a_curve_that_stays_far_from_zero_is_measured_relatively() -> None:
    losses = [4.2, 3.9, 3.1, 2.6, 2.5]
    assert loss_units(losses) == losses


def test_a_loss_that_goes_to_zero_keeps_a_tenth_of_what_it_started_from() -> None:
    units = loss_units([2.0, 0.5, 1e-3, 1e-6, 0.0, 0.0, 0.0, 0.0])
    assert units[:2] == [2.0, 0.5]
    assert units[2:] == [pytest.approx(0.125)] * 6  # a tenth of the first quarter's mean


def test_a_loss_of_either_sign_is_measured_by_its_usual_size() -> None:
    units = loss_units([0.001, -1.0, 1.0, -1.0, 0.002, 1.0])
    assert min(units) == pytest.approx(0.1)


def test_nothing_but_zeros_is_measured_absolutely() -> None:
    assert loss_units([0.0, 0.0]) == [1.0, 1.0]
    assert loss_units([]) == []


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.floats(1e-3, 1e3))
def test_units_are_positive_and_scale_with_the_loss(losses: list[float], factor: float) -> None:
    units = loss_units(losses)
    assert all(unit > 0 and unit >= abs(loss) for unit, loss in zip(units, losses, strict=True))
    if any(abs(loss) > 1e-250 for loss in losses):
        for one, other in zip(units, loss_units([factor * loss for loss in losses]), strict=True):
            assert other == pytest.approx(factor * one, rel=1e-6, abs=1e-300) or not math.isfinite(other)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats())), st.booleans())
def test_a_series_survives_json(rows: list[tuple[int, float]], higher: bool) -> None:
    series = Series("f1", higher, tuple(s for s, _ in rows), tuple(v for _, v in rows), ("f1", "loss"))
    read = Series.from_json(json.loads(json.dumps(series.to_json(), allow_nan=False)))
    assert read is not None
    assert (read.name, read.higher, read.steps, read.names) == ("f1", higher, series.steps, series.names)
    finite = [value if abs(value) < float("inf") else None for value in series.values]
    assert [value if value == value else None for value in read.values] == finite
    assert Series.from_json(None) is None


def test_the_curve_of_a_metric_is_one_of_which_less_is_better() -> None:
    assert Series("f1", higher=True, values=(0.5, 0.25)).curve == (-0.5, -0.25)
    assert Series("loss", values=(0.5, 0.25)).curve == (0.5, 0.25)
