from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import TrainSpec, TrialResult
from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.phases.measuring import PairedSeeds, goals_of, leader, make_prior, scored, with_gain
from autoprec.tuning.phases.reference import reference_of
from autoprec.tuning.study.run import BY_BLOCK
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import here, options, plain_search, script, search  # noqa: F401


def test_goals_and_prior_are_those_of_the_search() -> None:
    made = plain_search().made
    setup, state = made.setup, made.state
    assert setup is not None
    assert state is not None
    assert state.table is not None
    goals = goals_of(setup, state, state.table)
    limit = state.gradient_limit()
    assert limit is not None
    assert goals.max_gradient == limit / state.table.misfit.ratio
    assert goals.reference == (state.reference.step_ms, float(state.reference.memory_bytes))
    assert not goals.uninformative
    prior = make_prior(setup, state, state.table)
    assert prior.memory is None  # neither limited nor an objective
    assert prior.time_ms.shape == state.table.error2.shape


@pytest.mark.parametrize("step_ms", [0.01, 10_000.0])
def test_a_cost_model_that_is_wrong_about_every_time_ends_no_search(here: Path, step_ms: float) -> None:  # noqa: F811
    made, result = search(script(step_ms=step_ms), options(trials=6))
    assert made.setup is not None
    assert made.state is not None
    assert made.state.table is not None
    prior = make_prior(made.setup, made.state, made.state.table)
    bf16 = made.setup.problem.params_of("bf16")
    expected = prior.base_time_ms + prior.time_ms[np.arange(len(prior.time_ms)), made.setup.problem.indices(bf16)].sum()
    modelled = made.setup.steps.of_reference().time_ms / made.setup.steps.of(bf16).time_ms
    assert step_ms / expected == pytest.approx(modelled)
    assert result.verdict == "adopt"
    assert result.best["speedup"] > 3.0


def test_a_record_says_that_its_trial_compiled_blocks() -> None:
    made = plain_search().made
    setup, state = made.setup, made.state
    assert setup is not None
    assert state is not None
    plan, reference = made.records[0], state.reference
    steps = len(reference.losses)
    for blocks in (0, 12):
        result = TrialResult(
            "ok", losses=tuple(reference.losses), step_ms=(1.0,) * steps, memory_bytes=1, blocks=blocks
        )
        record = scored(setup, state, plan, result, reference, 0.01, (0.0, 0.0))
        assert (BY_BLOCK in record.tags) is bool(blocks)


def test_a_divergence_that_a_stalled_state_raises_is_told_with_its_reason() -> None:
    made = plain_search().made
    setup, state = made.setup, made.state
    assert setup is not None
    assert state is not None
    plan, reference = replace(made.records[0], name="levelled"), state.reference
    ran = TrialResult("ok", losses=tuple(reference.losses), step_ms=(1.0,) * len(reference.losses), memory_bytes=1)
    why = "30.0% of the second moment's updates are lost: it stalls (limit 25.0%)"
    stalled = replace(ran, penalty=0.05, problems=(why,))
    record = scored(setup, state, plan, stalled, reference, 0.01, (0.0, 0.0))
    assert record["divergence"] >= 0.05
    assert any("levelled" in note and why in note for note in state.notes)


def test_memory_that_could_not_be_measured_is_modelled_and_called_so() -> None:
    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    setup, reference = replace(made.setup, measured=True), made.state.reference
    plan = next(run for run in made.records if run.params)
    result = TrialResult("ok", losses=tuple(reference.losses), step_ms=(1.0,) * len(reference.losses))
    for measured in (0, 12345):
        ran = replace(result, memory_bytes=measured)
        run = scored(setup, made.state, plan, ran, reference_of(setup, ran), 0.01, (0.0, 0.0))
        expected = measured or setup.steps.of(plan.params).memory_bytes
        assert run["memory_bytes"] == expected
        assert run.sources["memory_bytes"] == ("measured" if measured else "modelled")
        assert reference_of(setup, ran).memory_bytes == (measured or setup.steps.of_reference().memory_bytes)


def test_the_time_of_a_reference_is_the_mean_of_its_runs_as_a_trial_has_one_run() -> None:
    """The fastest of several made every policy seem slower than it is, on a CPU by 3 to 10 %."""
    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    losses = tuple(made.state.reference.losses)
    runs = [TrialResult("ok", losses=losses, step_ms=(ms,) * len(losses)) for ms in (100.0, 108.0, 96.0)]
    assert reference_of(replace(made.setup, measured=True), *runs).step_ms == pytest.approx(304.0 / 3)


