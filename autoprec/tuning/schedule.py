"""How long a search will take: what it runs, how often, and what one run takes.

A run is a start of the script, compilation and a few steps; on a GPU the steps are the least of it. Two schedules are
told before the trials begin, when the reference has shown what a run takes: what a search usually does, which ends when
nothing left is worth a run, and what it does where that never happens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoprec.support.units import counted
from autoprec.trial.protocol import NOISE_BATCHES
from autoprec.tuning.options import SearchOptions

#: Passes of a scan of gradient errors that has no time budget (``phases.sensitivity``).
USUAL_PASSES = 60
#: A pass of a scan over a step: it runs as eager code, where that is safe in a process that was just forked, whose
#: memory is mapped anew (a compiled GPT of 11 M parameters on two cores: 0.95 s of CPU time over 0.7 s).
_PASS = 1.4
#: Seconds to write the policy and the reports, and to record the answer in MLflow, on an idle machine (3 on two cores).
CLOSING_S = 4.0
#: Policies that usually need further paired seeds before one of them is adopted; the reference runs beside them. At
#: most as many acceptable ones are compiled as a whole.
CONTENDERS = 2
#: Trials and further seeds after which searches ended by themselves, 1 to 5 and 1 or 2 (2026-11-23_search_cost.md), and
#: trials of those that time steps, 7 to 14 (2026-11-28_by_hand.md): they try what their tables may be wrong about.
USUAL_TRIALS, USUAL_SEEDS, TIMED_TRIALS = 4, 2, 10
#: Duels that a search usually has, each of them one start of the script: two of what was tried, one of what decides.
DUELS = 3
#: The first run of the reference is repeated for the noise floor, and once more with its weights rounded.
REFERENCE_RUNS = 3
#: CPU time to compile a block whose layers quantise, over that of its bf16 form: row-wise FP8, each block more of one
#: graph (``each_cpu_s`` of 2026-11-23_gpu_ready.md: 5.5 under torch 2.11, 3.1 under 2.13).
QUANTISED_COMPILE = 5.5
#: CPU time to compile what torch's cache on disk holds already, over that of the first time (``cached_cpu_s`` over
#: ``again_cpu_s`` of 2026-11-23_gpu_ready.md). Dynamo traces it again, and the rest is read.
CACHED_COMPILE = 0.2
#: Fewer blocks are not worth compiling by themselves.
FEWEST_BLOCKS = 4
#: A step of a rehearsal under emulated recipes, over a step as written (2026-11-22_numerics_trial.md).
EMULATED_STEP = 2.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one run: until its first step, to compile the whole model with nothing cached, and for each step.

    ``blocks`` share what a run compiles (``TrainSpec.by_block``); 1 where runs compile as the script does. ``cached``
    is the share of those seconds where torch's cache holds what is compiled.
    """

    start_s: float
    step_s: float
    compile_s: float = 0.0
    blocks: int = 1
    cached: float = CACHED_COMPILE

    def run_s(self, steps: int) -> float:
        """Return the seconds of a run that compiles the whole model with nothing cached."""
        return self.start_s + self.compile_s + steps * self.step_s

    def trial_s(self, steps: int, *, cached: bool = False) -> float:
        """Return the seconds of a run that compiles one of the blocks, or finds it in torch's cache."""
        share = self.cached if cached else 1.0
        return self.start_s + share * self.compile_s / self.blocks + steps * self.step_s

    def of_trials(self, *, measured: bool) -> Pace:
        """Return the pace of runs under a quantised policy, where this is that of the script as written."""
        if measured:
            return replace(self, compile_s=self.compile_s * QUANTISED_COMPILE)
        return replace(self, step_s=self.step_s * EMULATED_STEP)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds of a search by phase.

    ``trials``, ``runs`` (those under ``seeds`` further paired seeds) and ``whole`` (those that compile the whole model,
    where the others compile one block) are counts; ``closing_s`` is for the answer: policy, reports, MLflow.
    """

    trials: int
    runs: int
    whole: int
    reference_s: float
    scan_s: float
    trials_s: float
    finalists_s: float
    whole_s: float
    seeds: int = 1
    duels_s: float = 0.0
    closing_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole search."""
        return self.reference_s + self.rest_s

    @property
    def least_s(self) -> float:
        """Return the seconds of what is run whatever the budget says: one trial, and one further seed of it."""
        return self.trials_s / max(1, self.trials) + self.finalists_s / max(1, self.seeds) + self.closing_s

    @property
    def rest_s(self) -> float:
        """Seconds of what follows the reference."""
        return self.scan_s + self.trials_s + self.finalists_s + self.whole_s + self.duels_s + self.closing_s


