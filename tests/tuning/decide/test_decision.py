from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from autoprec.tuning.decide.decision import Candidate, Decision, Rules, faster_ones, gradient_limit, told_faster
from autoprec.tuning.decide.decision import choose as choose_by
from autoprec.tuning.decide.noise import Baseline

SCRIPT = Candidate("script as written", 1.0, (0.0,), 0.0, 100.0, reference=True)


def choose(candidates: list[Candidate], **asked: Any) -> Decision:
    rules = {name: asked.pop(name) for name in tuple(asked) if name in Rules.__slots__}
    return choose_by(candidates, Rules(**rules), **asked)


def candidate(name: str, speedup: float, gap: float = 0.001, **fields: object) -> Candidate:
    gaps = fields.pop("gaps", (gap, gap * 1.05, gap * 0.95, gap))
    return Candidate(name, speedup, gaps, **fields)  # type: ignore[arg-type]


def test_the_fastest_acceptable_policy_is_adopted() -> None:
    found = choose([SCRIPT, candidate("a", 1.3), candidate("b", 1.5), candidate("c", 1.9, 0.01)])
    assert (found.verdict, found.index) == ("adopt", 2)
    assert "b is the fastest acceptable policy" in found.reason
    assert "beyond 0.250%" in found.rejected["c"]


def test_it_is_the_upper_bound_that_counts_not_the_mean() -> None:
    scattered = candidate("scattered", 1.5, gaps=(0.0005, 0.0045, 0.0005, 0.0035))
    steady = candidate("steady", 1.2, gaps=(0.0012, 0.0013, 0.0012, 0.0011))
    assert np.mean(scattered.divergences) < 0.0025
    found = choose([SCRIPT, scattered, steady])
    assert found.index == 2
    assert "95 % confidence" in found.rejected["scattered"]


CHAOS = Baseline(0.02, (0.012, 0.035, 0.018, 0.015), (0.004, -0.02, 0.01, -0.005))


def test_uniform_bf16_is_acceptable_where_training_is_chaotic_and_fp4_is_not() -> None:
    bf16 = candidate("all bf16", 1.5, gaps=(0.05, 0.01, 0.03, 0.02), gradient_error=0.006)
    fp4 = candidate("all nvfp4", 2.5, gaps=(0.06, 0.02, 0.03, 0.03), gradient_error=0.28)
    found = choose([SCRIPT, bf16, fp4], baseline=CHAOS, max_gradient=gradient_limit(4.0))
    assert found.index == 1
    assert "gradient error 28 % is beyond 10 % of the gradient" in found.rejected["all nvfp4"]


def test_beyond_the_budget_nothing_is_adopted_without_a_word() -> None:
    """The floor is above the budget: before, everything below the floor was "within the noise floor"."""
    found = choose([SCRIPT, candidate("fp8", 1.5, 0.0186, gradient_error=0.04)], baseline=CHAOS)
    assert found.verdict == "adopt"
    assert "the loss cannot judge it" in found.caveat
    assert "2.000%, beyond the budget of 0.250%" in found.caveat
    assert "its gradient error of 4 % is within 10 %" in found.caveat
    assert "times those of such benign changes" in found.caveat
    assert found.caveat in found.reason
    assert "within 0.250%" not in found.reason
    unknown = choose([SCRIPT, candidate("fp8", 1.5, 0.0186)], baseline=CHAOS)
    assert unknown.verdict == "stay"
    assert "gradient error is unknown" in unknown.rejected["fp8"]


def test_gaps_far_above_those_of_benign_changes_are_rejected_where_the_budget_says_nothing() -> None:
    far = candidate("far", 1.5, 0.4, gradient_error=0.04)
    assert "times that of rounding the weights once" in choose([SCRIPT, far], baseline=CHAOS).rejected["far"]


