from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from autoprec.cost.calibrate import cpu_probe
from autoprec.cost.calibrate.cpu import FALLBACK


def test_the_shortest_of_several_calls_is_taken() -> None:
    slow = [0.003, 0.003, 0.003, 0.001, 0.002]

    def run() -> None:
        end = time.process_time() + (slow.pop(0) if slow else 0.002)
        while time.process_time() < end:
            pass

    assert cpu_probe._best(run) == pytest.approx(0.001, rel=0.5)


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
    def once(run: Callable[[], Any], repeats: int = 3) -> float:
        run()
        return 1e-4

    monkeypatch.setattr(cpu_probe, "_best", once)
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
