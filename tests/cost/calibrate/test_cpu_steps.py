from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.cost.calibrate import cpu_clock, cpu_steps
from autoprec.cost.calibrate.cpu import FALLBACK
from autoprec.policy.schema import Policy


@pytest.fixture
def models() -> list[cpu_steps.Stage]:
    torch.manual_seed(0)
    return [
        cpu_steps.Stage(nn.Sequential(nn.Linear(16, wide), nn.GELU(), nn.Linear(wide, 16)), torch.randn(rows, 16))
        for wide, rows in ((16, 8), (64, 8), (16, 64))
    ]


def test_a_step_is_timed_in_two_parts_and_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, models: list[cpu_steps.Stage]
) -> None:
    monkeypatch.setattr(cpu_steps, "CLOCK", cpu_clock.Clock())
    computed, updated = models[0].measured(Policy())
    assert computed > 0
    assert updated > 0
    assert type(models[0].model[0]) is nn.Linear  # type: ignore[index]


@pytest.mark.parametrize("seconds", [1e-6, 1e3])
def test_factors_stay_within_reason_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, models: list[cpu_steps.Stage], seconds: float
) -> None:
    def elapsed(run: Callable[[], Any], _calls: int) -> float:
        run()
        return seconds

    monkeypatch.setattr(cpu_steps, "CLOCK", cpu_clock.Clock())
    monkeypatch.setattr(cpu_steps, "elapsed", elapsed)
    found = cpu_steps.in_situ(dict(FALLBACK), models)
    assert set(found["in_situ"]) == set(FALLBACK["in_situ"])
    assert all(0.5 <= factor <= 4.0 for factor in found["in_situ"].values())
    assert all(seconds >= 0 for seconds in found["weights"].values())
