"""How long a search will take: what it runs, how often, and what one run takes.

A run is a start of the script, compilation and a few steps; on a GPU the steps are the least of it. The schedule is
told before the trials begin, when the reference has shown what a run takes, and by ``search --dry-run``. It is an upper
bound in trials (a search ends when nothing left is worth one) and an estimate in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.tuning.options import SearchOptions

__all__ = ["Pace", "Schedule", "schedule"]

#: Passes of a scan of gradient errors that has no time budget (``phases.sensitivity``).
USUAL_PASSES = 60
#: Policies that usually need further paired seeds before one of them is adopted; the reference runs beside them.
CONTENDERS = 2
#: The first run of the reference is repeated for the noise floor, and once more with its weights rounded.
REFERENCE_RUNS = 3
#: CPU time to compile a block whose layers quantise, over that of its bf16 form (2026-11-22_gpu_ready.md).
QUANTISED_COMPILE = 3.2
#: A step of a rehearsal under emulated recipes, over a step as written (2026-11-22_numerics_trial.md).
EMULATED_STEP = 2.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What one run takes, seconds: until the first step, to compile, and one step."""

    start_s: float
    step_s: float
    compile_s: float = 0.0

    def run_s(self, steps: int) -> float:
        """Return the seconds of a whole run."""
        return self.start_s + self.compile_s + steps * self.step_s

    def of_trials(self, *, measured: bool) -> Pace:
        """Return the pace of runs under a quantised policy, where this is that of the script as written."""
        if measured:
            return Pace(self.start_s, self.step_s, self.compile_s * QUANTISED_COMPILE)
        return Pace(self.start_s, self.step_s * EMULATED_STEP, self.compile_s)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Expected seconds of a search by phase; ``trials`` and ``runs`` (those under further paired seeds) are counts."""

    trials: int
    runs: int
    reference_s: float
    scan_s: float
    trials_s: float
    finalists_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of all phases."""
        return self.reference_s + self.scan_s + self.trials_s + self.finalists_s

    @property
    def rest_s(self) -> float:
        """Return the seconds of what follows the reference."""
        return self.total_s - self.reference_s

    def describe(self, budget_s: float | None = None) -> str:
        """Return one line for a person, told when the reference has been measured."""
        parts = (
            f"gradient errors {_time(self.scan_s)}, {self.trials} trials {_time(self.trials_s)}, "
            f"{self.runs} runs under further paired seeds {_time(self.finalists_s)}"
        )
        text = f"expected from here on: at most about {_time(self.rest_s)} ({parts})"
        if budget_s is not None and self.total_s > budget_s:
            text += f"; --budget ends it after {_time(budget_s)} in all"
        return text


def schedule(
    options: SearchOptions,
    reference: Pace,
    trial: Pace,
    *,
    setup_s: float,
    passes: int = USUAL_PASSES,
    workers: int = 1,
    final_workers: int = 1,
) -> Schedule:
    """Return what a search is expected to take.

    Args:
        options: what was asked.
        reference, trial: what one run takes as written, and under a policy.
        setup_s: until the script of a paired seed is at its first step, when it is started anew.
        passes: forward and backward passes for gradient errors.
        workers, final_workers: trials, and runs under further paired seeds, at once.
    """
    steps = options.steps + options.warmup
    runs = (CONTENDERS + 1) * (options.seeds - 1)
    return Schedule(
        trials=options.trials,
        runs=runs,
        reference_s=setup_s + REFERENCE_RUNS * reference.run_s(steps),
        scan_s=reference.start_s + passes * trial.step_s,
        trials_s=options.trials * trial.run_s(steps) / workers,
        finalists_s=(options.seeds - 1) * setup_s + runs * trial.run_s(steps) / final_workers,
    )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
