from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import TrialResult, TrialSpec
from autoprec.tuning.decide.decision import Candidate
from autoprec.tuning.decide.noise import student95
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.limits import Limits
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.phases.finalists import LEAST_NOISE, MOST_NOISE, Race, timing_noise
from autoprec.tuning.study.records import BY_BLOCK, TrialRecord
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import here, options, script, search  # noqa: F401


def test_timing_noise_is_what_two_speedups_differ_by_chance_within_bounds() -> None:
    assert timing_noise(False, [[1.0, 2.0]]) == 0.0
    assert timing_noise(True, [[1.0]]) == MOST_NOISE  # one seed says nothing about the spread
    assert timing_noise(True, [[1.5, 1.5, 1.5]]) == LEAST_NOISE
    spread = 0.01 * math.sqrt(2)  # of two runs 2 % apart; two degrees of freedom over two policies
    assert timing_noise(True, [[0.99, 1.01]] * 2) == pytest.approx(student95(2) * spread)
    assert timing_noise(True, [[0.99, 1.01], [1.0, 1.0]]) == pytest.approx(student95(2) * spread / math.sqrt(2))


@given(st.integers(2, 4), st.integers(1, 5), st.floats(0.002, 0.01), st.integers(0, 10**6))
def test_equal_policies_are_told_apart_in_one_of_twenty_pairs(seeds: int, pairs: int, spread: float, at: int) -> None:
    """A false difference in a direction named beforehand: 5 %, and less where the least noise of 1 % hides it."""
    draw = np.random.default_rng(at)
    rows = 1 + spread * draw.standard_normal((400, pairs + 1, seeds))
    found = sum(row[0].mean() / row[1].mean() - 1 > timing_noise(True, row.tolist()) for row in rows)
    assert found <= 400 * 0.05 + 4 * math.sqrt(400 * 0.05 * 0.95)


def test_seeds_are_given_only_to_who_may_still_change_the_answer(here: Path) -> None:  # noqa: F811
    made, result = search(script(), options(trials=14))
    assert result.verdict == "adopt"
    further = [record for record in made.records if record.kind == "finalist"]
    assert {record.seed for record in further} == {1}  # everything is far within the budget: two seeds are enough
    assert result.best["seeds"] == 2
    assert len(further) < len(made.ledger.store.learned()) if made.ledger else False


class Unsteady(SimulatedRunner):
    """Every policy is 4 % faster than the script, and up to 1.5 % faster or slower than that under each seed."""

    def _train(self, spec: TrialSpec) -> TrialResult:
        result = super()._train(spec)
        share = 0.96 + (-1) ** self.seed * 0.015 if spec.policy is not None else 1.0
        return replace(result, step_ms=(100.0 * share,) * len(result.step_ms))


@pytest.mark.parametrize(("seeds", "verdict"), [(2, "stay"), (8, "adopt")])
def test_further_seeds_are_run_where_the_timing_noise_alone_is_in_the_way(
    here: Path,  # noqa: F811
    seeds: int,
    verdict: str,
) -> None:
    simulated, asked = script(), options(trials=4, seeds=seeds)
    command = ScriptCommand.parse(asked.command)
    result = Search(asked, command, Listeners(), lambda seed, _folder: Unsteady(simulated, seed)).run()
    assert result.verdict == verdict
    if verdict == "adopt":
        assert 2 < result.best["seeds"] <= seeds
    else:
        assert "which is within the timing noise" in result.reason


class Slower(SimulatedRunner):
    """Every policy is within every limit and takes longer than the script."""

    def _train(self, spec: TrialSpec) -> TrialResult:
        result = super()._train(spec)
        return replace(result, step_ms=(100.0 if spec.policy is None else 125.0,) * len(result.step_ms))


def test_policies_that_gain_nothing_are_not_said_to_exceed_a_limit(here: Path) -> None:  # noqa: F811
    simulated, asked = script(), options(trials=4, seeds=2)
    command = ScriptCommand.parse(asked.command)
    result = Search(asked, command, Listeners(), lambda seed, _folder: Slower(simulated, seed)).run()
    assert result.verdict == "stay"
    assert "policies is better than the script as written: the best is" in result.reason
    assert "(0.80x, " in result.reason


def test_gaps_beyond_the_budget_are_held_against_all_only_beside_benign_ones_of_the_same_seeds(
    here: Path,  # noqa: F811
) -> None:
    """A GAN: calm under the first seed, chaotic under the others; every policy would be rejected."""
    chaotic = script(error_scale=0.25, noise=lambda seed, _spec: 1.0 if seed else 0.0)
    _, result = search(chaotic, options(trials=4, seeds=2))
    assert result.verdict == "adopt"
    assert "the loss cannot judge it" in result.reason
    benign = [seed for seed, spec in chaotic.calls if spec.perturb]
    assert benign.count(0) == benign.count(1) == 1


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([(1.4, True, True)], 1.4),
        ([(1.4, True, True), (1.2, False, True)], 1.2),
        ([(1.4, True, True), (1.2, False, True), (1.3, False, True)], 1.25),
        ([(1.4, True, True), (0.1, False, False)], 1.4),
    ],
    ids=["by block alone", "as the script compiles it", "median of those", "that one failed"],
)
def test_the_speed_of_a_policy_is_that_of_runs_which_compile_the_whole_model_where_there_are_any(
    runs: list[tuple[float, bool, bool]], told: float
) -> None:
    race: Any = object.__new__(Race)
    race._error = lambda _record: 0.01
    rows = [
        TrialRecord(
            3 + seed,
            "finalist" if seed else "search",
            "fp8",
            {},
            {},
            "ok" if ok else "diverged",
            metrics={"speedup": speedup, "step_time_ms": 80 / speedup, "divergence": 1e-4, "memory_bytes": 1},
            tags=(BY_BLOCK,) if by_block else (),
            losses=(2.0, 1.0),
            reference_losses=(2.0, 1.0),
            seed=seed,
        )
        for seed, (speedup, by_block, ok) in enumerate(runs)
    ]
    race._rows = {3: rows}
    found = race._candidate(rows[0])
    assert found.speedup == pytest.approx(told)
    assert len(found.divergences) == len(runs)  # losses are held against a policy however it was compiled
    assert (math.inf in found.divergences) is (not runs[-1][2])


def test_a_policy_beyond_the_limit_is_offered_an_end_in_bf16_at_the_speed_of_the_whole_run() -> None:
    asked = SearchOptions(command=("train.py",), run_steps=20_000)
    assert asked.run_limit == pytest.approx(0.12 / math.sqrt(0.85))
    assert SearchOptions(command=("train.py",)).run_limit == 0.12
    race: Any = object.__new__(Race)
    race._setup = SimpleNamespace(options=asked, limits=Limits(0.0025, asked.run_limit))
    race._ledger = SimpleNamespace(gradient_limit=lambda: asked.run_limit, store=SimpleNamespace(records=[]))
    policy = {"recipes": {"fp8": {"format": "fp8"}}, "default": "fp8"}
    known = Candidate("fp8", 2.0, (0.0,), gradient_error=0.119, tag=SimpleNamespace(policy=policy))
    beyond = replace(known, gradient_error=0.125)
    assert race._over_the_run(known) is known
    assert race._over_the_run(beyond).speedup == pytest.approx(1 / (0.85 / 2 + 0.15))
    race._setup.options = replace(asked, phases="last-bf16")  # all of them end so
    assert race._over_the_run(beyond) is beyond
