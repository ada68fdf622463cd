from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.cost import StepEstimate
from autoprec.trial.losses import Series
from autoprec.trial.protocol import TrialResult
from autoprec.tuning.decide.metrics import (
    Reference,
    curve_slope,
    divergence,
    effective_speedup,
    score,
    signed_gap,
    step_time,
)
from autoprec.tuning.study.run import Run


def test_divergence_is_the_mean_absolute_relative_gap_of_the_last_half() -> None:
    reference = [4.0, 3.0, 2.0, 1.0]
    assert divergence([9.0, 9.0, 2.02, 0.99], reference) == pytest.approx(0.01)
    assert divergence(reference, reference) == 0.0


def test_gaps_of_both_signs_do_not_cancel() -> None:
    assert divergence([1.0, 1.0, 1.1, 0.9], [1.0] * 4) == pytest.approx(0.1)


def test_only_common_steps_are_compared() -> None:
    assert divergence([1.0, 1.0, 1.2], [1.0] * 10) == pytest.approx(0.1)


@pytest.mark.parametrize("losses", [[1.0, 1.0, math.nan, 1.0], [1.0, 1.0, math.inf, 1.0], []])
def test_non_finite_or_missing_losses_are_infinite(losses: list[float]) -> None:
    assert divergence(losses, [1.0] * 4) == math.inf


def test_a_nan_outside_the_scored_window_does_not_matter() -> None:
    assert divergence([math.nan, 1.0, 1.0, 1.0], [1.0] * 4) == 0.0


def test_zero_losses_are_compared_absolutely() -> None:
    assert divergence([0.0, 0.1], [0.0, 0.0]) == pytest.approx(0.1)


def test_step_time_is_the_mean_after_warmup_without_what_else_a_script_does() -> None:
    assert step_time([900.0, 10.0, 12.0, 11.0, 500.0], 1) == 11.0
    many, few = [60.0] * 12 + [75.0] * 8, [60.0] * 8 + [75.0] * 12  # steps with and without page faults (ConvNeXt)
    assert step_time(few) / step_time(many) == pytest.approx(1.045, abs=0.005), "25 % by the median"
    assert step_time([5.0], 3) == 5.0
    assert step_time([]) == math.inf


def test_the_slope_of_a_logarithmic_curve() -> None:
    steps = np.arange(1, 201)
    slope, error = curve_slope((3.0 - 0.2 * np.log(steps)).tolist())
    assert slope == pytest.approx(0.2)
    assert error < 1e-9
    assert math.isnan(curve_slope([1.0, 2.0])[0])


@given(st.floats(0.5, 3.0), st.floats(0.0, 0.05))
def test_effective_speedup_counts_the_extra_steps(speedup: float, gap: float) -> None:
    steps = np.arange(1, 201)
    reference = 3.0 - 0.2 * np.log(steps)
    found = effective_speedup(speedup, (reference + gap).tolist(), reference.tolist())
    # the reference's own curve needs exp(gap / slope) times the steps to fall by the gap
    assert found == pytest.approx(speedup * math.exp(-gap / 0.2), rel=1e-6)


def test_a_better_loss_earns_nothing() -> None:
    reference = (3.0 - 0.2 * np.log(np.arange(1, 101))).tolist()
    assert effective_speedup(1.5, [x - 0.1 for x in reference], reference) == 1.5


def test_a_flat_curve_charges_the_divergence() -> None:
    rng = np.random.default_rng(0)
    reference = (1.0 + 0.01 * rng.normal(size=40)).tolist()
    losses = [x * 1.02 for x in reference]
    assert effective_speedup(1.5, losses, reference) == pytest.approx(1.5 * 0.98, rel=1e-3)


def test_a_diverged_run_is_worth_nothing() -> None:
    assert effective_speedup(2.0, [1.0, math.nan], [1.0, 1.0]) == 0.0


REFERENCE = Reference(losses=(3.0, 2.5, 2.2, 2.0), step_ms=100.0, memory_bytes=1000, samples=8)


