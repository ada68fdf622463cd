from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoprec.tuning.decide.decision import Decision, Rules, Standing, faster_ones, gradient_limit
from autoprec.tuning.decide.decision import choose as choose_by
from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.study.run import MODELLED, Metric, Run, metrics_of

SCRIPT = Standing("script as written", 1.0, (0.0,), 0.0, 100.0, reference=True)


def choose(candidates: list[Standing], **asked: Any) -> Decision:
    rules = {name: asked.pop(name) for name in tuple(asked) if name in Rules.__slots__}
    return choose_by(candidates, Rules(**rules), **asked)


def candidate(name: str, speedup: float, gap: float = 0.001, **fields: object) -> Standing:
    gaps = fields.pop("gaps", (gap, gap * 1.05, gap * 0.95, gap))
    return Standing(name, speedup, gaps, **fields)  # type: ignore[arg-type]


def test_the_fastest_acceptable_policy_is_adopted() -> None:
    found = choose([SCRIPT, candidate("a", 1.3), candidate("b", 1.5), candidate("c", 1.9, 0.01)])
    assert (found.verdict, found.index) == ("adopt", 2)
    assert (found.reasons[0].code, found.reasons[0].data["name"]) == ("adopted", "b")
    assert found.chosen is found.ranking[2]
    assert found.rejected["c"].code == "divergence"


def test_it_is_the_upper_bound_that_counts_not_the_mean() -> None:
    scattered = candidate("scattered", 1.5, gaps=(0.0005, 0.0045, 0.0005, 0.0035))
    steady = candidate("steady", 1.2, gaps=(0.0012, 0.0013, 0.0012, 0.0011))
    assert np.mean(scattered.divergences) < 0.0025
    found = choose([SCRIPT, scattered, steady])
    assert found.index == 2
    why = found.rejected["scattered"]
    assert why.code == "divergence"
    assert why.data["mean"] < why.data["limit"] < why.data["upper"]


CHAOS = Baseline(0.02, (0.012, 0.035, 0.018, 0.015), (0.004, -0.02, 0.01, -0.005))


def test_uniform_bf16_is_acceptable_where_training_is_chaotic_and_fp4_is_not() -> None:
    bf16 = candidate("all bf16", 1.5, gaps=(0.05, 0.01, 0.03, 0.02), gradient_error=0.006)
    fp4 = candidate("all nvfp4", 2.5, gaps=(0.06, 0.02, 0.03, 0.03), gradient_error=0.28)
    found = choose([SCRIPT, bf16, fp4], baseline=CHAOS, max_gradient=gradient_limit(4.0))
    assert found.index == 1
    assert found.rejected["all nvfp4"] == Reason("gradient_error", {"error": 0.28, "limit": 0.1, "noise": None})


def test_beyond_the_budget_nothing_is_adopted_without_a_word() -> None:
    """The floor is above the budget: before, everything below the floor was "within the noise floor"."""
    found = choose([SCRIPT, candidate("fp8", 1.5, 0.0186, gradient_error=0.04)], baseline=CHAOS)
    assert found.verdict == "adopt"
    assert found.chosen is not None
    caveat = found.chosen.caveat
    assert caveat is not None
    assert caveat.code == "judged_by_gradient"
    assert (caveat.data["loss"].code, caveat.data["loss"].data["floor"]) == ("noise_beyond_budget", 0.02)
    assert (caveat.data["error"], caveat.data["limit"]) == (0.04, 0.1)
    assert caveat.data["ratio"] > 0
    assert str(caveat) in found.reason
    assert "within 0.250%" not in found.reason
    unknown = choose([SCRIPT, candidate("fp8", 1.5, 0.0186)], baseline=CHAOS)
    assert unknown.verdict == "stay"
    assert unknown.rejected["fp8"].code == "gradient_unknown"


def test_gaps_far_above_those_of_benign_changes_are_rejected_where_the_budget_says_nothing() -> None:
    far = candidate("far", 1.5, 0.4, gradient_error=0.04)
    assert choose([SCRIPT, far], baseline=CHAOS).rejected["far"].code == "beyond_rounding"