def test_a_gain_is_told_over_16_bit_as_soon_as_that_is_known() -> None:
    """A trial that ran beside the 16-bit one was told as 7.13x over the script, among others over 16-bit."""
    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    late = made.state.store.learned()[-1]
    known = {name: metric for name, metric in late.metrics.items() if name != "speedup_over_16bit"}
    early = replace(late, metrics=known)
    assert with_gain(made.setup, made.state, early)["speedup_over_16bit"] > 0
    best = leader(made.setup, made.state)
    assert best is not None
    assert "speedup_over_16bit" in best.metrics


def test_further_seeds_tell_of_the_losses_beside_a_metric_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    own, runner = made.state.reference, cast(Any, None)
    known = replace(own.baseline, loss=Baseline(0.001, (0.001,)))
    monkeypatch.setattr(made.state, "own", replace(own, baseline=known))
    pairs = PairedSeeds(made.setup, runner, made.state)
    moved = replace(made.records[0], losses=(4.0, 4.4), reference_losses=(4.0, 4.0), seed=1)
    pairs.benign = {1: replace(moved, metric="rollout_kl", values=(1.0, 1.0), reference_values=(1.0, 1.0))}
    found = pairs.baseline
    assert found.loss is not None
    assert found.loss.rounding_gaps == pytest.approx((0.001, 0.1))
    assert found.rounding_gaps[-1] == 0.0


class _Runner:
    """Stands in for a PairedRunner: notes how many runs are at work at once."""

    def __init__(self, workers: int, result: TrialResult) -> None:
        self.final_workers, self.by_block, self._result = workers, SimpleNamespace(active=False), result
        self.running = self.most = 0
        self.asked: list[bool] = []

    def train_spec(self, policy: Document | None, *_: object, **__: object) -> TrainSpec:
        return TrainSpec(policy=policy)

    def measure(self, spec: TrainSpec, seed: int) -> TrialResult:
        assert seed == 1
        self.asked.append(spec.policy is None)
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.05)
        self.running -= 1
        return self._result

    def threads(self, count: int, _name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(count)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_policy_and_its_reference_are_timed_beside_each_other_only_where_that_is_allowed(at_once: int) -> None:
    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    losses = tuple(made.state.reference.losses)
    ran = TrialResult("ok", losses=losses, step_ms=(1.0,) * len(losses), memory_bytes=1)
    runner: Any = _Runner(at_once, ran)
    plan = replace(next(run for run in made.records if run.params), seed=1)
    run = PairedSeeds(made.setup, runner, made.state).measure(plan, 0.01, by_block=False)
    assert run is not None
    assert run["speedup"] == pytest.approx(1.0)
    assert sorted(runner.asked) == [False, True]
    assert runner.most == at_once


def test_a_policy_is_not_run_under_a_seed_whose_reference_fails() -> None:
    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    runner: Any = _Runner(1, TrialResult("crashed", "of its own"))
    seeds = PairedSeeds(made.setup, runner, replace(made.state, notes=[]))
    plan = replace(next(run for run in made.records if run.params), seed=1)
    assert seeds.measure(plan, 0.01, by_block=False) is None
    assert "of its own" in seeds.unusable[1]


@pytest.mark.parametrize(
    "why",
    [
        "a step takes 14 s",
        "9 of 23 steps were done",
        "the script was not at its first training step when the time budget was used up",
        "a step takes 9 s: 20 steps take more than the 40 s there are",
    ],
)
def test_a_seed_whose_reference_had_no_time_is_said_to_be_out_of_time(here: Path, why: str) -> None:  # noqa: F811
    """It was "could not be used: the reference failed", and after two of them the script was said to fail."""

    class Late(SimulatedRunner):
        def _train(self, spec: TrainSpec, *, in_duel: bool = False) -> TrialResult:
            if spec.policy is None and self.seed:
                return TrialResult("out_of_time", why)
            return super()._train(spec, in_duel=in_duel)

    simulated, asked = script(), options(trials=6, budget_s=600.0)
    command = ScriptCommand.parse(asked.command)
    made = Search(asked, command, Listeners(), lambda seed, _folder: Late(simulated, seed))
    result = made.run()
    assert made.state is not None
    told = " ".join([*made.state.notes, result.reason, result.stopped, result.cut_short])
    assert "the time budget ended paired seed 1 of " in result.cut_short
    assert f": its reference: {why}" in result.cut_short
    assert "could not be used" not in told
    assert "fail" not in told
    assert not [run for run in made.records if run.status == "out_of_time"], "nothing is held against the policy"