PLAN = Run(1, "search", "trial 1", {}, {}, "")


def result(losses: tuple[float, ...] = (3.0, 2.5, 2.2, 2.0), **changes: object) -> TrialResult:
    values = {"losses": losses, "step_ms": (400.0, 50.0, 50.0, 50.0), "warmup": 1, "memory_bytes": 700} | changes
    return TrialResult("ok", **values)  # type: ignore[arg-type]


def test_a_timed_trial() -> None:
    scored = score(PLAN, result(), REFERENCE, estimate=None, error=0.01)
    assert scored["speedup"] == pytest.approx(2.0)
    assert scored["throughput"] == pytest.approx(20.0)
    assert scored["samples_per_s"] == pytest.approx(160.0)
    assert scored["divergence"] == 0
    assert scored.sources["step_time_ms"] == "measured"
    assert scored.sources["gradient_error"] == "modelled"


def test_a_rehearsed_trial_takes_time_and_memory_from_the_model_and_the_loss_from_the_run() -> None:
    estimate = StepEstimate(time_ms=25.0, low_ms=20.0, high_ms=30.0, memory_bytes=5000)
    scored = score(PLAN, result((3.0, 2.5, 2.21, 2.0)), REFERENCE, estimate=estimate, error=0.01)
    assert scored["speedup"] == pytest.approx(4.0)
    assert scored["memory_bytes"] == 5000
    assert scored["divergence"] == pytest.approx((0.01 / 2.2) / 2)
    assert scored.sources["speedup"] == "modelled"
    assert scored.sources["divergence"] == "measured"


def test_a_loss_that_ends_non_finite_is_diverged_and_has_no_metrics() -> None:
    scored = score(PLAN, result((3.0, 2.5, math.nan, 2.0)), REFERENCE, estimate=None, error=0.0)
    assert (scored.status, scored.metrics) == ("diverged", {})


def test_failures_keep_their_reason() -> None:
    scored = score(PLAN, TrialResult("oom", "out of memory"), REFERENCE, estimate=None, error=0.0)
    assert (scored.status, scored.reason, scored.metrics) == ("oom", "out of memory", {})


def test_state_that_loses_updates_adds_to_the_divergence() -> None:
    """A stalled second moment may well end at a lower loss; what was seen of it from the inside counts."""
    scored = score(PLAN, result(penalty=0.3), REFERENCE, estimate=None, error=0.0)
    assert scored["divergence"] == pytest.approx(0.3)


def test_a_trial_that_did_not_execute_its_policy_is_a_failure() -> None:
    row = {
        "name": "blocks.0.fc",
        "requested": {"fprop": "fp8"},
        "executed": {"fprop": "bf16"},
        "ok": False,
        "reason": "",
    }
    scored = score(PLAN, result(audit={"layers": [row], "operators": {}}), REFERENCE, estimate=None, error=0.0)
    assert scored.status == "mismatch"
    assert "blocks.0.fc" in scored.reason
    around = {"ok": False, "executed": "-", "reason": "never executed"}
    scored = score(PLAN, result(audit={"operators": {"activations": around}}), REFERENCE, estimate=None, error=0.0)
    assert scored.reason == "1 layers or operators did not run as asked, first activations: never executed"


def test_an_expert_without_tokens_is_forgiven_and_a_weight_out_of_reach_is_not() -> None:
    row = {"name": "experts.7", "requested": {"fprop": "fp8"}, "executed": {}, "ok": True, "reason": "not called"}
    for ok, status in ((True, "ok"), (False, "mismatch")):
        audit = {"layers": [{**row, "ok": ok}], "operators": {}}
        assert score(PLAN, result(audit=audit), REFERENCE, estimate=None, error=0.0).status == status


