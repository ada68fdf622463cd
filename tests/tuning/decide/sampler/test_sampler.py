from __future__ import annotations

import time
import warnings
from dataclasses import replace

import numpy as np
import optuna
import pytest

from autoprec.policy.space import load_space
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.other_samplers import make_sampler
from autoprec.tuning.decide.sampler.prior import Prior
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.decide.solver import solve
from tests.tuning.models import even_space, gpt, linear, report
from tests.tuning.synthetic import Synthetic, drive, synthetic

BUDGET = 0.0025


def study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)


def best(log: list[tuple[float, float]]) -> float:
    return min((step for step, gap in log if gap <= BUDGET), default=np.inf)


def optimum(found: Synthetic) -> float:
    index = solve(found.prior.time_ms, found.error2, (BUDGET / 0.04) ** 2)
    assert index is not None
    return found.base_ms + float(found.prior.time_ms[np.arange(len(index)), index].sum())


def test_it_comes_near_the_optimum() -> None:
    regrets = []
    for seed in range(2):
        found = synthetic(seed=seed, misfit=0.3)
        ours = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET, seed=seed))
        regrets.append(best(drive(found, ours, 50)) / optimum(found) - 1)
    assert np.mean(regrets) < 0.035  # 0.026 measured, 0.017 over four seeds


def test_it_beats_the_solver_on_one_pass_scores_and_optunas_own_when_the_scores_are_poor() -> None:
    ours, solver, tpe = [], [], []
    for seed in range(2):
        found = synthetic(seed=seed, misfit=0.6)
        sampler = PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET, seed=seed)
        ours.append(best(drive(found, study(sampler), 50)))
        solver.append(best(drive(found, study(make_sampler("ilp", found.problem, found.prior, seed=seed)), 50)))
        tpe.append(best(drive(found, study(make_sampler("tpe", found.problem, found.prior, seed=seed)), 50)))
    assert np.mean(ours) < np.mean(solver)
    assert np.mean(ours) < np.mean(tpe)


def test_nothing_is_proposed_twice() -> None:
    found = synthetic()
    at = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET))
    for _, params in presets(found.problem):
        at.enqueue_trial(params)
    drive(found, at, 60)
    keys = [found.problem.key(t.params) for t in at.trials]
    assert len(set(keys)) == len(keys)


def test_a_trial_is_determined_by_seed_number_and_history() -> None:
    found = synthetic(blocks=2)
    runs = []
    for _ in range(2):
        at = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET, seed=7))
        drive(found, at, 12)
        runs.append([t.params for t in at.trials])
    assert runs[0] == runs[1]
    other = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET, seed=8))
    drive(found, other, 12)
    assert [t.params for t in other.trials] != runs[0]


def test_a_resumed_study_goes_on_as_if_nothing_had_happened() -> None:
    found = synthetic(blocks=2)
    whole = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET, seed=7))
    drive(found, whole, 12)
    resumed = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET, seed=7))
    for trial in whole.trials[:8]:
        resumed.add_trial(trial)
    drive(found, resumed, 1)
    # the model of residuals has its own short memory: what counts is that nothing known is asked again
    assert found.problem.key(resumed.trials[-1].params) not in {found.problem.key(t.params) for t in whole.trials[:8]}


def test_parallel_asks_differ() -> None:
    found = synthetic()
    at = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET))
    drive(found, at, 10)
    asked = [at.ask(found.problem.distributions()) for _ in range(6)]
    keys = {found.problem.key(t.params) for t in asked}
    assert len(keys) == 6


def test_the_gradient_error_limit_is_never_broken() -> None:
    found = synthetic()
    limit = 0.03
    sampler = PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET, max_gradient=limit)
    at = study(sampler)
    drive(found, at, 30)
    for trial in at.trials:
        index = found.problem.indices(trial.params)
        assert found.prior.error2[np.arange(len(index)), index].sum() <= limit**2 * (1 + 1e-9)


def test_the_memory_limit_is_never_broken() -> None:
    found = synthetic()
    rng = np.random.default_rng(0)
    memory = np.where(found.problem.allowed, rng.uniform(1, 2, found.problem.allowed.shape), np.inf)
    limit = float(memory.min(axis=1).sum() * 1.2)
    prior = replace(found.prior, memory=memory)
    at = study(PrecisionSampler(found.problem, prior, max_divergence=BUDGET, max_memory=limit))
    drive(found, at, 20)
    for trial in at.trials:
        index = found.problem.indices(trial.params)
        assert memory[np.arange(len(index)), index].sum() <= limit * (1 + 1e-9)


