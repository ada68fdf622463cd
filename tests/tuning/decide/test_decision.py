from __future__ import annotations

import math

import numpy as np
import pytest

from autoprec.tuning.decide.decision import Candidate, choose, gradient_limit, noise_limit

SCRIPT = Candidate("script as written", 1.0, (0.0,), 0.0, 100.0, reference=True)


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


def test_within_the_noise_floor_nobody_can_tell() -> None:
    noisy = candidate("noisy", 1.5, 0.004)
    assert choose([SCRIPT, noisy]).verdict == "stay"
    found = choose([SCRIPT, noisy], noise_floor=0.006)
    assert found.verdict == "adopt"
    assert "noise floor" in found.reason


def test_the_gradient_error_limit_guards_the_long_run() -> None:
    bad = candidate("bad", 1.5, gradient_error=0.2)
    found = choose([SCRIPT, bad, candidate("good", 1.2, gradient_error=0.05)], max_gradient=gradient_limit(1.0))
    assert found.index == 2
    assert "gradient error" in found.rejected["bad"]
    assert gradient_limit(0.5) == pytest.approx(0.06)
    assert gradient_limit(None) is None
    assert gradient_limit(math.nan) is None


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
    assert found.tied == ("fast",)
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


def test_a_failed_seed_is_never_accepted() -> None:
    found = choose([SCRIPT, candidate("a", 2.0, gaps=(0.001, math.inf, 0.001, 0.001))])
    assert found.verdict == "stay"
    assert "not measured to the end" in found.rejected["a"]


def test_nothing_at_all() -> None:
    assert choose([]).verdict == "stay"
    assert choose([SCRIPT]).index == 0


def test_the_noise_floor_may_be_one_number_or_one_per_seed() -> None:
    assert noise_limit(0.001) == 0.001
    assert noise_limit([0.001, 0.003]) == 0.002
    assert noise_limit([math.inf]) == 0.0
