from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.policy.solver import Limit, solve
from autoprec.tuning.decide.problem import FloatTable, IntVector


def instance(seed: int, groups: int, choices: int, *, coarse: bool = False) -> tuple[FloatTable, FloatTable]:
    rng = np.random.default_rng(seed)
    time_, error2 = rng.random((groups, choices)), rng.random((groups, choices)) ** 3
    error2[:, 0] = 0
    if coarse:  # many ties
        time_, error2 = np.round(time_, 1), np.round(error2, 1)
    missing = rng.random((groups, choices)) < 0.2
    missing[:, 0] = False
    return np.where(missing, np.inf, time_), error2


def evaluate(choice: IntVector, time_: FloatTable, error2: FloatTable) -> tuple[float, float]:
    rows = np.arange(len(choice))
    return float(time_[rows, choice].sum()), float(error2[rows, choice].sum())


def brute(time_: FloatTable, error2: FloatTable, budget: float, limits: Sequence[Limit] = ()) -> float | None:
    best = None
    rows = np.arange(len(time_))
    for point in itertools.product(range(time_.shape[1]), repeat=len(time_)):
        total, error = evaluate(np.array(point), time_, error2)
        fits = error <= budget * (1 + 1e-12) and np.isfinite(total)
        fits = fits and all(limit.cost[rows, point].sum() <= limit.bound for limit in limits)
        if fits and (best is None or total < best):
            best = total
    return best


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.floats(0, 1.2), st.booleans())
def test_small_problems_are_solved_exactly(seed: int, groups: int, choices: int, share: float, coarse: bool) -> None:
    time_, error2 = instance(seed, groups, choices, coarse=coarse)
    budget = share * error2.max(axis=1).sum()
    found, best = solve(time_, error2, budget), brute(time_, error2, budget)
    assert best is not None
    assert found is not None
    total, error = evaluate(found, time_, error2)
    assert error <= budget * (1 + 1e-9)
    assert total == pytest.approx(best, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.floats(0.1, 1.0), st.floats(0.2, 1.0))
def test_small_problems_with_a_memory_limit_are_solved_exactly(
    seed: int, groups: int, share: float, memory_share: float
) -> None:
    time_, error2 = instance(seed, groups, 3)
    rng = np.random.default_rng(seed + 1)
    memory = rng.random((groups, 3))
    limits = [Limit(memory, memory_share * memory.max(axis=1).sum())]
    budget = share * error2.max(axis=1).sum()
    found = solve(time_, error2, budget, limits=limits)
    best = brute(time_, error2, budget, limits=limits)
    assert (found is None) == (best is None)
    if found is not None:
        assert evaluate(found, time_, error2)[0] == pytest.approx(best)


def test_nothing_fits_is_none() -> None:
    time_, error2 = np.ones((2, 2)), np.ones((2, 2))
    assert solve(time_, error2, 1.0) is None
    assert solve(time_, error2, 2.0) is not None
    assert solve(time_, error2, np.inf, limits=[Limit(np.ones((2, 2)), 1.0)]) is None


def test_a_choice_that_is_not_offered_is_never_taken() -> None:
    time_ = np.array([[1.0, -np.inf if False else np.inf], [1.0, 0.1]])
    error2 = np.array([[0.0, 0.0], [0.0, np.inf]])
    assert solve(time_, error2, np.inf).tolist() == [0, 0]


def test_large_problems_are_near_the_linear_bound() -> None:
    rng = np.random.default_rng(0)
    time_, error2 = rng.random((200, 6)), rng.lognormal(0, 1.5, (200, 6))
    time_[:, 0], error2[:, 0] = 1.0, 0.0
    budget = 0.05 * error2.sum() / 6
    total, error = evaluate(solve(time_, error2, budget), time_, error2)
    assert error <= budget * (1 + 1e-9)
    # the linear relaxation's optimum by bisection on the multiplier is a lower bound
    low, high = 0.0, 1e3
    for _ in range(80):
        price = (low + high) / 2
        at = np.argmin(time_ + price * error2, axis=1)
        low, high = (low, price) if evaluate(at, time_, error2)[1] <= budget else (price, high)
    bound = (time_ + high * error2).min(axis=1).sum() - high * budget
    assert total <= bound * 1.002


def test_a_memory_limit_on_a_large_problem_holds() -> None:
    rng = np.random.default_rng(1)
    time_, error2, memory = rng.random((120, 6)), rng.random((120, 6)), rng.random((120, 6))
    bound = float(memory.min(axis=1).sum() * 2.2)
    found = solve(time_, error2, 30.0, limits=[Limit(memory, bound)])
    assert found is not None
    rows = np.arange(120)
    assert memory[rows, found].sum() <= bound
    assert error2[rows, found].sum() <= 30.0
    unlimited = solve(time_, error2, 30.0)
    assert time_[rows, found].sum() <= 1.7 * time_[rows, unlimited].sum()


def test_milliseconds_at_500_groups_and_8_choices() -> None:
    rng = np.random.default_rng(0)
    time_, error2 = rng.random((500, 8)), rng.lognormal(0, 1.5, (500, 8))
    began = time.process_time()
    for share in (0.01, 0.05, 0.2):
        solve(time_, error2, share * error2.sum() / 8)
    assert (time.process_time() - began) / 3 < 1.0


def test_many_groups_without_a_choice_do_not_count_as_dimensions() -> None:
    time, error2 = np.full((49, 2), np.inf), np.zeros((49, 2))
    time[:, 0] = 1.0
    time[:3, 1], error2[:3, 1] = 0.5, 1.0
    memory = np.ones((49, 2))
    found = solve(time, error2, 2.0, limits=[Limit(memory, 49.0)])
    assert found is not None
    assert found.sum() == 2


def test_a_limit_that_no_choice_can_meet_is_none_and_warns_of_nothing() -> None:
    """Memory that the choices do not change, beyond what there is: prices overflowed."""
    time_, error2 = instance(0, 40, 4)
    for held in (0.0, 1.0):
        same = np.full_like(time_, held)
        assert solve(time_, error2, np.inf, limits=[Limit(same, 40 * held)]) is not None
        assert solve(time_, error2, np.inf, limits=[Limit(same, 40 * held - 0.5)]) is None
