"""The interval of a median covers it as often as it says, also where single values are far off."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from autoprec.trial.intervals import FEWEST, median_interval, ratio_interval


@pytest.mark.parametrize("count", [6, 9, 12, 25, 60])
@pytest.mark.parametrize("disturbed", [0.0, 0.1])
def test_it_covers_the_median_in_95_percent(count: int, disturbed: float) -> None:
    draw, inside, runs = random.Random(count), 0, 2000
    for _ in range(runs):
        values = [
            1.5 * math.exp(draw.gauss(0, 0.03)) * (draw.choice((0.5, 2.0)) if draw.random() < disturbed else 1)
            for _ in range(count)
        ]
        _, low, high = median_interval(values)
        inside += low <= 1.5 <= high
    assert 0.94 <= inside / runs <= 0.985


def test_more_values_narrow_it_and_few_have_none() -> None:
    draw = random.Random(1)
    values = [draw.gauss(1.0, 0.03) for _ in range(80)]
    widths = [high - low for _, low, high in (median_interval(values[:n]) for n in (6, 20, 80))]
    assert widths[0] > widths[1] > widths[2] > 0
    middle, low, high = median_interval(values[: FEWEST - 1])
    assert (middle, low, high) == (statistics.median(values[: FEWEST - 1]), -math.inf, math.inf)


def test_of_values_with_two_modes_the_median_stays_between_them() -> None:
    draw = random.Random(2)
    drawn = [[draw.choice((0.95, 1.05)) + draw.gauss(0.0, 0.01) for _ in range(12)] for _ in range(400)]
    spread = statistics.pstdev([median_interval(values)[0] for values in drawn])
    assert spread < 0.75 * statistics.pstdev([statistics.median(values) for values in drawn])


def test_its_ends_are_those_of_wilcoxons_signed_rank_test() -> None:
    """Critical values of the two-sided test at 5 %: 8 of 55 sums of ranks for 10 values, 52 of 210 for 20."""
    for count, critical in ((6, 0), (10, 8), (20, 52)):
        values = [2.0**power for power in range(count)]
        averages = sorted((one + other) / 2.0 for i, one in enumerate(values) for other in values[i:])
        assert median_interval(values)[1:] == (averages[critical], averages[-1 - critical])


def test_equal_values_have_a_point() -> None:
    assert median_interval([2.0] * 7) == (2.0, 2.0, 2.0)


def test_a_ratio_is_of_the_rounds_that_both_took_part_in() -> None:
    rounds = [{"a": 2.0, "b": 1.0}] * FEWEST + [{"a": 9.0}, {"b": 9.0}]
    assert ratio_interval(rounds, "a", "b") == (2.0, 2.0, 2.0)
    assert ratio_interval(rounds[1:], "a", "b") is None