def test_a_loss_that_is_surely_higher_is_rejected_where_the_budget_says_nothing() -> None:
    gaps = (0.05, 0.06, 0.055, 0.05)
    worse = candidate("worse", 1.5, gaps=gaps, excess=gaps, gradient_error=0.04)
    assert choose([SCRIPT, worse], baseline=CHAOS).rejected["worse"].code == "worse_loss"
    either = candidate("either", 1.5, gaps=gaps, excess=(0.05, -0.06, 0.055, -0.05), gradient_error=0.04)
    assert choose([SCRIPT, either], baseline=CHAOS).verdict == "adopt"


def test_a_loss_that_is_the_scripts_own_is_not_higher_for_benign_ones_that_fell() -> None:
    luck = Baseline(0.0175, (0.02616, 0.00887), (-0.00987, -0.00887))
    same = candidate("bf16", 2.0, gaps=(0.04688, 0.00143), excess=(0.00141, 0.00001), gradient_error=0.006)
    assert choose([SCRIPT, same], baseline=luck).verdict == "adopt"


def test_where_training_is_chaotic_the_interval_is_as_wide_as_benign_gaps_make_it() -> None:
    close = candidate("bf16", 2.0, gaps=(0.041, 0.0405), gradient_error=0.006)
    found = choose([SCRIPT, close], baseline=Baseline(0.04, (0.065, 0.016)))
    assert found.verdict == "adopt"
    assert found.interval > 0.05


def test_what_keeps_the_budget_in_spite_of_the_noise_needs_no_excuse() -> None:
    close = candidate("close", 1.5, 0.0004, gradient_error=0.01)
    found = choose([SCRIPT, close], baseline=CHAOS)
    assert found.chosen is not None
    assert found.chosen.caveat is None


def test_a_window_in_which_nothing_is_learnt_proves_nothing() -> None:
    flat = Baseline(0.0, learnt=False)
    still = candidate("still", 1.5, 0.0, gradient_error=0.01)
    found = choose([SCRIPT, still], baseline=flat)
    assert found.verdict == "adopt"
    assert found.reasons[0].data["caveat"].data["loss"] == Reason("loss_flat")
    fp4 = candidate("fp4", 2.5, 0.0, gradient_error=0.3)
    assert choose([SCRIPT, fp4], baseline=flat, max_gradient=gradient_limit(4.0)).verdict == "stay"
    assert choose([SCRIPT, fp4], max_gradient=gradient_limit(4.0)).verdict == "adopt"  # a loss that learns is a witness


def test_the_gradient_error_limit_guards_the_long_run() -> None:
    bad = candidate("bad", 1.5, gradient_error=0.2)
    found = choose([SCRIPT, bad, candidate("good", 1.2, gradient_error=0.05)], max_gradient=gradient_limit(1.0))
    assert found.index == 2
    assert found.rejected["bad"].code == "gradient_error"
    assert gradient_limit(0.5) == pytest.approx(0.06)
    assert gradient_limit(None) is None
    assert gradient_limit(math.nan) is None
    assert gradient_limit(4.0) == pytest.approx(0.48)
    assert gradient_limit(4.0, uninformative=True) == gradient_limit(None, uninformative=True) == 0.1
    assert gradient_limit(0.5, uninformative=True) == pytest.approx(0.06)


def test_memory_limit_and_objectives() -> None:
    big, small = candidate("big", 1.5, memory_bytes=90.0), candidate("small", 1.4, memory_bytes=40.0)
    assert choose([SCRIPT, big, small], max_memory=50.0).index == 2
    assert choose([SCRIPT, big, small], reference_memory=100.0).index == 1
    assert choose([SCRIPT, big, small], objective="memory", reference_memory=100.0).index == 2
    assert choose([SCRIPT, big, small], objective="balanced", reference_memory=100.0).index == 2


