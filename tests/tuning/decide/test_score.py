from __future__ import annotations

import math

import pytest

from autoprec.cost import StepEstimate
from autoprec.trial.protocol import TrialResult
from autoprec.tuning.decide.score import Reference, score

REFERENCE = Reference(losses=(3.0, 2.5, 2.2, 2.0), step_ms=100.0, memory_bytes=1000, samples=8, warmup=1)


def result(losses: tuple[float, ...] = (3.0, 2.5, 2.2, 2.0), **changes: object) -> TrialResult:
    values = {"losses": losses, "step_ms": (400.0, 50.0, 50.0, 50.0), "warmup": 1, "memory_bytes": 700} | changes
    return TrialResult("ok", **values)  # type: ignore[arg-type]


def test_a_timed_trial() -> None:
    scored = score(result(), REFERENCE, estimate=None, gradient_error=0.01)
    assert scored.metrics["speedup"] == pytest.approx(2.0)
    assert scored.metrics["throughput"] == pytest.approx(20.0)
    assert scored.metrics["samples_per_s"] == pytest.approx(160.0)
    assert scored.metrics["divergence"] == 0
    assert scored.sources["step_time_ms"] == "measured"
    assert scored.sources["gradient_error"] == "modelled"


def test_a_rehearsed_trial_takes_time_and_memory_from_the_model_and_the_loss_from_the_run() -> None:
    estimate = StepEstimate(time_ms=25.0, low_ms=20.0, high_ms=30.0, memory_bytes=5000)
    scored = score(result((3.0, 2.5, 2.21, 2.0)), REFERENCE, estimate=estimate, gradient_error=0.01)
    assert scored.metrics["speedup"] == pytest.approx(4.0)
    assert scored.metrics["memory_bytes"] == 5000
    assert scored.metrics["divergence"] == pytest.approx((0.01 / 2.2) / 2)
    assert scored.sources["speedup"] == "modelled"
    assert scored.sources["divergence"] == "measured"


def test_a_loss_that_ends_non_finite_is_diverged_and_has_no_metrics() -> None:
    scored = score(result((3.0, 2.5, math.nan, 2.0)), REFERENCE, estimate=None, gradient_error=0.0)
    assert (scored.status, scored.metrics) == ("diverged", {})


def test_failures_keep_their_reason() -> None:
    scored = score(TrialResult("oom", "out of memory"), REFERENCE, estimate=None, gradient_error=0.0)
    assert (scored.status, scored.reason, scored.metrics) == ("oom", "out of memory", {})


def test_state_that_loses_updates_adds_to_the_divergence() -> None:
    """A stalled second moment may well end at a lower loss; what was seen of it from the inside counts."""
    scored = score(result(payload={"state": {"penalty": 0.3}}), REFERENCE, estimate=None, gradient_error=0.0)
    assert scored.metrics["divergence"] == pytest.approx(0.3)


def test_a_trial_that_did_not_execute_its_policy_is_a_failure() -> None:
    row = {
        "name": "blocks.0.fc",
        "requested": {"fprop": "fp8"},
        "executed": {"fprop": "bf16"},
        "ok": False,
        "reason": "",
    }
    scored = score(result(audit={"layers": [row], "operators": {}}), REFERENCE, estimate=None, gradient_error=0.0)
    assert scored.status == "mismatch"
    assert "blocks.0.fc" in scored.reason


def test_a_layer_the_step_never_called_says_nothing_against_a_policy() -> None:
    row = {"name": "experts.7", "requested": {"fprop": "fp8"}, "executed": {}, "ok": False, "reason": "never called"}
    scored = score(result(audit={"layers": [row], "operators": {}}), REFERENCE, estimate=None, gradient_error=0.0)
    assert scored.status == "ok"
