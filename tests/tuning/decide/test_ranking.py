from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.tuning.decide.decision import Rules, Standing
from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.decide.ranking import Ranking, rank
from autoprec.tuning.decide.sampler.expectation import MOST_SEEDS, Expectation, Goals
from tests.tuning.synthetic import run_of, synthetic

BUDGET = 0.0025
FOUND = synthetic(blocks=2)


def stand(gaps: dict[str, list[float]], seeds: int = 4, *, uninformative: bool = False, floor: float = 0.0) -> Ranking:
    """Stand uniform policies with these divergences, one per seed."""
    goals = Goals(BUDGET, uninformative=uninformative, reference=(60.0, 1.0))
    expectation = Expectation(FOUND.problem, FOUND.prior, goals)
    params = {name: FOUND.problem.params_of(name) for name in gaps}
    runs = [
        run_of(params[name], seed, gap, FOUND.step(params[name])[0])
        for name, row in gaps.items()
        for seed, gap in enumerate(row)
    ]
    expectation.fit(runs)
    entrants = [
        (params[name], Standing(name, 60.0 / FOUND.step(params[name])[0], tuple(row), gradient_error=0.01))
        for name, row in gaps.items()
    ]
    return rank(expectation, entrants, Rules(BUDGET, Baseline(max(floor, 1e-6))), seeds=seeds)


def test_one_seed_is_never_enough_and_two_are_far_within_the_budget() -> None:
    once = stand({"fp8_tensorwise": [0.0001]})
    assert once.accepted == ()
    assert once.next == 0
    twice = stand({"fp8_tensorwise": [0.0001, 0.00012]})
    assert twice.accepted == (0,)
    assert twice.next is None


def test_what_a_duel_shows_to_be_faster_gets_its_seed_whatever_the_models_expect() -> None:
    """Bf16 autocast was once accepted, and all bf16 left at one seed, because its modelled time was the longer one."""
    names = ("fp8_tensorwise", "bf16")
    params = {name: FOUND.problem.params_of(name) for name in names}
    expectation = Expectation(FOUND.problem, FOUND.prior, Goals(BUDGET, reference=(60.0, 1.0)))
    rows = {"fp8_tensorwise": (0.0001, 0.00012), "bf16": (0.0001,)}
    expectation.fit(
        [run_of(params[n], s, gap, FOUND.step(params[n])[0]) for n in names for s, gap in enumerate(rows[n])]
    )
    fast, slow = {"low": 1.91, "high": 1.99}, {"low": 1.73, "high": 1.85}

    def next_of(timed: dict[str, dict[str, float]]) -> int | None:
        entrants = [(params[n], Standing(n, 1.95 if n == "bf16" else 1.8, rows[n], gradient_error=0.01)) for n in names]
        entrants = [(p, replace(one, **timed.get(one.name, {}))) for p, one in entrants]
        return rank(expectation, entrants, Rules(BUDGET, Baseline(1e-6)), seeds=4).next

    assert next_of({"fp8_tensorwise": slow, "bf16": fast}) == 1
    assert next_of({"fp8_tensorwise": slow, "bf16": {"low": 1.8, "high": 2.1}}) is None  # not surely
    assert next_of({}) is None


@pytest.mark.parametrize(
    ("speedups", "first"),
    [((0.85, 1.28), 1), ((1.1, 1.2), 0), ((1.2, 1.1), 0), ((0.9, 1.0, 1.3), 2), ((1.3, 0.9, 1.31), 0), ((1.0,), 0)],
)
def test_of_about_the_same_value_the_one_that_came_out_much_faster_gets_its_seed(
    speedups: tuple[float, ...], first: int
) -> None:
    """Two trials beside a load: autocast at 0.85x had its second seed, all bf16 at 1.28x none before time was up."""
    params = FOUND.problem.params_of("bf16")
    expectation = Expectation(FOUND.problem, FOUND.prior, Goals(BUDGET, reference=(60.0, 1.0), timed=True))
    expectation.fit([run_of(params, 0, 0.0001, FOUND.step(params)[0])])
    entrants = [
        (params, Standing(f"number {i}", speedup, (0.0001,), gradient_error=0.01)) for i, speedup in enumerate(speedups)
    ]
    assert rank(expectation, entrants, Rules(BUDGET, Baseline(1e-6)), seeds=4).next == first


def test_two_seeds_at_the_noise_floor_are_far_within_the_budget_as_well() -> None:
    assert stand({"fp8_tensorwise": [0.00011, 0.00014]}, floor=0.0004).accepted == (0,)


def test_near_the_budget_more_seeds_are_given_and_far_beyond_it_none() -> None:
    near = stand({"fp8_tensorwise": [0.0016, 0.0018]})
    assert near.accepted == ()
    assert near.next == 0
    assert stand({"fp8_tensorwise": [0.0016, 0.0018, *[0.0012] * 10]}).accepted == (0,)
    assert stand({"fp8_tensorwise": [0.02, 0.03]}).next is None
    assert stand({"fp8_tensorwise": [0.0024, 0.0025] * (2 * MOST_SEEDS)}).next is None


def test_beyond_the_budget_no_seed_is_given_where_benign_gaps_are_a_third_of_it() -> None:
    hopeless = [0.0044, 0.0045, 0.0047, 0.0046, 0.0045, 0.0043]
    assert stand({"fp8_tensorwise": hopeless}, floor=BUDGET / 3).next is None


def test_a_slower_policy_gets_no_seed_once_a_faster_one_is_sure() -> None:
    both = stand({"bf16": [0.0001], "fp8_tensorwise": [0.0002, 0.0002]})
    assert both.accepted == (1,)
    assert both.next is None
    assert both.best_cost is not None


def test_where_the_loss_is_uninformative_as_many_seeds_as_asked_for_are_run() -> None:
    assert stand({"fp8_tensorwise": [0.0001] * 3}, uninformative=True).accepted == ()
    assert stand({"fp8_tensorwise": [0.0001] * 4}, uninformative=True).accepted == (0,)


def test_a_run_that_failed_under_a_seed_ends_it() -> None:
    failed = stand({"fp8_tensorwise": [0.0001, math.inf]})
    assert failed.next is None
    assert failed.accepted == ()


def test_nothing_tried_is_nothing_to_say() -> None:
    assert stand({}).next is None


def test_of_policies_that_cost_the_same_the_one_whose_sides_are_closest_gets_its_seed() -> None:
    params = {"bf16": FOUND.problem.params_of("bf16"), "fp8": FOUND.problem.params_of("fp8_tensorwise")}
    rows = {"fp8": (0.0001, 0.00012), "bf16": (0.0001,)}
    expectation = Expectation(FOUND.problem, FOUND.prior, Goals(BUDGET, reference=(60.0, 1.0)))
    step = FOUND.step(params["fp8"])[0]
    expectation.fit([run_of(params[n], s, gap, step) for n in rows for s, gap in enumerate(rows[n])])

    def next_of(metric: str, excess: float) -> int | None:
        apart = {"fp8": (-0.5, -0.5), "bf16": (excess,)}
        entrants = [(params["fp8"], Standing(n, 1.8, rows[n], gradient_error=0.01, excess=apart[n])) for n in rows]
        return rank(expectation, entrants, Rules(BUDGET, Baseline(1e-6, metric=metric)), seeds=4).next

    assert next_of("rollout_kl", -0.9) == 1
    assert next_of("rollout_kl", -0.1) is None
    assert next_of("eval_loss", -0.9) is None