def test_among_ties_the_safest_wins() -> None:
    fast = candidate("fast", 1.505, gradient_error=0.09)
    safe = candidate("safe", 1.500, gradient_error=0.02)
    found = choose([SCRIPT, fast, safe], timing_noise=0.01)
    assert found.index == 2
    assert found.reasons[0].data["tied"] == 2
    assert choose([SCRIPT, fast, safe], timing_noise=0.0).index == 1


def test_wide_intervals_are_not_a_reason_to_give_speed_away_for_safety() -> None:
    """Two duels of few rounds: 1.53x [1.44, 1.60] was adopted for its smaller error beside 1.63x [1.55, 1.69]."""
    safe = candidate("safe", 1.53, gradient_error=0.001, low=1.44, high=1.60)
    fast = candidate("fast", 1.63, gradient_error=0.01, low=1.55, high=1.69)
    near = candidate("near", 1.60, gradient_error=0.005, low=1.50, high=1.66)
    assert choose([SCRIPT, safe, fast], max_gradient=0.1).index == 2
    assert choose([SCRIPT, safe, fast, near], max_gradient=0.1).index == 3


def test_what_cannot_be_told_apart_in_speed_is_a_tie_and_what_can_is_none() -> None:
    preset = candidate("preset", 1.50, preset=True, gradient_error=0.09)
    safer = candidate("safer", 1.49, gradient_error=0.01)
    assert choose([SCRIPT, preset, safer], timing_noise=0.02).index == 2
    timed = [replace(one, low=one.speedup - width, high=one.speedup + width) for one, width in ((preset, 0.004),)]
    for width, index in ((0.004, 1), (0.02, 2)):
        other = replace(safer, low=1.49 - width, high=1.49 + width)
        assert choose([SCRIPT, *timed, other], timing_noise=0.10).index == index, "beyond the timing noise of trials"


def test_a_duel_whose_interval_holds_one_is_a_stay_and_what_is_surely_faster_is_adopted() -> None:
    near = candidate("near", 1.02, gradient_error=0.01)
    stay = choose([SCRIPT, replace(near, low=0.99, high=1.05)], timing_noise=0.02)
    assert (stay.verdict, stay.reasons[0].code, stay.rests_on) == ("stay", "no_gain", (1,))
    assert (stay.reasons[0].data["low"], stay.reasons[0].data["high"]) == (0.99, 1.05)
    adopt = choose([SCRIPT, replace(near, low=1.01, high=1.03)], timing_noise=0.10)
    assert (adopt.verdict, adopt.reasons[0].data["low"]) == ("adopt", 1.01)


def test_the_models_bounds_are_told_and_are_not_taken_for_a_duel() -> None:
    """A rehearsal's 1.27x stood beside an estimate of 1.17 to 1.39, which no verdict compares as if it were timed."""
    one = candidate("modelled", 1.27, gradient_error=0.01)
    gain = {"speedup": Metric(1.27, MODELLED, 1.17, 1.39), "speedup_over_16bit": Metric(1.1, MODELLED, 1.05, 1.2)}
    run = Run(0, "search", "modelled", {}, {}, "ok", metrics=gain)
    one = replace(one, low=1.17, high=1.39, modelled=True, run=run)
    found = choose([SCRIPT, one, replace(one, name="near", speedup=1.268, gradient_error=0.001)], timing_noise=0.0)
    assert (found.verdict, found.index) == ("adopt", 1), "as wide as they are, the bounds tie nothing"
    data = found.reasons[0].data
    assert (data["low"], data["high"], data["over_16bit"]) == (1.17, 1.39, [1.05, 1.2])
    no_gain = choose([SCRIPT, replace(one, speedup=1.0, low=0.9, high=1.1)], timing_noise=0.005)
    assert (no_gain.verdict, no_gain.reasons[0].code) == ("stay", "no_gain")
    assert str(no_gain.reasons[0]).endswith("changes nothing that counts: +0.00% modelled")


