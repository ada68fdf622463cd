from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.pareto import added_area, front, nondominated
from autoprec.tuning.study.records import TrialRecord


def record(number: int, step: float, gap: float, status: str = "ok") -> TrialRecord:
    metrics = {"step_time_ms": step, "divergence": gap}
    return TrialRecord(
        number=number, kind="search", name=f"t{number}", params={}, policy={}, status=status, metrics=metrics
    )


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), max_size=25))
def test_the_front_is_what_nothing_dominates(points: list[tuple[int, int, int]]) -> None:
    kept = nondominated(points)
    for i, p in enumerate(points):
        dominated = any(all(a <= b for a, b in zip(q, p, strict=True)) and q != p for q in points)
        assert (i in kept) == (not dominated and points.index(p) == i)


def test_failed_and_unfinished_records_are_not_on_the_front() -> None:
    records = [record(0, 1.0, 0.1), record(1, 0.5, 0.0, "diverged"), record(2, 0.9, math.inf), record(3, 2.0, 0.01)]
    assert [r.number for r in front(records)] == [0, 3]


def area(points: list[list[float]]) -> float:
    """Return the share of a fine grid of the unit square that the points dominate."""
    x, y = np.meshgrid(*[(np.arange(400) + 0.5) / 400] * 2)
    return float(np.any([(x >= a) & (y >= b) for a, b in points] or [np.zeros_like(x)], axis=0).mean())


def test_added_area_is_what_one_more_point_dominates() -> None:
    rng = np.random.default_rng(0)
    for count in (0, 1, 7):
        points, candidates = rng.uniform(0, 1.2, (count, 2)), rng.uniform(-0.2, 1.2, (20, 2)).clip(0)
        added = added_area(points, candidates, (1.0, 1.0))
        for candidate, more in zip(candidates.tolist(), added, strict=True):
            assert more == pytest.approx(area([*points.tolist(), candidate]) - area(points.tolist()), abs=0.006)
