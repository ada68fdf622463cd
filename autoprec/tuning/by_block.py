"""A search of a script that compiles its model compiles repeated blocks, and the whole model only for what is adopted.

A quantised model of N blocks compiles for minutes, N times as long as one block, to run for two seconds. Where that
pays all runs of a search therefore compile the blocks (``TrialSpec.by_block``), under every paired seed: what compiles
otherwise rounds otherwise, and a policy and its reference may differ in precision alone. What lies around the blocks
then runs as eager code in all of them alike, and their times are multiplied by what that costs the script as written.
What a search is about to adopt is run once more as the script compiles it, beside the script's own first run, and what
is told of it comes from there (:mod:`autoprec.tuning.phases.finalists`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from autoprec.trial.protocol import OUT_OF_TIME, TRY_S, TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.decide.metrics import Reference, divergence, step_time
from autoprec.tuning.schedule import CACHED_COMPILE, FEWEST_BLOCKS, QUANTISED_COMPILE
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import BY_BLOCK, Run

#: Fewer seconds to compile the script as written are not worth a further run of the reference. More are, on any device:
#: policies that quantise compile several times as long, and an earlier run of the script may have left what it compiles
#: in torch's cache, but not what policies do.
_LEAST_COMPILE_S = 2.0


def is_whole(record: Run) -> bool:
    """Say whether a run compiled what the script, or its policy, compiles: the whole model, if anything."""
    return BY_BLOCK not in record.tags


def whole_seconds(setup: Setup, state: SearchState) -> float:
    """Return what a run takes that compiles the whole model; 0 where runs compile as the script does."""
    if state.whole is None:
        return 0.0
    factor = 1.0 if setup.target.is_cpu else QUANTISED_COMPILE  # a CPU has no choice below 16 bits
    return state.seconds_per_run() + factor * (state.seconds.compile_s or 0.0)


class ByBlock:
    """Decides whether runs compile blocks, and converts the times of those that do.

    Args:
        allowed: whether runs may compile blocks at all.

    Attributes:
        active: whether runs compile blocks instead of the whole model.
    """

    def __init__(self, setup: Setup, state: SearchState, *, allowed: bool = True) -> None:
        self._setup, self._state, self._allowed = setup, state, allowed
        self._speed, self._memory_bytes = 1.0, 0  # the whole model's step over that of blocks, and bytes more
        self.active = False

    def instead(self, spec: TrialSpec, result: TrialResult, seed: int) -> TrainSpec | None:
        """Return what is run after a trial that failed by block under the script's own seed: the same as a whole.

        Args:
            spec: what the trial was asked.
            result: what it answered.
            seed: the paired seed.
        """
        if not self._is_by_block(spec) or result.status not in ("oom", "crashed") or spec.policy is None or seed:
            return None
        return replace(spec, by_block=False)

    def read(self, spec: TrialSpec, result: TrialResult) -> TrialResult:
        """Return a result with the times and the memory that the whole model would have had."""
        return self._scaled(result) if self._is_by_block(spec) and result.blocks else result

    def _is_by_block(self, spec: TrialSpec) -> TypeGuard[TrainSpec]:
        return self.active and isinstance(spec, TrainSpec) and spec.by_block

    def pays(self, whole: TrialResult) -> bool:
        """Say whether running the reference by block pays.

        What the script's first step compiled, the reference finds in torch's cache, and what policies compile is not
        there: how long that takes is the longer of the two. Whoever has just trained may have left both in the cache.

        Args:
            whole: the reference's run as the script compiles it.
        """
        step_s = step_time(whole.step_ms, whole.warmup) / 1e3
        seconds, own_s = self._state.seconds, max(0.0, whole.training_s - len(whole.step_ms) * step_s)
        compile_s = max(own_s, (seconds.first_step_s or 0.0) - max(step_s, TRY_S))
        seconds.compile_s, seconds.step_s = compile_s, step_s
        seconds.cached_compile_s = min(own_s, CACHED_COMPILE * compile_s)
        few = self._setup.host.blocks < FEWEST_BLOCKS
        return self._allowed and not few and compile_s >= _LEAST_COMPILE_S

    def begin(self, blocks: TrialResult) -> bool:
        """Compile blocks from here on, if the reference could be run so; else say why all runs compile as the script.

        Args:
            blocks: the reference's run by block.
        """
        self.active = blocks.ok and blocks.blocks > 0
        if not self.active:
            self._state.note(
                f"compiling takes {self._state.seconds.compile_s or 0.0:.0f} s, and every run compiles the whole "
                f"model, as the script does: {_why_whole(blocks)}"
            )
        return self.active

    def calibrate(self, whole: Reference, blocks: Reference, count: int) -> None:
        """Read times and memory as those of the whole model from here on, and say so.

        Args:
            whole, blocks: the reference as the script compiles it, and by block.
            count: blocks that share what is compiled for one.
        """
        self._speed, self._memory_bytes = whole.step_ms / blocks.step_ms, whole.memory_bytes - blocks.memory_bytes
        gap = divergence(blocks.losses, whole.losses)
        times = f"; their times are multiplied by {self._speed:.3f}, as for the script as written"
        self._state.note(
            f"the script compiles its model for {self._state.seconds.compile_s or 0.0:.0f} s: runs compile one of its "
            f"{count} blocks instead, the reference's, too (losses {gap:.3%} from those of the whole model)"
            f"{times if self._setup.measured else ''}; what would be adopted is run as the script compiles it"
        )

    def _scaled(self, result: TrialResult) -> TrialResult:
        return replace(
            result,
            step_ms=tuple(time * self._speed for time in result.step_ms),
            memory_bytes=max(1, result.memory_bytes + self._memory_bytes) if result.memory_bytes else 0,
        )


def _why_whole(blocks: TrialResult) -> str:
    """Return why runs do not compile one block: the time, what failed, or how the model is built."""
    if blocks.status == OUT_OF_TIME:
        return f"there was not enough time left to try one of its blocks instead ({blocks.reason})"
    if not blocks.ok:
        return f"one of its blocks instead was tried, and failed ({blocks.reason or blocks.status})"
    return (
        "none of what the script compiles holds a ModuleList, ModuleDict or Sequential with several blocks of one "
        "class, and only such blocks are compiled by themselves"
    )
