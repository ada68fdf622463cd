"""Runs trials that can be compared: the same weights, data order and random streams as the reference of their seed.

A paired seed is one initial state and data order. A trial under it differs from the reference in precision alone, so
that the gap between their loss curves is the policy's doing, and far smaller gaps can be seen than between two seeds.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autoprec.policy import compiles
from autoprec.precision.hardware import cores, free_bytes
from autoprec.support.plain import Document
from autoprec.trial.losses import LOWER, MISMATCH
from autoprec.trial.protocol import (
    OUT_OF_TIME,
    DuelRounds,
    DuelSpec,
    GradientErrors,
    Probe,
    ScanSpec,
    TrainSpec,
    TrialResult,
    TrialSpec,
)
from autoprec.tuning.by_block import ByBlock
from autoprec.tuning.decide.metrics import divergence, signed_gap
from autoprec.tuning.decide.noise import Baseline, has_learnt, needs_more_benign_runs
from autoprec.tuning.decide.problem import VARIANT, Params
from autoprec.tuning.libraries.choice import row_of, run_by
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState, Work
from autoprec.tuning.study.kept import KeptAnswers
from autoprec.tuning.workers.local import HostPool

#: Trials that are repeated because a GPU was throttled or shared; more would only double the search.
MOST_REPEATED = 5
#: A rehearsal runs this many emulated trials side by side at most: each holds a copy of the model.
MOST_SIDE_BY_SIDE = 8

#: Trials that compile at once; more would be asked for before the first of them could teach the sampler anything.
MOST_COMPILING = 4
#: What a compiler needs beside the model (Inductor on a CPU took about 0.7 GB).
COMPILER_BYTES = 1 << 30
#: Of a parameter in FP32, its gradient and two moments.
_TRAINED_BYTES = 16
#: Forks beside a host, all that are at work at once, need less than this share of the memory that is free.
OF_FREE_MEMORY = 0.5

#: A search with a time budget ends after so much of it at the latest, whatever it is doing; the answer not counted.
OVERRUN = 1.2
#: What is said of a run whose script had not started by then.
NOT_STARTED = "the script was not at its first training step when the time budget was used up"
#: Own seconds without a step: before anything is known, at least, and in runs of the reference.
BEFORE_REFERENCE_S, LEAST_TIMEOUT_S, SLOWEST = 900.0, 60.0, 20.0
#: The same where something compiles: at least, and in starts of the script, which compiles its model in them.
COMPILING_S, STARTS = 300.0, 5.0
#: Other programs that keep more than this share of the cores busy disturb a timed step's caches and clocks.
BUSY = 0.5


def other_work(own: int) -> str:
    """Return that other programs keep this machine's cores busy, and how much; empty where they do not.

    Args:
        own: processes of the search itself that compute.
    """
    count = os.cpu_count() or 1
    load = os.getloadavg()[0] - own
    return f"this machine is busy with other work (load {load:.1f} on {count} cores)" if load > BUSY * count else ""


class PairedRunner:
    """Runs the trials of one search, or of one verification.

    Args:
        may_compile_blocks: off, all runs compile what the script and its policy compile.
        others: hosts of the script under other variants than the reference's, by their names.
        kept: what an earlier session of the search was answered; None where there is none.

    Attributes:
        by_block: whether runs compile blocks.
        work: what all trials took so far.
    """

    def __init__(
        self,
        setup: Setup,
        pool: HostPool,
        state: SearchState,
        *,
        may_compile_blocks: bool = True,
        others: Mapping[str, HostPool] = MappingProxyType({}),
        kept: KeptAnswers | None = None,
    ) -> None:
        self._setup, self._pool, self._state, self._others = setup, pool, state, others
        self._kept, self._kept_s = kept, 0.0
        self._repeated = 0
        self.by_block = ByBlock(setup, state, allowed=may_compile_blocks)
        self.work, self._counting = Work(), threading.Lock()

    @property
    def workers(self) -> int:
        """Trials that may run at once: one per device when they are timed, unless more are asked for."""
        return trials_at_once(self._setup, self._pool.slots())

    @property
    def on_one_gpu(self) -> bool:
        """Whether trials are timed on the one GPU there is, and so one at a time, whatever ``--workers`` says."""
        return _on_one_gpu(self._setup, self._pool.slots())

    @property
    def final_workers(self) -> int:
        """Finalists that may run at once."""
        return finalists_at_once(self._setup, self._pool.slots())

    def train_spec(self, policy: Document | None, params: Params = MappingProxyType({}), **changes: Any) -> TrainSpec:
        """Return the spec of a training trial; ``params`` say under which variant of the script."""
        options = self._setup.options
        spec = TrainSpec(
            policy=None if policy is None else self.as_run(policy),
            backend=self._backend,
            seed=self._reseed,
            timeout_s=self.trial_timeout(compiling=policy is not None and compiles(policy)),
            variant=str(params.get(VARIANT, "")),
            steps=options.steps,
            warmup=options.warmup,
            anneal=True,  # no policy causes the noise of a high learning rate
            within_s=self.seconds_left(),
            by_block=self.by_block.active,
            metric=options.metric,
            better=options.better or LOWER,
            alone=self._setup.is_timed_alone or (self._setup.measured and self._pool.slots() > 1),
            turns=self._setup.takes_turns,
        )
        return replace(spec, **changes)

    def as_run(self, policy: Document) -> Document:
        """Return a policy as it is run: by the backend that this search has found to be the fastest."""
        return policy if not self._state.backend or row_of(policy) else run_by(policy, self._state.backend)

    @property
    def _copy_bytes(self) -> int:
        return 0 if self._state.own is None else self._state.own.memory_bytes

    @property
    def probes_at_once(self) -> int:
        """How many probes of a scan are at work at once."""
        return probes_at_once(self._setup, self._pool.slots(), self._copy_bytes)

    def scan_spec(self, policy: Document | None, probes: Sequence[Probe]) -> ScanSpec:
        """Return the spec of a scan: the gradient errors of ``probes`` against a policy's gradients."""
        at_once = self.probes_at_once
        return ScanSpec(
            policy=policy,
            backend=self._backend,
            seed=self._reseed,
            timeout_s=self.trial_timeout(),
            probes=tuple(probes),
            side_by_side=at_once,
            stays=self._setup.host.launch == "fork" and room_for(self._copy_bytes) > at_once,
        )

    def duel_spec(self, policy: Document | None, *, compiling: bool) -> DuelSpec:
        """Return the spec of a duel against a policy, without contenders, which may be ``compiling``."""
        timeout_s = self.trial_timeout(compiling=compiling)
        return DuelSpec(policy=policy, backend=self._backend, seed=self._reseed, timeout_s=timeout_s, alone=True)

    @property
    def _backend(self) -> str:
        return self._setup.options.backend if self._setup.measured else "emulated"

    @property
    def _reseed(self) -> int | None:
        """A forked trial shares its host's random state; elsewhere pairing needs a reseed at the first forward."""
        return None if self._setup.host.launch == "fork" else self._setup.options.seed

    def elapsed(self) -> float:
        """Return the seconds since the search began."""
        return self._state.elapsed()

    def clock(self) -> float:
        """Return a time (s) of which differences say what trials take, those of an earlier session included."""
        return time.monotonic() + self._kept_s

    def seconds_left(self) -> float | None:
        """Return the seconds until a trial has to end for the time budget's sake; None without one."""
        budget = self._setup.options.budget_s
        return None if budget is None else max(0.1, OVERRUN * budget - self._state.elapsed())

    @property
    def is_over(self) -> bool:
        """Whether the time budget, and what may go on after it, is used up."""
        budget = self._setup.options.budget_s
        return budget is not None and self._state.elapsed() > OVERRUN * budget

    def trial_timeout(self, *, compiling: bool = False) -> float:
        """Return how many seconds of its own time a trial may spend without a step before it is ended as hung.

        Waiting for a core on a busy machine does not count (:mod:`autoprec.trial.progress`). One step of a slow policy
        may take as long as twenty whole runs of the reference; a script that has not run yet gets fifteen minutes, in
        which it may compile. Where that finds its graphs in torch's cache, another policy does not.

        Args:
            compiling: what runs compiles something that the script does not.
        """
        if self._state.own is None:
            return BEFORE_REFERENCE_S
        host = self._setup.host
        least = max(COMPILING_S, STARTS * host.setup_s) if compiling or host.compiled else LEAST_TIMEOUT_S
        return max(least, SLOWEST * (self._state.seconds.reference_run_s or LEAST_TIMEOUT_S))

    def doubt_load(self) -> None:
        """Say so where other programs keep this machine's cores busy while steps are timed on them."""
        busy = other_work(self.workers) if self._setup.measured and self._setup.target.is_cpu else ""
        if busy:
            self._state.note(
                f"{busy}: measured times are uncertain, and speed-ups are those beside it, which are mostly smaller "
                "than without"
            )

    def measure(self, spec: TrialSpec, seed: int = 0) -> TrialResult:
        """Run one trial; once more where its times are not to be trusted, which the record says if it stays so.

        Where runs compile blocks, times are read as those of the whole model, and what fails by block is run whole.
        """
        result = self._answer(spec, seed)
        if self._is_doubtful(result):
            again = self._answer(spec, seed)
            result = again if again.ok else result
        instead = self.by_block.instead(spec, result, seed)
        return self.by_block.read(spec, result) if instead is None else self.measure(instead, seed)

    def _is_doubtful(self, result: TrialResult) -> bool:
        """Say whether a trial is to be repeated for its times, and tell of it."""
        if not (self._setup.measured and result.ok and result.unreliable) or self._repeated >= MOST_REPEATED:
            return False
        self._repeated += 1
        self._state.note(f"a trial is repeated: {result.unreliable}")
        if self._repeated == MOST_REPEATED:
            self._state.note(
                "this keeps happening: no further trial is repeated, and the times of this search are uncertain"
            )
        return True

    def on_host(self, spec: TrialSpec, seed: int = 0) -> TrialResult:
        """Run one trial on the host of its seed and variant, once, and count what it took."""
        began, within_s = time.monotonic(), spec.within_s if isinstance(spec, TrainSpec) else None
        try:
            host = self._others.get(spec.variant, self._pool).host(seed, within_s)
        except TimeoutError:
            return TrialResult(OUT_OF_TIME, NOT_STARTED)
        if isinstance(spec, TrainSpec) and within_s is not None:  # the start took some of them
            spec = replace(spec, within_s=max(0.1, within_s - (time.monotonic() - began)))
        result = host.run(spec)
        self._count(spec, result, time.monotonic() - began)
        return result

    def _answer(self, spec: TrialSpec, seed: int) -> TrialResult:
        """Run one trial; one that the study does not hold, and that an earlier session ran, is not run again."""
        if self._kept is None or not self._is_kept(spec):
            return self.on_host(spec, seed)
        question = self._kept.question(spec, seed)
        if question.known is None:
            return question.finish(self.on_host(question.left, seed))
        self._count(spec, question.known, question.known.wall_s)
        with self._counting:
            self._kept_s += question.known.wall_s
        return question.known

    def duel(self, spec: DuelSpec) -> TrialResult:
        """Run a duel; the rounds of one that an earlier session was killed in count."""
        return self.on_host(spec) if self._kept is None else self._kept.duel(spec, self.on_host)

    def duels_are_stored(self) -> None:
        """Say that the study holds what all duels so far have shown."""
        if self._kept is not None:
            self._kept.duels_are_stored()

    def turns(self, specs: Sequence[TrialSpec]) -> Path | None:
        """Return the file for the rounds of trials that take turns, or None where nothing is kept."""
        asked = {"turns": [spec.to_json() | {"within_s": None, "timeout_s": None} for spec in specs]}
        return None if self._kept is None else self._kept.turns(asked)

    def _is_kept(self, spec: TrialSpec) -> bool:
        """Say whether what a trial finds is kept: the study holds none of it before all that belongs to it has ended.

        A policy under a further seed, for example, is stored with the reference of that seed. On several devices the
        reference's first run is also what their speeds are compared by.
        """
        return isinstance(spec, ScanSpec) or (isinstance(spec, TrainSpec) and self._pool.slots() == 1)

    def _count(self, spec: TrialSpec, result: TrialResult, wall_s: float) -> None:
        done = Work(1.0, result.start_s, result.training_s, wall_s, float(_passes(spec, result)))
        with self._counting:
            self.work = self.work.plus(done)

    def is_elsewhere(self, params: Params) -> bool:
        """Say whether runs of these params are under another variant than the reference's."""
        return params.get(VARIANT) in self._others

    @contextmanager
    def threads(self, count: int, name: str) -> Iterator[ThreadPoolExecutor]:
        """Lend threads that run trials; see :meth:`autoprec.tuning.workers.local.HostPool.threads`."""
        with self._pool.threads(count, name) as threads:
            yield threads


