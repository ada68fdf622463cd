from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.objectives import curve_slope, divergence, effective_speedup, step_time


def test_divergence_is_the_mean_absolute_relative_gap_of_the_last_half() -> None:
    reference = [4.0, 3.0, 2.0, 1.0]
    assert divergence([9.0, 9.0, 2.02, 0.99], reference) == pytest.approx(0.01)
    assert divergence([9.0, 9.0, 2.02, 0.99], reference, window=1) == pytest.approx(0.01)
    assert divergence(reference, reference) == 0.0


def test_gaps_of_both_signs_do_not_cancel() -> None:
    assert divergence([1.0, 1.0, 1.1, 0.9], [1.0] * 4) == pytest.approx(0.1)


def test_only_common_steps_are_compared() -> None:
    assert divergence([1.0, 1.0, 1.2], [1.0] * 10) == pytest.approx(0.1)


@pytest.mark.parametrize("losses", [[1.0, 1.0, math.nan, 1.0], [1.0, 1.0, math.inf, 1.0], []])
def test_non_finite_or_missing_losses_are_infinite(losses: list[float]) -> None:
    assert divergence(losses, [1.0] * 4) == math.inf


def test_a_nan_outside_the_scored_window_does_not_matter() -> None:
    assert divergence([math.nan, 1.0, 1.0, 1.0], [1.0] * 4) == 0.0


def test_zero_losses_are_compared_absolutely() -> None:
    assert divergence([0.0, 0.1], [0.0, 0.0]) == pytest.approx(0.1)


def test_step_time_is_the_median_after_warmup() -> None:
    assert step_time([900.0, 10.0, 12.0, 11.0, 500.0], 1) == 11.5
    assert step_time([5.0], 3) == 5.0
    assert step_time([]) == math.inf


def test_the_slope_of_a_logarithmic_curve() -> None:
    steps = np.arange(1, 201)
    slope, error = curve_slope((3.0 - 0.2 * np.log(steps)).tolist())
    assert slope == pytest.approx(0.2)
    assert error < 1e-9
    assert math.isnan(curve_slope([1.0, 2.0])[0])


@given(st.floats(0.5, 3.0), st.floats(0.0, 0.05))
def test_effective_speedup_counts_the_extra_steps(speedup: float, gap: float) -> None:
    steps = np.arange(1, 201)
    reference = 3.0 - 0.2 * np.log(steps)
    found = effective_speedup(speedup, (reference + gap).tolist(), reference.tolist())
    # the reference's own curve needs exp(gap / slope) times the steps to fall by the gap
    assert found == pytest.approx(speedup * math.exp(-gap / 0.2), rel=1e-6)


def test_a_better_loss_earns_nothing() -> None:
    reference = (3.0 - 0.2 * np.log(np.arange(1, 101))).tolist()
    assert effective_speedup(1.5, [x - 0.1 for x in reference], reference) == 1.5


def test_a_flat_curve_charges_the_divergence() -> None:
    rng = np.random.default_rng(0)
    reference = (1.0 + 0.01 * rng.normal(size=40)).tolist()
    losses = [x * 1.02 for x in reference]
    assert effective_speedup(1.5, losses, reference) == pytest.approx(1.5 * 0.98, rel=1e-3)


def test_a_diverged_run_is_worth_nothing() -> None:
    assert effective_speedup(2.0, [1.0, math.nan], [1.0, 1.0]) == 0.0
