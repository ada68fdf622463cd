"""CPU time that one trial costs beside its training: sampler, models, solver, and Optuna's bookkeeping.

python benchmarks/search/overhead.py             # 200 groups x 6 choices, 120 trials: mean and peak by twenties
python benchmarks/search/overhead.py 125 300     # 501 groups, 300 trials
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import optuna

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.policy.space import load_space
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.prior import Prior
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.study.run import Run, metrics_of
from tests.simulated import simulated_graph


def main(blocks: int, trials: int) -> None:
    """Run a study with a made-up additive objective and single-trial noise, and print what asking and telling cost."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem = Problem.build(simulated_graph(blocks, width=4096, tokens=16384), load_space("hopper-fp8"))
    rng = np.random.default_rng(0)
    level = {"keep": 0.0, "bf16": 1e-6}
    error2 = problem.table(lambda _g, c: level.get(c, 1e-3) * rng.lognormal())
    time_ms = problem.table(lambda _g, c: rng.uniform(0.5, 1.5) * {"keep": 1.6, "bf16": 1.0}.get(c, 0.65))
    sampler = PrecisionSampler(problem, Prior(time_ms, error2, 10.0), Goals())
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    rows, spent, runs = np.arange(len(problem.groups)), [], list[Run]()
    for _ in range(trials):
        began = time.process_time()
        trial = study.ask(problem.distributions())
        index = problem.indices(trial.params)
        gap = 0.04 * float(np.sqrt(error2[rows, index].sum())) * rng.lognormal(0, 0.3)
        step = 10.0 + float(time_ms[rows, index].sum())
        trial.set_user_attr("metrics", {"step_time_ms": step, "divergence": gap})
        study.tell(trial, [step, gap])
        runs.append(
            Run(0, "search", "", trial.params, {}, "ok", metrics=metrics_of({"divergence": gap, "step_time_ms": step}))
        )
        sampler.learn(runs, None)
        spent.append(1e3 * (time.process_time() - began))
    print(f"{len(problem.groups)} groups x {len(problem.choice_names)} choices, {len(problem.parameters)} parameters")
    for start in range(0, trials, 20):
        part = spent[start : start + 20]
        print(
            f"trials {start:3d} to {start + len(part) - 1:3d}: mean {np.mean(part):4.0f} ms, peak {max(part):4.0f} ms"
        )
    print(f"all: mean {np.mean(spent):.0f} ms, peak {max(spent):.0f} ms of CPU")


if __name__ == "__main__":
    main(*(int(value) for value in (sys.argv[1:] or ("50", "120"))))
