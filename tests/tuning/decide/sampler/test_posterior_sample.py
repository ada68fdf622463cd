from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.sampler.posterior import DivergenceLaw
from autoprec.tuning.decide.sampler.posterior_sample import PosteriorSample

GROUPS, CHOICES = 3, 2
TIME = np.array([[2.0, 1.0], [4.0, 2.0], [6.0, 3.0]])
ERROR2 = np.array([[0.0, 1e-4], [0.0, 2e-4], [0.0, 4e-4]])
LAW = DivergenceLaw(ERROR2, scale=0.0, power=1.0, parameter=np.array([0.5]), unit=1.0, floor=1e-4)


def sample(asked: np.ndarray) -> PosteriorSample:
    return PosteriorSample(LAW, TIME, base_ms=10.0, effects=np.array([-1.0]), unit=2.0, asked=asked)


def places(*rows: tuple[int, ...], features: float = 0.0) -> np.ndarray:
    index = np.array(rows, dtype=np.int64)
    return sample(np.zeros((0, 2))).places(index, np.full((len(rows), 1), features), np.zeros(len(rows)))


def test_a_place_is_the_time_in_units_and_the_logarithm_of_the_divergence() -> None:
    (slow, fast), (slow_later, _) = places((0, 0, 0), (1, 1, 1)), places((0, 0, 0), (1, 1, 1), features=1.0)
    assert slow[0] == pytest.approx((10 + 12) / 2)
    assert slow[1] == pytest.approx(np.log(1e-4), abs=1e-6)  # the floor: no error at all
    assert fast[0] == pytest.approx((10 + 6) / 2)
    assert fast[1] == pytest.approx(0.5 * np.log(7e-4 + 1e-8))
    assert slow_later[0] == pytest.approx(slow[0] - 0.5)  # the parameter saves one millisecond


def test_what_was_asked_or_is_dominated_adds_nothing() -> None:
    every = places((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1))
    gains = sample(every[[0, 2, 3]]).gains(every)
    assert gains[[0, 2, 3]] == pytest.approx(0.0)
    assert gains[1] > 0  # between two known points of the front
    worse = every[[1]] + 0.5
    assert sample(every).gains(worse) == pytest.approx(0.0)


@given(st.lists(st.tuples(*[st.integers(0, CHOICES - 1)] * GROUPS), min_size=2, max_size=8, unique=True))
def test_a_gain_is_never_negative_and_shrinks_with_what_is_known(rows: list[tuple[int, ...]]) -> None:
    every = places(*rows)
    little, much = sample(every[:1]).gains(every), sample(every).gains(every)
    assert (little >= 0).all()
    assert (much <= little + 1e-12).all()
