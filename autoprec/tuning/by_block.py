"""Short trials of a script that compiles its model compile repeated blocks, and are read as if they had not.

A quantised model of N blocks compiles for minutes, N times as long as one block, to run for two seconds. Trials
therefore compile the blocks (``TrialSpec.by_block``). What lies around them then runs as eager code, in every trial
alike: so the script as written is run once that way, too, and times are multiplied by what that cost it. Runs under
further paired seeds compile the model as the script does, and what is told of a policy that is adopted is theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoprec.trial.protocol import TrialResult, TrialSpec
from autoprec.tuning.decide.metrics import step_time
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.schedule import repeated_blocks
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.records import BY_BLOCK

__all__ = ["ByBlock", "compile_seconds"]

#: Fewer blocks, or fewer seconds to compile the script as written, are not worth a further run of the reference.
_FEWEST_BLOCKS, _LEAST_COMPILE_S = 4, 10.0
_Run = Callable[[TrialSpec, int], TrialResult]


@dataclass(frozen=True, slots=True)
class _Change:
    """What compiling blocks costs the script as written: its whole model's step over that, and bytes."""

    speed: float
    memory_bytes: int


def compile_seconds(setup: Setup, ledger: Ledger) -> float:
    """Return how long the script compiles, by its longest run so far; 0 where it does not, or steps are not timed."""
    if not (setup.host.compiled and setup.measured and ledger.references):
        return 0.0
    steps = setup.options.steps + setup.options.warmup
    return max(0.0, ledger.timings.get("longest_training_s", 0.0) - steps * ledger.reference.step_ms / 1e3)


class ByBlock:
    """Runs trials by block where that pays.

    Args:
        setup, ledger: of the search.
        run: runs one trial under a paired seed.
    """

    def __init__(self, setup: Setup, ledger: Ledger, run: _Run) -> None:
        self._setup, self._ledger, self._run = setup, ledger, run
        self._lock, self._asked = threading.Lock(), False
        self._change: _Change | None = None

    def run(self, spec: TrialSpec, seed: int) -> TrialResult:
        """Run a trial that may compile blocks; one that fails that way runs once more as the script compiles it."""
        if not (self._setup.host.compiled and self._setup.measured):
            return self._run(spec, seed)  # the policy's own compilation, or times that are modelled
        with self._lock:
            if not self._asked:
                self._asked, self._change = True, self._measured(spec)
        if self._change is None:
            return self._run(replace(spec, by_block=False), seed)
        result = self._run(spec, seed)
        if result.status in ("oom", "crashed"):
            return self._run(replace(spec, by_block=False), seed)
        return self._scaled(result, self._change)

    def _measured(self, spec: TrialSpec) -> _Change | None:
        """Run the reference by block, where that is worth a run; None where trials compile as the script does."""
        blocks, seconds = repeated_blocks(self._setup.host.layers), compile_seconds(self._setup, self._ledger)
        if blocks < _FEWEST_BLOCKS or seconds < _LEAST_COMPILE_S:
            return None
        plain = replace(spec, policy=self._setup.reference_policy(), stop_gap=None, memory_limit=None)
        result = self._run(plain, 0)
        if not result.ok or not result.payload.get(BY_BLOCK):
            return None
        whole = self._ledger.reference
        change = _Change(
            whole.step_ms / step_time(result.step_ms, result.warmup), whole.memory_bytes - result.memory_bytes
        )
        self._ledger.note(
            f"the script compiles its model for {seconds:.0f} s: trials compile one of its {result.payload[BY_BLOCK]} "
            f"blocks instead; their times are multiplied by {change.speed:.3f}, as for the script as written, and runs "
            "under further paired seeds compile the whole model"
        )
        return change

    @staticmethod
    def _scaled(result: TrialResult, change: _Change) -> TrialResult:
        return replace(
            result,
            step_ms=tuple(time * change.speed for time in result.step_ms),
            memory_bytes=max(1, result.memory_bytes + change.memory_bytes) if result.memory_bytes else 0,
        )