def test_a_loss_that_is_surely_higher_is_rejected_where_the_budget_says_nothing() -> None:
    gaps = (0.05, 0.06, 0.055, 0.05)
    worse = candidate("worse", 1.5, gaps=gaps, excess=gaps, gradient_error=0.04)
    assert "higher than under benign changes" in choose([SCRIPT, worse], baseline=CHAOS).rejected["worse"]
    either = candidate("either", 1.5, gaps=gaps, excess=(0.05, -0.06, 0.055, -0.05), gradient_error=0.04)
    assert choose([SCRIPT, either], baseline=CHAOS).verdict == "adopt"


def test_what_keeps_the_budget_in_spite_of_the_noise_needs_no_excuse() -> None:
    close = candidate("close", 1.5, 0.0004, gradient_error=0.01)
    found = choose([SCRIPT, close], baseline=CHAOS)
    assert (found.verdict, found.caveat) == ("adopt", "")


def test_a_window_in_which_nothing_is_learnt_proves_nothing() -> None:
    flat = Baseline(0.0, learnt=False)
    still = candidate("still", 1.5, 0.0, gradient_error=0.01)
    found = choose([SCRIPT, still], baseline=flat)
    assert found.verdict == "adopt"
    assert "the loss proves nothing" in found.reason
    fp4 = candidate("fp4", 2.5, 0.0, gradient_error=0.3)
    assert choose([SCRIPT, fp4], baseline=flat, max_gradient=gradient_limit(4.0)).verdict == "stay"
    assert choose([SCRIPT, fp4], max_gradient=gradient_limit(4.0)).verdict == "adopt"  # a loss that learns is a witness


def test_the_gradient_error_limit_guards_the_long_run() -> None:
    bad = candidate("bad", 1.5, gradient_error=0.2)
    found = choose([SCRIPT, bad, candidate("good", 1.2, gradient_error=0.05)], max_gradient=gradient_limit(1.0))
    assert found.index == 2
    assert "gradient error" in found.rejected["bad"]
    assert gradient_limit(0.5) == pytest.approx(0.06)
    assert gradient_limit(None) is None
    assert gradient_limit(math.nan) is None
    assert gradient_limit(4.0) == pytest.approx(0.48)
    assert gradient_limit(4.0, blind=True) == gradient_limit(None, blind=True) == 0.1
    assert gradient_limit(0.5, blind=True) == pytest.approx(0.06)


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
    assert "of 2 within the timing noise" in found.reason
    assert choose([SCRIPT, fast, safe], timing_noise=0.0).index == 1


def test_never_slower_than_the_best_preset() -> None:
    preset = candidate("preset", 1.50, preset=True, gradient_error=0.09)
    safer = candidate("safer", 1.49, gradient_error=0.01)
    faster = candidate("faster", 1.502, gradient_error=0.05)
    assert choose([SCRIPT, preset, safer], timing_noise=0.02).index == 1
    assert choose([SCRIPT, preset, safer, faster], timing_noise=0.02).index == 3


def test_a_gain_within_the_noise_is_no_reason_to_change() -> None:
    found = choose([SCRIPT, candidate("a", 1.008)], timing_noise=0.01)
    assert (found.verdict, found.index) == ("stay", 0)
    assert "within the timing noise" in found.reason
    assert choose([SCRIPT, candidate("a", 0.9)], timing_noise=0.01).verdict == "stay"


def test_a_gain_that_more_runs_may_show_is_named() -> None:
    assert choose([SCRIPT, candidate("a", 1.04)], timing_noise=0.06).unsure == 1
    assert choose([SCRIPT, candidate("a", 1.008)], timing_noise=0.06).unsure is None  # too little, however sure
    assert choose([SCRIPT, candidate("a", 0.9)], timing_noise=0.06).unsure is None
    assert choose([SCRIPT, candidate("a", 1.1)], timing_noise=0.06).unsure is None