def test_a_gain_that_one_of_its_runs_did_not_have_is_not_adopted_before_it_is_timed() -> None:
    """A policy with seeds of 1.73x and 0.85x was adopted as 1.29x, "timing noise, taken as 10 %"."""
    one = Standing("a", 1.29, (0.0001, 0.0002), gradient_error=0.01, upper=0.0004, slowest=0.85)
    found = choose([SCRIPT, one], timing_noise=0.1)
    assert (found.verdict, found.reasons[0].code, found.rests_on) == ("stay", "no_gain", (1,))
    assert "0.85x" in str(found.reasons[0])
    assert choose([SCRIPT, replace(one, low=1.2, high=1.4)], timing_noise=0.1).verdict == "adopt"
    assert choose([SCRIPT, replace(one, slowest=1.15)], timing_noise=0.1).verdict == "adopt"


def test_no_bound_is_told_that_a_seed_of_its_own_lies_beyond() -> None:
    """Two seeds of 0.53 and 0.29 % were said to be up to 0.410 % at 95 % confidence."""
    rules, seeds = Rules(), (0.0053, 0.0029)
    data = rules.judge(Standing("a", 1.5, seeds, upper=0.0041)).rejection
    assert data is not None
    assert data.data.items() >= {"least": 0.0029, "most": 0.0053, "seeds": 2}.items()
    found = choose([SCRIPT, Standing("a", 1.5, (0.0005, 0.0021), gradient_error=0.01, upper=0.0014)])
    assert found.verdict == "adopt"
    assert found.interval == pytest.approx(0.0021 - 0.0013)


def test_a_gain_within_the_noise_is_no_reason_to_change() -> None:
    found = choose([SCRIPT, candidate("a", 1.008)], timing_noise=0.01)
    assert (found.verdict, found.index) == ("stay", 0)
    assert str(found.reasons[0]).endswith("gains +0.8%, which is within the timing noise of 1.0%")
    assert choose([SCRIPT, candidate("a", 0.9)], timing_noise=0.01).verdict == "stay"


def test_among_equals_a_preset_wins() -> None:
    preset, other = candidate("preset", 1.49, preset=True), candidate("other", 1.50)
    assert choose([SCRIPT, other, preset], timing_noise=0.01).index == 2
    assert choose([SCRIPT, other, preset], timing_noise=0.0).index == 1


def test_a_failed_seed_is_never_accepted() -> None:
    found = choose([SCRIPT, candidate("a", 2.0, gaps=(0.001, math.inf, 0.001, 0.001))])
    assert found.verdict == "stay"
    assert found.rejected["a"] == Reason("incomplete")


def test_nothing_at_all() -> None:
    assert choose([]).verdict == "stay"
    assert choose([SCRIPT]).index == 0


def test_figures_that_are_told_apart_are_shown_apart() -> None:
    near = candidate("near", 1.5, gradient_error=0.1111)
    found = choose([SCRIPT, near], max_gradient=0.1108, gradient_noise=0.1108 / 0.12)
    assert "0.1203 is beyond 0.12 of its noise" in str(found.rejected["near"])


def test_what_is_slower_is_not_said_to_gain() -> None:
    slower = choose([SCRIPT, candidate("a", 0.994)], timing_noise=0.0)
    assert str(slower.reasons[0]).endswith("is not better than the script as written: 0.99x")
    equal = choose([SCRIPT, candidate("a", 1.0002)], timing_noise=0.0)
    assert str(equal.reasons[0]).endswith("changes nothing that counts: +0.02% modelled")


def test_the_gain_over_sixteen_bit_comes_first() -> None:
    found = choose([SCRIPT, candidate("a", 9.0)], sixteen_bit=7.5)
    assert "1.20x over 16-bit (9.00x over the script as written)" in found.reason


FASTER_RULES = Rules(0.0025, Baseline(1e-6))
BLIND = Rules(0.0025, Baseline(1e-6, learnt=False))
CHOSEN = Standing("head in bf16", 1.28, (0.0001,) * 4, gradient_error=0.005)


def reasons(*others: Standing, rules: Rules = FASTER_RULES, fewest: int = 2, noise: float = 0.0) -> dict[str, Reason]:
    tried = [rules.judge(one) for one in (CHOSEN, *others)]
    return faster_ones(CHOSEN, tried, rules, {}, fewest=fewest, timing_noise=noise)


