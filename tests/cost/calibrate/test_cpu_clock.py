from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from autoprec.cost.calibrate import cpu_clock, cpu_probe
from autoprec.cost.calibrate.cpu import AGREES


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_clock, "CLOCK", cpu_clock.Clock())


class Machine:
    """Stands in for the CPU's clock: each probe takes a time of its own, longer where something else works."""

    def __init__(self, disturbed: Callable[[int], float]) -> None:
        self.calls, self.disturbed = 0, disturbed

    def __call__(self, _run: Callable[[], Any], _calls: int) -> float:
        self.calls += 1
        return (1.0 + 0.37 * (cpu_clock.CLOCK._at % 10)) * 1e-3 * self.disturbed(self.calls)


def rates_beside(disturbed: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(cpu_clock, "elapsed", Machine(disturbed))
    return cpu_clock.in_passes(cpu_probe._gemms)


def coefficients(rates: dict[str, Any]) -> list[float]:
    return [value for form in ("fp32", "bf16", "int8") for fit in rates[form].values() for value in fit]


def test_a_burst_of_other_work_changes_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It covered all repeats of some probes, once: of the record that was kept a fixed cost was 96 us, not 0.5."""
    quiet = rates_beside(lambda _call: 1.0, monkeypatch)
    burst = rates_beside(lambda call: 4.0 if 10 <= call < 30 else 1.0, monkeypatch)
    assert coefficients(burst) == pytest.approx(coefficients(quiet), rel=0.01)
    assert burst["spread"] <= AGREES
    assert burst["passes"] == 3


def test_probes_that_never_agree_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    rates = rates_beside(lambda _call: 1.0 + rng.random(), monkeypatch)
    assert rates["spread"] > AGREES
    assert rates["passes"] == cpu_clock._MOST_PASSES


def test_what_was_disturbed_all_the_time_has_a_slower_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, beside = (rates_beside(lambda _call, more=more: more, monkeypatch) for more in (1.0, 1.3))
    assert beside["spread"] == quiet["spread"] == 0.0
    assert beside["pace"] > quiet["pace"] + 0.2


def test_a_fit_recovers_what_made_the_times() -> None:
    rows = [[1e9, 1e6, 1.0], [2e9, 5e6, 1.0], [1e8, 1e6, 1.0], [5e9, 2e6, 1.0]]
    times = [1e-11 * a + 2e-10 * b + 1e-5 * c for a, b, c in rows]
    assert cpu_clock.fit(rows, times) == pytest.approx([1e-11, 2e-10, 1e-5], rel=1e-3)


def test_a_fit_never_returns_a_negative_cost() -> None:
    rows = [[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]]
    found = cpu_clock.fit(rows, [1.0, 3.0, 7.0])  # a line with a negative intercept
    assert all(value >= 0 for value in found)
    assert found[0] == pytest.approx(1.6, rel=0.3)


def test_a_machine_too_busy_for_another_pass_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_clock, "_PATIENCE_S", 0.0)
    rates = rates_beside(lambda _call: 1.0, monkeypatch)
    assert rates["passes"] == 1
    assert rates["spread"] == 1.0  # nothing was repeated
