from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.tuning.decide.decision import Standing
from autoprec.tuning.decide.noise import student95
from autoprec.tuning.decide.sampler.expectation import MODEL_RESOLUTION
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.study.run import LEAST_NOISE, MOST_NOISE
from autoprec.tuning.timing.speeds import timing_noise, worth_timing


def test_timing_noise_is_what_two_speedups_differ_by_chance_within_bounds() -> None:
    assert timing_noise(False, [[1.0, 2.0]]) == MODEL_RESOLUTION
    assert timing_noise(True, [[1.0]]) == MOST_NOISE  # one seed says nothing about the spread
    assert timing_noise(True, [[1.5, 1.5, 1.5]]) == LEAST_NOISE
    spread = 0.01 * math.sqrt(2)  # of two runs 2 % apart; two degrees of freedom over two policies
    assert timing_noise(True, [[0.99, 1.01]] * 2) == pytest.approx(student95(2) * spread)
    assert timing_noise(True, [[0.99, 1.01], [1.0, 1.0]]) == pytest.approx(student95(2) * spread / math.sqrt(2))


@settings(max_examples=12)
@given(st.integers(2, 4), st.integers(1, 5), st.floats(0.002, 0.01), st.integers(0, 10**6))
def test_equal_policies_are_told_apart_in_one_of_twenty_pairs(seeds: int, pairs: int, spread: float, at: int) -> None:
    """A false difference in a direction named beforehand: 5 %, and less where the least noise of 1 % hides it."""
    draw = np.random.default_rng(at)
    rows = 1 + spread * draw.standard_normal((400, pairs + 1, seeds))
    found = sum(row[0].mean() / row[1].mean() - 1 > timing_noise(True, row.tolist()) for row in rows)
    assert found <= 400 * 0.05 + 4 * math.sqrt(400 * 0.05 * 0.95)


def test_of_many_policies_within_the_noise_eight_are_timed_and_the_fastest_of_those_is_the_answer() -> None:
    """Eleven were timed, four at once for 50 s each, and the first was adopted: the demo took seven minutes."""
    timed = [Standing(f"timed {n}", 2.0 + 0.01 * n, (0.0, 0.0), low=1.9, high=2.2) for n in range(8)]
    near, far = Standing("near", 2.2, (0.0, 0.0)), Standing("far", 2.4, (0.0, 0.0))
    refused = replace(near, rejection=Reason("incomplete"))
    assert all(one.timed and one.is_surely_above(1.0) for one in timed)
    assert worth_timing([*timed[1:], near, far], 0.1) == [*timed[1:], near, far], "there is still room for one"
    assert worth_timing([*timed, near, far, refused], 0.1) == [*timed, far, refused]
    slow = [replace(one, speedup=0.9, low=0.8, high=1.0) for one in timed]
    assert worth_timing([*slow, near], 10.0) == [*slow, near], "nothing is known to gain yet"
