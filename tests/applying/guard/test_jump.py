"""A loss that jumps is found in a few steps; noise, heavy tails and falling trends are not taken for one."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.applying.guard.jump import LEAST_PAST, LossJump, sigma_of


def noise(kind: str, seed: int, count: int) -> list[float]:
    made = random.Random(seed)
    draw = {
        "normal": lambda: made.gauss(0.0, 0.05),
        "heavy": lambda: made.gauss(0.0, 0.02) * math.exp(made.gauss(0.0, 1.0)),
        "outliers": lambda: 2.0 if made.random() < 0.05 else made.gauss(0.0, 0.02),
    }[kind]
    return [draw() for _ in range(count)]


@pytest.mark.parametrize("kind", ["normal", "heavy", "outliers"])
def test_a_falling_noisy_loss_does_not_jump(kind: str) -> None:
    found = 0
    for seed in range(10):
        jump = LossJump()
        losses = [2.0 + math.exp(-step / 80) + e for step, e in enumerate(noise(kind, seed, 300))]
        found += max(jump.add(loss) for loss in losses) > 0.02
    assert found == 0


@pytest.mark.parametrize("kind", ["normal", "heavy", "outliers"])
def test_a_loss_that_rises_by_a_fifth_is_found_within_sixteen_steps(kind: str) -> None:
    for seed in range(10):
        jump = LossJump()
        losses = [2.0 + e + (0.4 if step >= 200 else 0.0) for step, e in enumerate(noise(kind, seed, 216))]
        seen = [jump.add(loss) for loss in losses]
        assert max(seen[:200]) <= 0.02
        assert max(seen[200:]) > 0.02


def test_a_small_jump_counts_where_the_gradient_norm_jumps_as_well() -> None:
    alone, both = LossJump(), LossJump()
    losses = [2.0 + e + (0.11 if step >= 200 else 0.0) for step, e in enumerate(noise("normal", 4, 208))]
    norms = [1.0 + 2 * e + (0.5 if step >= 200 else 0.0) for step, e in enumerate(noise("normal", 5, 208))]
    small = max(alone.add(loss) for loss in losses)
    seen = [both.add(loss, norm) for loss, norm in zip(losses, norms, strict=True)]
    assert max(seen[:200]) <= 0.0
    assert max(seen[200:]) > small + 0.01


def test_a_single_spike_is_not_a_jump() -> None:
    jump = LossJump()
    assert max(jump.add(100.0 if step == 150 else 2.0 + e) for step, e in enumerate(noise("normal", 0, 200))) == 0.0


def test_what_is_usual_is_forgotten_on_demand() -> None:
    jump = LossJump()
    for e in noise("normal", 1, 100):
        jump.add(2.0 + e)
    jump.clear()
    assert [jump.add(5.0) for _ in range(LEAST_PAST)] == [0.0] * LEAST_PAST


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=80))
def test_it_takes_in_whatever_a_loss_may_be(values: list[float]) -> None:
    jump = LossJump()
    for value in values:
        assert jump.add(value) >= 0.0


def test_sigma_ignores_a_trend() -> None:
    series = [step * 0.01 + e for step, e in enumerate(noise("normal", 3, 400))]
    assert sigma_of(series) == pytest.approx(0.05, rel=0.25)
    assert statistics.stdev(series) > 1.0