def test_a_space_that_is_used_up_says_so() -> None:
    problem = Problem.build(report([linear("a", 64, 64, 64), linear("b", 64, 64, 64)]), load_space("tiny"))
    prior = Prior(
        problem.table(lambda _g, c: 1.0 if c == "keep" else 0.6), problem.table(lambda _g, c: 1e-6 * (c != "keep"))
    )
    sampler = PrecisionSampler(problem, prior)
    found = Synthetic(problem, prior, prior.error2)
    drive(found, study(sampler), 4)
    assert not sampler.exhausted
    drive(found, sampler_study := study(sampler), 5)
    assert sampler.exhausted
    assert len({problem.key(t.params) for t in sampler_study.trials}) == 4


def test_parameters_are_searched_too() -> None:
    problem = Problem.build(gpt(), load_space("te-delayed"))
    prior = Prior(
        problem.table(lambda _g, c: 1.0 if c == "bf16" else 0.6),
        problem.table(lambda _g, c: 1e-8 if c == "bf16" else 1e-4),
    )
    at = study(PrecisionSampler(problem, prior, max_divergence=BUDGET))
    drive(Synthetic(problem, prior, prior.error2), at, 24)
    for name, values in problem.parameters.items():
        assert len({t.params[name] for t in at.trials}) == len(values)


def test_failed_pruned_and_diverged_trials_are_learned_from_or_ignored() -> None:
    found = synthetic(blocks=2)
    at = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET))
    for status in ("diverged", "oom", "pruned"):
        trial = at.ask(found.problem.distributions())
        trial.set_user_attr("status", status)
        trial.set_user_attr("metrics", {"divergence": 0.5} if status == "pruned" else {})
        state = optuna.trial.TrialState.PRUNED if status == "pruned" else optuna.trial.TrialState.FAIL
        at.tell(trial, state=state)
    log = drive(found, at, 20)
    assert best(log) < np.inf


def test_an_enqueued_point_is_not_proposed_again() -> None:
    found = synthetic(blocks=2)
    at = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET))
    queued = found.problem.params_of("fp8_rowwise")
    trial = at.ask(found.problem.distributions())
    at.enqueue_trial(queued)
    asked = [trial, *(at.ask(found.problem.distributions()) for _ in range(5))]
    assert [found.problem.key(t.params) for t in asked].count(found.problem.key(queued)) == 1


def test_the_cost_of_a_trial_at_200_groups() -> None:
    found = synthetic(blocks=50)
    at = study(PrecisionSampler(found.problem, found.prior, max_divergence=BUDGET))
    drive(found, at, 25)
    began = time.process_time()
    drive(found, at, 5)
    assert (time.process_time() - began) / 5 < 0.5  # 50-60 ms on the machine it was written on; goal 100


@pytest.mark.parametrize("space", ["cpu-bf16", "msamp-levels", "blackwell-nvfp4"])
def test_it_works_on_other_spaces(space: str) -> None:
    problem = Problem.build(gpt(2), load_space(space))
    prior = Prior(
        problem.table(lambda _g, c: 1.0 if c in ("keep", "bf16") else 0.6),
        problem.table(lambda _g, c: 0.0 if c == "keep" else 1e-6),
    )
    at = study(PrecisionSampler(problem, prior, max_divergence=BUDGET))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drive(Synthetic(problem, prior, prior.error2), at, 15)
    assert len({problem.key(t.params) for t in at.trials}) == 15


def test_the_memory_objective_finds_small_points() -> None:
    problem = Problem.build(gpt(2), even_space("msamp-levels"))
    prior = Prior(
        problem.table(lambda _g, c: 1.0 if c == "bf16" else 0.6),
        problem.table(lambda _g, c: 1e-8 if c == "bf16" else 1e-7),
    )
    found = Synthetic(problem, prior, prior.error2)
    small = {"optimizer.exp_avg": {"fp32": 4.0, "bf16": 2.0, "e4m3": 1.0}, "optimizer.weights": {"fp16_scaled": 2.0}}

    def held(params: dict[str, object]) -> float:
        return 100.0 + sum(table.get(str(params[name]), 4.0) for name, table in small.items())

    smallest = {}
    for objective in ("throughput", "memory"):
        at = study(PrecisionSampler(problem, prior, max_divergence=BUDGET, objective=objective))
        sizes = []
        for _ in range(24):
            trial = at.ask(problem.distributions())
            step, gap = found.step(trial.params)
            metrics = {"step_time_ms": step, "divergence": gap, "memory_bytes": held(trial.params)}
            trial.set_user_attr("metrics", metrics)
            at.tell(trial, [step, gap])
            sizes.append(metrics["memory_bytes"])
        smallest[objective] = sum(size == 103.0 for size in sizes[8:])
    assert smallest["memory"] >= 5
    assert smallest["memory"] > smallest["throughput"]