def test_among_equals_a_preset_wins() -> None:
    preset, other = candidate("preset", 1.49, preset=True), candidate("other", 1.50)
    assert choose([SCRIPT, other, preset], timing_noise=0.01).index == 2
    assert choose([SCRIPT, other, preset], timing_noise=0.0).index == 1


def test_a_failed_seed_is_never_accepted() -> None:
    found = choose([SCRIPT, candidate("a", 2.0, gaps=(0.001, math.inf, 0.001, 0.001))])
    assert found.verdict == "stay"
    assert "not measured to the end" in found.rejected["a"]


def test_nothing_at_all() -> None:
    assert choose([]).verdict == "stay"
    assert choose([SCRIPT]).index == 0


def test_figures_that_are_told_apart_are_shown_apart() -> None:
    near = candidate("near", 1.5, gradient_error=0.1111)
    found = choose([SCRIPT, near], max_gradient=0.1108, gradient_noise=0.1108 / 0.12)
    assert "0.1203 is beyond 0.12 of its noise" in found.rejected["near"]


def test_what_is_slower_is_not_said_to_gain() -> None:
    slower = choose([SCRIPT, candidate("a", 0.994)], timing_noise=0.0)
    assert "is not better than the script as written: 0.99x" in slower.reason
    equal = choose([SCRIPT, candidate("a", 1.0002)], timing_noise=0.0)
    assert "+0.02% modelled" in equal.reason
    assert "noise of" not in slower.reason + equal.reason


def test_the_gain_over_sixteen_bit_comes_first() -> None:
    found = choose([SCRIPT, candidate("a", 9.0)], sixteen_bit=7.5)
    assert "1.20x over 16-bit (9.00x over the script as written)" in found.reason


FASTER_RULES = Rules(0.0025, Baseline(1e-6))
BLIND = Rules(0.0025, Baseline(1e-6, learnt=False))
CHOSEN = Candidate("head kept", 1.28, (0.0001,) * 4, gradient_error=0.005)


def reasons(*others: Candidate, rules: Rules = FASTER_RULES, fewest: int = 2, noise: float = 0.0) -> dict[str, str]:
    tried = [(c, rules.judge(c)) for c in (CHOSEN, *others)]
    return faster_ones(CHOSEN, tried, rules, {}, fewest=fewest, timing_noise=noise)


def test_a_faster_policy_beyond_a_limit_is_named_with_the_limit() -> None:
    fast = Candidate("fp8", 1.5, (0.005, 0.006), gradient_error=0.01)
    found = reasons(fast, Candidate("slow", 1.1, (0.0001,)))
    assert list(found) == ["fp8"]
    assert "is beyond 0.250%" in found["fp8"]
    told = told_faster(found, [fast], 1.25)
    assert told.startswith("; fp8 was measured as 1.20x over 16-bit, but is not taken: divergence 0.550%")


def test_a_faster_policy_of_one_seed_says_so_and_what_the_noise_is() -> None:
    """All bf16 was 1.31x in the table below "the fastest acceptable policy: 1.28x", without a word."""
    other = Candidate("all bf16", 1.31, (0.00015,), gradient_error=0.007)
    found = reasons(other, rules=BLIND, fewest=4, noise=0.05)
    assert found["all bf16"].startswith("it was measured under 1 of the 4 paired seeds that it takes")
    assert found["all bf16"].endswith("it is faster by no more than the timing noise of 5.0%")
    assert "; all bf16 was measured as 1.31x, but is not taken: it was" in told_faster(found, [other], None)


def test_of_those_that_are_tied_the_noise_is_told() -> None:
    found = reasons(Candidate("a", 1.30, (0.0001, 0.0001), gradient_error=0.01), noise=0.05)
    assert found == {"a": "it is faster by no more than the timing noise of 5.0%, and adds no smaller error"}


def test_nothing_is_told_where_nothing_is_faster() -> None:
    assert told_faster(reasons(Candidate("a", 1.28, (0.0001,))), [], None) == ""