def describe(usual: Schedule, most: Schedule, budget_s: float | None = None, elapsed_s: float = 0.0) -> str:
    """Return one line for a person, told when the reference has been measured.

    Args:
        usual, most: what a search usually does, and what it does if it never converges.
        budget_s: the time budget, None without one.
        elapsed_s: seconds since the search began.
    """
    parts = (
        f"gradient errors {_time(usual.scan_s)}, {counted(usual.trials, 'trial')} {_time(usual.trials_s)}, "
        f"{counted(usual.runs, 'run')} under further paired seeds {_time(usual.finalists_s)}"
    )
    if usual.whole:
        parts += f", compiling the whole model {_time(usual.whole_s)}"
    if usual.duels_s:
        parts += f", duels {_time(usual.duels_s)}"
    if usual.closing_s:
        parts += f", the answer {_time(usual.closing_s)}"
    text = f"expected from here on: about {_time(usual.rest_s)} ({parts})"
    if _time(most.rest_s) != _time(usual.rest_s):
        runs = f"{counted(most.trials, 'trial')}, {counted(most.runs, 'run')}"
        text += f", about {_time(most.rest_s)} if nothing converges ({runs}; more where a decision takes further seeds)"
    least_s = elapsed_s + usual.least_s
    if budget_s is not None and least_s > budget_s:
        text += f"; --budget is too short: one trial and one further seed end it after about {_time(least_s)} in all"
    elif budget_s is not None and elapsed_s + most.rest_s > budget_s:
        sure = "ends it" if elapsed_s + usual.rest_s > budget_s else "would end it"
        exactly = f"{budget_s:.0f} s" if budget_s % 60 else _time(budget_s)
        text += f"; --budget {sure} after {exactly} in all"
    elif budget_s is not None:
        text += f"; --budget is enough for that ({_time(budget_s)} in all)"
    return text


def scan_warmup(steps: int) -> int:
    """Return the steps before the scan: late enough to leave the initialisation, early enough to be cheap."""
    return min(10, max(2, steps // 2))


def schedule(
    options: SearchOptions,
    reference: Pace,
    trial: Pace,
    *,
    setup_s: float,
    host_s: float | None = None,
    passes: int = USUAL_PASSES,
    probes_at_once: int = 1,
    workers: int = 1,
    final_workers: int = 1,
    turns: bool = False,
    threads: int = 1,
    usual: bool = False,
    duels_s: float = 0.0,
    closing_s: float = 0.0,
) -> Schedule:
    """Return how long a search takes if it never converges, or usually; the decision may take more seeds.

    Args:
        options: what was asked.
        reference, trial: what one run takes as written, and under a policy.
        setup_s: seconds until the script is at its first step, when it is started anew.
        host_s: the same for each further paired seed, where its script is started from a copy; None: ``setup_s``.
        passes: forward and backward passes for gradient errors.
        probes_at_once: how many of them at once.
        workers, final_workers: trials, and runs under further paired seeds, at once.
        turns: their steps are not at once, only the rest of them.
        threads: of a timed run; a probe has one, and takes as many times as long, as many probes share the cores.
        duels_s: seconds of duels themselves, without their starts; 0 where steps are not timed.
        closing_s: seconds for the policy, the reports and MLflow.
        usual: count what searches by our sampler usually run before nothing left is worth a run.
    """
    steps, trials, seeds = options.steps + options.warmup, options.trials, options.seeds
    if usual and options.sampler == "knapsack":
        trials, seeds = usual_trials(options, timed=bool(duels_s)), min(seeds, USUAL_SEEDS)
    by_block = bool(reference.compile_s) and reference.blocks > 1
    again = reference.trial_s(steps, cached=True)
    # the script is run as it is, and, where the others compile one block, once more with nothing of that cached
    first = reference.run_s(steps) + (reference.trial_s(steps) if by_block else 0.0)
    # what a policy's first trial compiled its runs under further seeds find in torch's cache
    further = (seeds - 1) * (again + CONTENDERS * trial.trial_s(steps, cached=True))
    whole = (1 if usual else CONTENDERS) if by_block else 0
    stepping_s = steps * trial.step_s if turns else 0.0
    return Schedule(
        trials=trials,
        runs=(CONTENDERS + 1) * (seeds - 1),
        whole=whole,
        reference_s=setup_s + first + (REFERENCE_RUNS - 1) * again,
        scan_s=reference.start_s
        + (scan_warmup(options.steps) + NOISE_BATCHES) * reference.step_s * threads
        + _PASS * passes * trial.step_s * threads / probes_at_once,
        trials_s=trials * (stepping_s + (trial.trial_s(steps) - stepping_s) / workers),
        finalists_s=(seeds - 1) * (setup_s if host_s is None else host_s) + further / (1 if turns else final_workers),
        whole_s=whole * trial.run_s(steps),
        seeds=max(1, seeds - 1),
        duels_s=duels_s and duels_s + DUELS * reference.start_s,
        closing_s=closing_s,
    )


def usual_trials(options: SearchOptions, *, timed: bool) -> int:
    """Return after how many trials a search usually ends; ``timed``: it measures times, and has duels."""
    usual = TIMED_TRIALS if timed else USUAL_TRIALS
    return min(options.trials, usual) if options.sampler == "knapsack" else options.trials


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
