from __future__ import annotations

import pytest

from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.limits import Limits, rank

GOOD = {"divergence": 0.001, "noise_floor": 0.0005, "gradient_error": 0.05, "memory_bytes": 100.0, "step_time_ms": 2.0}


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, ()),
        ({"divergence": 0.003}, ("divergence",)),
        ({"divergence": 0.003, "noise_floor": 0.004}, ()),  # noise explains it
        ({"gradient_error": 0.07}, ("gradient_error",)),
        ({"memory_bytes": 101.0}, ("memory_bytes",)),
        (
            {"divergence": 0.1, "gradient_error": 1.0, "memory_bytes": 1e9},
            ("divergence", "gradient_error", "memory_bytes"),
        ),
    ],
)
def test_every_broken_limit_is_named(changed: dict[str, float], broken: tuple[str, ...]) -> None:
    assert Limits(0.0025, 0.12, 100).exceeded(GOOD | changed, 0.06) == broken


def test_without_a_known_noise_or_a_memory_limit_neither_forbids_anything() -> None:
    assert Limits(0.0025, 0.12).exceeded(GOOD | {"gradient_error": 9.0, "memory_bytes": 1e15}, None) == ()
    assert Limits(0.0025, 0.12).gradient(None, Baseline(0.0)) is None
    assert Limits(0.0025, 0.12).gradient(0.5, Baseline(0.0)) == pytest.approx(0.06)


def test_each_objective_ranks_by_its_own_figure() -> None:
    assert [rank(GOOD, name) for name in ("throughput", "memory", "balanced")] == [2.0, 100.0, 200.0]
