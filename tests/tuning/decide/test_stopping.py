from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.stopping import MARGIN, stop_gap

FRONT = [(10.0, 0.03), (15.0, 0.004), (20.0, 0.001)]


def test_a_trial_faster_than_anything_measured_is_never_stopped() -> None:
    assert stop_gap(9.0, FRONT, max_divergence=0.0025) == math.inf
    assert stop_gap(9.0, [], max_divergence=0.0025) == math.inf
    assert stop_gap(math.inf, FRONT, max_divergence=0.0025) == math.inf


def test_a_trial_is_stopped_once_something_as_fast_is_out_of_reach() -> None:
    assert stop_gap(12.0, FRONT, max_divergence=0.0025) == MARGIN * 0.03
    assert stop_gap(16.0, FRONT, max_divergence=0.0025) == MARGIN * 0.004
    assert stop_gap(25.0, FRONT, max_divergence=0.0025) == MARGIN * 0.0025


def test_gaps_within_the_noise_stop_nothing() -> None:
    assert stop_gap(25.0, FRONT, max_divergence=0.0025, noise_floor=0.02) == MARGIN * 0.04


@given(st.floats(5, 40), st.floats(0, 0.1))
def test_whatever_could_still_be_acceptable_goes_on(step: float, gap: float) -> None:
    if gap <= 0.0025:
        assert stop_gap(step, FRONT, max_divergence=0.0025) > gap