def trials_at_once(setup: Setup, slots: int) -> int:
    """Return how many trials a search runs at once where its hosts have ``slots`` devices or machines for one each."""
    asked = setup.options.workers
    if slots > 1:
        return min(slots, asked or slots)
    if _on_one_gpu(setup, slots):
        return 1
    if setup.takes_turns:
        needed = COMPILER_BYTES + _TRAINED_BYTES * int(setup.host.model.get("parameters", 0))
        return max(1, min(MOST_COMPILING, cores(), room_for(needed)))
    if asked or setup.measured:
        return asked or 1
    return min(MOST_SIDE_BY_SIDE, cores())


def finalists_at_once(setup: Setup, slots: int) -> int:
    """Return how many runs under further paired seeds are at work at once; arguments as :func:`trials_at_once`.

    No two that are timed, also not on two devices, but where they wait for each other with that.
    """
    return trials_at_once(setup, slots) if setup.takes_turns or not setup.measured else 1


def room_for(needed: int) -> int:
    """Return for how many copies of a process of so many bytes there is memory; 0 where that is not known."""
    free = free_bytes()
    return int(OF_FREE_MEMORY * free // needed) if free is not None and needed else 0


def probes_at_once(setup: Setup, slots: int, needed: int) -> int:
    """Return how many probes of a scan may be at work at once: nothing of it is timed, so that forks share all cores.

    Args:
        setup: what is searched.
        slots: devices or machines that the search's hosts have for one trial each.
        needed: bytes of a copy of the script's process; 0 where that is not known.
    """
    if not setup.measured:
        return trials_at_once(setup, slots)
    if setup.host.launch != "fork" or slots > 1:
        return 1
    asked = setup.options.workers or min(MOST_SIDE_BY_SIDE, cores())
    return max(1, min(asked, room_for(needed)))


def _on_one_gpu(setup: Setup, slots: int) -> bool:
    return slots == 1 and setup.host.gpus < 2 and setup.measured and not setup.target.is_cpu


def _passes(spec: TrialSpec, result: TrialResult) -> int:
    """Return how many forward and backward passes a trial took."""
    if isinstance(spec, ScanSpec):
        batches = result.answer.noise_batches if isinstance(result.answer, GradientErrors) else 1
        return result.warmup + len(spec.probes) + batches
    return result.answer.steps if isinstance(result.answer, DuelRounds) else len(result.losses)


def perturbed_runs(run: Callable[[str], TrialResult], first: TrialResult, budget: float) -> list[TrialResult]:
    """Run the reference benignly perturbed: once, or several times where that comes near the budget.

    Args:
        run: runs the reference under a perturbation (:attr:`TrainSpec.perturb`); it must succeed or raise.
        first: the plain reference of the same paired seed.
        budget: largest acceptable divergence, a fraction.
    """
    results = [run("bf16")]
    while needs_more_benign_runs([divergence(r.curve, first.curve) for r in results], budget):
        results.append(run(f"bf16:{len(results)}"))
    return results


def baseline_of(first: TrialResult, second: TrialResult, perturbed: Sequence[TrialResult]) -> Baseline:
    """Return what two runs of the reference and its benign perturbations tell about the script itself.

    Args:
        first, second: runs of the reference.
        perturbed: runs with every weight rounded once.
    """
    gaps = tuple(divergence(result.curve, first.curve) for result in perturbed)
    name = "" if first.metric is None else first.metric.name
    loss = None
    if name in MISMATCH:  # which a script that does not train has as well
        own, again, *rounded = (replace(result, metric=None) for result in (first, second, *perturbed))
        loss = baseline_of(own, again, rounded)
    return Baseline(
        floor=max(divergence(second.curve, first.curve), statistics.fmean(gaps)),
        rounding_gaps=gaps,
        rounding_excess=tuple(signed_gap(result.curve, first.curve) for result in perturbed),
        # what lies between the two sides is there whether training moves it or not
        learnt=name in MISMATCH or has_learnt(first.curve, few=first.metric is None),
        metric=name,
        loss=loss,
    )
