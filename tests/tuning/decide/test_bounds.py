from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.bounds import confidence_bounds


def lognormal(rng: np.random.Generator, mean: float, sd: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(math.log(mean) - sd**2 / 2 + sd * rng.normal(size=shape))


@pytest.mark.parametrize("sd", [0.2, 0.35, 0.5])
def test_four_seeds_of_four_finalists_cover_the_mean(sd: float) -> None:
    rng = np.random.default_rng(0)
    worlds = lognormal(rng, 0.002, sd, (1500, 4, 4))
    covered = np.mean([[upper >= 0.002 for _, upper in confidence_bounds(world)] for world in worlds])
    assert covered >= 0.93


def test_the_spread_of_others_counts_when_four_seeds_lie_close_together_by_luck() -> None:
    lucky = (0.0016, 0.00203, 0.00167, 0.00156)  # of a policy whose mean over 48 further seeds was 0.0032
    others = [(0.0012, 0.0021, 0.0007, 0.0026), (0.001, 0.0025, 0.0016, 0.0031)]
    (_, alone), (_, among), *_ = confidence_bounds([lucky])[0], *confidence_bounds([lucky, *others])
    assert alone > 0.0022
    assert among > 0.0025
    (_, calm) = confidence_bounds([lucky, (0.0019, 0.0018, 0.002, 0.0019), (0.0015, 0.0016, 0.0015, 0.0014)])[0]
    assert calm < alone


def test_policies_of_another_level_lend_nothing() -> None:
    row, far = (0.001, 0.0011, 0.0012, 0.0009), (0.00001, 0.0001, 0.00002, 0.00004)
    assert confidence_bounds([row, far])[0] == confidence_bounds([row])[0]


def test_one_bad_seed_in_four_is_believed() -> None:
    rows = [(0.0002, 0.0002, 0.0002, 0.004), (0.0003, 0.0004, 0.0003, 0.0002), (0.0005, 0.0005, 0.0004, 0.0006)]
    assert confidence_bounds(rows)[0][1] > 0.004


def test_more_seeds_tighten_it() -> None:
    rng = np.random.default_rng(1)
    values = lognormal(rng, 0.001, 0.4, (32,))
    ratios = [upper / mean for mean, upper in (confidence_bounds([values[:n]])[0] for n in (2, 4, 8, 16, 32))]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1.6
    assert ratios[-1] < 1.2


def test_one_seed_promises_no_more_than_its_order_of_magnitude() -> None:
    mean, upper = confidence_bounds([[0.001]])[0]
    assert mean == 0.001
    assert 0.002 < upper < 0.004


def test_what_was_not_measured_to_the_end_has_no_bound() -> None:
    nothing = (math.inf, math.inf)
    found = confidence_bounds([(), (0.001, math.inf), (0.001, math.nan), (0.001, 0.001)])
    assert found[:3] == [nothing, nothing, nothing]
    assert math.isfinite(found[3][1])


def test_next_to_nothing_is_next_to_nothing() -> None:
    assert confidence_bounds([(0.0, 1e-12, 1e-6, 0.0)], negligible=5e-5)[0][1] < 1.5e-4


@given(st.lists(st.lists(st.floats(0, 1e-1), min_size=1, max_size=40), min_size=1, max_size=5))
def test_the_bound_is_never_below_the_mean(rows: list[list[float]]) -> None:
    for (mean, upper), row in zip(confidence_bounds(rows), rows, strict=True):
        assert mean == pytest.approx(np.mean(row))
        assert upper >= mean