def test_a_faster_policy_beyond_a_limit_is_named_with_the_limit() -> None:
    fast = Standing("fp8", 1.5, (0.005, 0.006), gradient_error=0.01)
    found = reasons(fast, Standing("slow", 1.1, (0.0001,)))
    assert list(found) == ["fp8"]
    assert found["fp8"].code == "divergence"


def test_a_faster_policy_of_one_seed_says_so_and_what_the_noise_is() -> None:
    """All bf16 was 1.31x in the table below "the fastest acceptable policy: 1.28x", without a word."""
    other = Standing("all bf16", 1.31, (0.00015,), gradient_error=0.007)
    found = reasons(other, rules=BLIND, fewest=4, noise=0.05)
    few = Reason("few_seeds", {"seeds": 1, "needed": 4})
    assert found["all bf16"] == Reason("tied", {"noise": 0.05, "also": few})


def test_of_those_that_are_tied_the_noise_is_told() -> None:
    found = reasons(Standing("a", 1.30, (0.0001, 0.0001), gradient_error=0.01), noise=0.05)
    assert found == {"a": Reason("tied", {"noise": 0.05, "also": None})}


def test_of_two_that_were_timed_the_noise_of_trials_is_not_what_ties_them() -> None:
    chosen, other = (replace(one, low=1.25, high=1.31) for one in (CHOSEN, replace(CHOSEN, name="a", speedup=1.30)))
    found = faster_ones(chosen, [chosen, other], FASTER_RULES, {}, fewest=2, timing_noise=0.066)
    assert "noise" not in str(found["a"])
    assert "timed beside the script it is not surely faster" in str(found["a"])


def test_nothing_is_told_where_nothing_is_faster() -> None:
    assert reasons(Standing("a", 1.28, (0.0001,))) == {}


@pytest.mark.parametrize(
    ("divergences", "rejected"),
    [
        ((0.0, 0.00136), False),  # the bound of these two is 34 %
        ((0.00001, 0.002), False),
        ((0.0012, 0.0013), False),
        ((0.0024, 0.0025), False),
        ((0.0035, 0.0036), True),
        ((0.0001, 0.006), True),
    ],
)
def test_a_loss_that_is_flat_speaks_against_a_policy_only_by_what_was_measured(
    divergences: tuple[float, ...], rejected: bool
) -> None:
    """Where its loss proves nothing, "up to 34 % at 95 % confidence" is not a reason to reject one."""
    one = Standing("all bf16", 1.5, divergences, gradient_error=0.01)
    found = BLIND.judge(one)
    assert (found.rejection is not None, found.by_loss) == (rejected, rejected)
    assert (found.caveat is None) == rejected
    steeper = BLIND.judge(replace(one, gradient_error=0.2))
    assert steeper.rejection is not None, "its gradient error judges it"
    assert FASTER_RULES.judge(Standing("a", 1.5, (0.0, 0.00136), gradient_error=0.01)).rejection is not None


def test_reasons_name_the_metric_that_policies_were_compared_by() -> None:
    rules = Rules(0.005, Baseline(0.0001, (0.0001,), metric="eval_loss"))
    found = choose_by([candidate("a", 1.5), candidate("b", 2.0, gap=0.1)], rules)
    assert "eval_loss changed by 0.100% within 0.500%" in found.reason
    assert str(found.rejected["b"]).startswith("eval_loss changed by 10.000%")
    chaotic = Rules(0.0025, Baseline(0.02, (0.02, 0.02, 0.02, 0.02), metric="f1"))
    for one in (candidate("c", 2.0, gap=1.0), candidate("d", 2.0, gap=0.03, excess=(0.03,) * 8)):
        why = chaotic.judge(replace(one, divergences=one.divergences * 8, gradient_error=0.01)).rejection
        assert "f1" in str(why)
        assert "loss" not in str(why)