def test_a_loss_near_zero_is_not_divided_by() -> None:
    """1e-6 against 3e-6 is a gap of 200 % that nobody will see: the unit stays a tenth of the initial loss."""
    reference = [1.0, 0.3, 0.05, 1e-3, 1e-5, 1e-6, 1e-6, 1e-6]
    other = [1.0, 0.3, 0.05, 1e-3, 3e-5, 3e-6, 3e-6, 3e-6]
    assert divergence(other, reference) < 1e-3
    stuck = [1.0, 0.3, 0.05, 0.02, 0.02, 0.02, 0.02, 0.02]
    assert divergence(stuck, reference) > 0.1


def test_a_signed_gap_tells_worse_from_different() -> None:
    reference = [2.0, 2.0, 2.0, 2.0]
    assert signed_gap([2.0, 2.0, 2.2, 1.8], reference) == pytest.approx(0.0)
    assert signed_gap([2.0, 2.0, 2.2, 2.2], reference) == pytest.approx(0.1)
    assert signed_gap([2.0, 2.0, 1.8, 1.8], reference) == pytest.approx(-0.1)
    assert math.isnan(signed_gap([2.0, math.nan], reference))
    assert math.isnan(signed_gap([], reference))


def reported(*values: float, higher: bool = False) -> Series:
    steps = tuple(range(len(values)))
    return Series("f1" if higher else "eval_loss", higher, steps, values, ("eval_loss", "f1"))


@pytest.mark.parametrize("higher", [False, True])
def test_a_metric_takes_the_place_of_the_losses(higher: bool) -> None:
    reference = replace(REFERENCE, metric=reported(0.5, 0.6, higher=higher))
    same, other = (result(metric=reported(0.5, x, higher=higher)) for x in (0.6, 0.63))
    assert score(PLAN, same, reference, estimate=None, error=0.0)["divergence"] == 0
    scored = score(PLAN, other, reference, estimate=None, error=0.0)
    assert scored["divergence"] == pytest.approx(0.05)
    assert (scored.metric, scored.higher) == (other.metric.name, higher)  # type: ignore[union-attr]
    assert (scored.values, scored.reference_values) == ((0.5, 0.63), (0.5, 0.6))
    assert scored.losses == scored.reference_losses == REFERENCE.losses  # which stay recorded
    excess = signed_gap(scored.curve, scored.reference_curve)
    assert excess == pytest.approx(-0.05 if higher else 0.05)  # more of an F1 score is not worse


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.floats(0.9, 1.1), st.booleans())
def test_which_values_are_better_changes_the_sign_alone(values: list[float], factor: float, higher: bool) -> None:
    own, other = reported(*(factor * v for v in values), higher=higher), reported(*values, higher=higher)
    low, high = reported(*own.values), reported(*other.values)
    assert divergence(own.curve, other.curve) == pytest.approx(divergence(low.curve, high.curve))
    sign = -1 if higher else 1
    assert signed_gap(own.curve, other.curve) == pytest.approx(sign * signed_gap(low.curve, high.curve))


def test_of_a_metric_that_comes_once_that_value_counts() -> None:
    assert divergence(reported(0.5).curve, reported(0.4).curve) == pytest.approx(0.25)


def test_a_metric_that_is_not_finite_is_named() -> None:
    reference = replace(REFERENCE, metric=reported(0.5, 0.6))
    scored = score(PLAN, result(metric=reported(0.5, math.nan)), reference, estimate=None, error=0.0)
    assert (scored.status, scored.reason) == ("diverged", "eval_loss became non-finite")


def test_sides_that_come_closer_are_no_change_and_sides_that_part_are() -> None:
    def kl(*values: float) -> Series:
        return Series("rollout_kl", False, tuple(range(len(values))), values, ("rollout_kl", "rollout_flips"))

    reference = replace(REFERENCE, metric=kl(1e-4, 1e-4))
    closer, apart = (score(PLAN, result(metric=kl(1e-4, x)), reference, estimate=None, error=0.0) for x in (1e-6, 3e-4))
    assert closer["divergence"] == 0.0
    assert apart["divergence"] == pytest.approx(2.0)
    lost = score(PLAN, result(metric=kl(1e-4, math.nan)), reference, estimate=None, error=0.0)
    assert (lost.status, lost.reason) == ("diverged", "rollout_kl became non-finite")
