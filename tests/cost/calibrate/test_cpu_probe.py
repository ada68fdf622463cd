from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from autoprec.cost.calibrate import cpu_probe
from autoprec.cost.calibrate.cpu import AGREES, FALLBACK


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_probe, "_clock", cpu_probe.Clock())


class Machine:
    """Stands in for the CPU's clock: each probe takes a time of its own, longer where something else works."""

    def __init__(self, disturbed: Callable[[int], float]) -> None:
        self.calls, self.disturbed = 0, disturbed

    def __call__(self, _run: Callable[[], Any], _calls: int) -> float:
        self.calls += 1
        return (1.0 + 0.37 * (cpu_probe._clock._at % 10)) * 1e-3 * self.disturbed(self.calls)


def rates_beside(disturbed: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(cpu_probe, "_elapsed", Machine(disturbed))
    return cpu_probe.in_passes(cpu_probe._gemms)


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
    assert rates["passes"] == cpu_probe._MOST_PASSES


def test_what_was_disturbed_all_the_time_has_a_slower_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, beside = (rates_beside(lambda _call, more=more: more, monkeypatch) for more in (1.0, 1.3))
    assert beside["spread"] == quiet["spread"] == 0.0
    assert beside["pace"] > quiet["pace"] + 0.2


def test_a_fit_recovers_what_made_the_times() -> None:
    rows = [[1e9, 1e6, 1.0], [2e9, 5e6, 1.0], [1e8, 1e6, 1.0], [5e9, 2e6, 1.0]]
    times = [1e-11 * a + 2e-10 * b + 1e-5 * c for a, b, c in rows]
    assert cpu_probe._fit(rows, times) == pytest.approx([1e-11, 2e-10, 1e-5], rel=1e-3)


def test_a_fit_never_returns_a_negative_cost() -> None:
    rows = [[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]]
    found = cpu_probe._fit(rows, [1.0, 3.0, 7.0])  # a line with a negative intercept
    assert all(value >= 0 for value in found)
    assert found[0] == pytest.approx(1.6, rel=0.3)


def test_the_output_has_every_rate_the_model_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def once(run: Callable[[], Any], _calls: int) -> float:
        run()
        return 1e-4

    monkeypatch.setattr(cpu_probe, "_elapsed", once)
    assert cpu_probe.main() == 0
    document = json.loads(capsys.readouterr().out)
    assert set(FALLBACK) <= set(document)
    for name, rates in FALLBACK.items():
        if isinstance(rates, dict):
            assert set(rates) <= set(document[name]), name


def test_larger_tensors_cost_more_in_every_class_format_and_phase() -> None:
    for name, forms in cpu_probe._operators().items():
        for form, phases in forms.items():
            for phase, (per_byte, per_call) in phases.items():
                # 512 x 1024 values: the bytes dominate, in a kernel as in its backward kernel
                assert per_byte * 2**20 > per_call > 0, (name, form, phase)


def test_both_regimes_of_fused_attention_are_measured() -> None:
    found = cpu_probe._attention()
    assert set(found) == {"fp32", "bf16"}
    for regimes in found.values():
        assert set(regimes) == {"short", "long"}
        for phases in regimes.values():
            per_flop, per_score, per_row = phases["backward"]
            assert per_flop + per_score + per_row > 0
