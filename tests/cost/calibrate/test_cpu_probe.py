from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autoprec.cost.calibrate import cpu_clock, cpu_probe, cpu_steps
from autoprec.cost.calibrate.cpu import FALLBACK
from autoprec.policy import Policy
from autoprec.precision.hardware import cpu_bf16_units


def test_the_output_has_every_rate_the_model_reads_also_where_the_cpu_multiplies_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With bf16 units where this CPU has none, and without where it has some; test_cpu.py measures it as it is."""
    units = () if cpu_bf16_units() else ("AVX512_BF16",)
    ran: list[str] = []

    def once(run: Callable[[], Any], _calls: int) -> float:
        run()
        return 1e-4

    def measured(stage: cpu_steps.Stage, policy: Policy) -> tuple[float, float]:
        ran.append(policy.activations)
        return timed(stage, policy)

    timed = cpu_steps.Stage.measured
    for module in (cpu_clock, cpu_steps):
        monkeypatch.setattr(module, "elapsed", once)
    monkeypatch.setattr(cpu_steps.Stage, "measured", measured)
    monkeypatch.setattr(cpu_steps, "cpu_bf16_units", lambda: units)
    monkeypatch.setattr(cpu_probe, "_HAS_BF16", bool(units))
    assert cpu_probe.main() == 0
    assert ("bf16" in ran) is bool(units)  # a step of bf16 products without units takes seconds
    document = json.loads(capsys.readouterr().out)
    assert set(FALLBACK) <= set(document)
    for name, rates in FALLBACK.items():
        if isinstance(rates, dict):
            assert set(rates) <= set(document[name]), name


def test_operators_are_fitted_per_byte_moved_and_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts what was computed: what a real one reads is as noisy as its machine."""

    def spent(runs: Sequence[Callable[[], Any]]) -> float:
        results = [run() for run in runs]
        first = results[0][0] if isinstance(results[0], tuple) else results[0]
        return 2e-6 + 3e-10 * first.nbytes

    monkeypatch.setattr(cpu_probe, "_apart", spent)
    found = cpu_probe._operators()
    assert set(found) == set(cpu_probe._BACKWARD_TENSORS)
    for name, forms in found.items():
        assert set(forms) == {"fp32", "bf16"}
        for phases in forms.values():
            # one result; two tensors are moved by a forward kernel, more by a backward one
            assert phases["forward"] == pytest.approx([3e-10 / 2.0, 2e-6])
            assert phases["backward"] == pytest.approx([3e-10 / cpu_probe._BACKWARD_TENSORS[name], 2e-6])


def test_both_regimes_of_fused_attention_are_measured() -> None:
    found = cpu_probe._attention()
    assert set(found) == {"fp32", "bf16"}
    for regimes in found.values():
        assert set(regimes) == {"short", "long"}
        for phases in regimes.values():
            per_flop, per_score, per_row = phases["backward"]
            assert per_flop + per_score + per_row > 0