def test_of_policies_that_are_tied_the_one_whose_sides_are_closest_is_taken() -> None:
    near = replace(candidate("near", 1.5, excess=(-0.9,)), gradient_error=0.02)
    far = replace(candidate("far", 1.5, excess=(0.1,)), gradient_error=0.01)
    rules = Rules(0.5, Baseline(0.0001, (0.0001,), metric="rollout_kl"))
    by_loss = Rules(0.5, Baseline(0.0001, (0.0001,)))
    assert choose_by([near, far], rules).chosen.name == "near"  # type: ignore[union-attr]
    assert choose_by([near, far], by_loss).chosen.name == "far"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("metric", "excess", "speedup", "verdict"),
    [
        ("rollout_kl", (-0.98, -0.97), 1.0, "adopt"),
        ("rollout_kl", (-0.98, 0.2), 1.0, "stay"),
        ("rollout_kl", (-0.98, -0.97), 0.8, "stay"),
        ("eval_loss", (-0.98, -0.97), 1.0, "stay"),
    ],
)
def test_sides_that_come_together_at_the_scripts_speed_are_a_gain(
    metric: str, excess: tuple[float, ...], speedup: float, verdict: str
) -> None:
    one = candidate("fp16 autocast", speedup, gaps=(0.0, 0.0), excess=excess, gradient_error=0.01)
    found = choose_by([SCRIPT, one], Rules(0.5, Baseline(0.0001, (0.0001,), metric=metric)))
    assert found.verdict == verdict
    if verdict == "adopt":
        assert "rollout_kl fell by 97.5%" in found.reason


def both_sides(rounded: float, *, gap: float, error: float | None) -> tuple[Standing, Rules]:
    """Return a policy whose two sides compute alike, and rules under which a benign change moves the loss as told."""
    loss = Rules(0.0025, Baseline(rounded, (rounded,) * 4))
    rules = Rules(0.5, Baseline(0.0001, (0.0001,), metric="rollout_kl"), loss=loss)
    one = candidate("all int8, both", 2.0, gap=0.0, excess=(-0.99,) * 4, gradient_error=error)
    return replace(one, loss=candidate("all int8, both", 2.0, gap, gradient_error=error)), rules


@pytest.mark.parametrize(
    ("rounded", "gap", "error", "why"),
    [
        (1e-6, 0.001, None, None),
        (1e-6, 0.03, 0.01, "divergence"),
        (0.02, 0.03, 0.01, None),
        (0.02, 0.03, 0.3, "gradient_error"),
        (0.02, 0.03, None, "gradient_unknown"),
        (0.02, 0.5, 0.01, "beyond_rounding"),
    ],
)
def test_two_sides_that_are_wrong_alike_are_refused_by_what_they_do_to_training(
    rounded: float, gap: float, error: float | None, why: str | None
) -> None:
    one, rules = both_sides(rounded, gap=gap, error=error)
    found = choose_by([SCRIPT, one], rules)
    assert [reason.code for reason in found.rejected.values()] == ([why] if why else [])
    assert rules.breaks(one) is (why is not None)
    assert found.verdict == ("stay" if why else "adopt")
    chosen = found.chosen
    assert why or (chosen is not None and (chosen.caveat is not None) is (rounded > 0.0025))


def test_the_losses_of_a_policy_count_beside_the_mismatch_of_its_sides_alone() -> None:
    figures = metrics_of({"speedup": 2.0, "divergence": 0.0, "memory_bytes": 1.0, "step_time_ms": 1.0})
    run = Run(
        0, "preset", "both", {}, {}, "ok", metrics=figures, losses=(4.0, 3.0), reference_losses=(4.0, 2.0),
        metric="rollout_kl", values=(1e-6, 1e-6), reference_values=(1e-4, 1e-4),
    )  # fmt: skip
    found = Standing.of("both", [run, replace(run, status="crashed")], 0.01)
    assert found.divergences == (0.0, math.inf)
    assert found.loss is not None
    assert (found.loss.divergences, found.loss.excess) == ((0.5, math.inf), (0.5,))
    assert found.loss.gradient_error == 0.01
    assert Standing.of("own", [replace(run, metric="eval_loss")], 0.01).loss is None
