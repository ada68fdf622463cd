from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from autoprec.tuning.decide.pareto import front, nondominated
from autoprec.tuning.study.run import Run, metrics_of


def record(number: int, step: float, gap: float, status: str = "ok") -> Run:
    metrics = {"step_time_ms": step, "divergence": gap}
    return Run(
        number=number,
        kind="search",
        name=f"t{number}",
        params={},
        policy={},
        status=status,
        metrics=metrics_of(metrics),
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
