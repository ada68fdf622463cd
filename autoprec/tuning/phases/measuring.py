"""One policy under one paired seed: what is known of it before, the run, and its scored record.

A search and a verification measure alike: :class:`PairedSeeds` runs each policy beside the reference of its seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.policy.schema import LayerPlan
from autoprec.trial.protocol import OUT_OF_TIME, TrialResult
from autoprec.tuning.decide.metrics import Reference, divergence, score, signed_gap
from autoprec.tuning.decide.noise import Baseline, uninformative
from autoprec.tuning.decide.problem import Params
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.prior import Prior, build_prior
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.paired import PairedRunner
from autoprec.tuning.phases.reference import ROUNDED, own_record, reference_of
from autoprec.tuning.schedule import REFERENCE_RUNS
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import over_sixteen_bit, sixteen_bit_speedup
from autoprec.tuning.state import SearchState, compared
from autoprec.tuning.study.run import BY_BLOCK, MODELLED, Metric, Run, pooled


class _LateError(AutoPrecError):
    """The reference of a paired seed had no time: nothing is known of that seed."""


def make_prior(setup: Setup, state: SearchState, table: SensitivityTable) -> Prior:
    """Return what the cost model and the sensitivity table say before the first trial.

    Where steps are timed, modelled times are in units of the reference's measured one: gains are ratios, and under a
    model that overstates every time no policy would look faster than the script.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        table: gradient errors.
    """
    level = state.reference.step_ms / setup.steps.of_reference().time_ms if setup.measured else 1.0

    def step_cost(params: Params) -> tuple[float, float]:
        estimate = setup.steps.of(params)
        return estimate.time_ms * level, float(estimate.memory_bytes)

    def layer_time(name: str, plan: LayerPlan, activations: str) -> float:
        return setup.cost.layer_time_ms(name, plan, activations) * level

    return build_prior(
        setup.problem,
        table,
        layer_time,
        step_cost,
        measured=setup.measured,
        with_memory=setup.options.max_memory is not None or setup.options.objective != "throughput",
    )


def goals_of(setup: Setup, state: SearchState, table: SensitivityTable) -> Goals:
    """Return what the search is for, in the units of the sampler's models.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        table: gradient errors.
    """
    reference, limit = state.reference, state.gradient_limit()
    return Goals(
        max_divergence=setup.options.tolerance,
        max_gradient=None if limit is None else limit / table.misfit.ratio,
        max_memory=setup.options.memory_limit,
        objective=setup.options.objective,
        uninformative=uninformative(setup.options.tolerance, reference.baseline) is not None,
        seeds=setup.options.seeds,
        reference=(reference.step_ms, float(max(reference.memory_bytes, 1))),
        reference_runs=REFERENCE_RUNS,
        timed=setup.measured,
    )


def first_run(setup: Setup, runner: PairedRunner, state: SearchState, plan: Run, error: float, **changes: Any) -> Run:
    """Run a policy under the script's own seed, and return its scored record.

    Args:
        error: the policy's gradient error, as predicted.
        changes: changes to the runner's spec.
    """
    began = time.time(), time.monotonic()
    result = runner.measure(runner.train_spec(plan.policy, plan.params, **changes))
    # one that failed by block was run as the script compiles it, and is compared with what was compiled so, too
    reference = state.reference if result.blocks else state.written
    return scored(setup, state, plan, result, reference, error, began)


class PairedSeeds:
    """Measures policies under paired seeds, each beside the reference of that seed.

    Attributes:
        references: the reference's run by seed, compiled as runs are.
        benign: runs of the benign perturbation by seed, where it was run, those of an earlier session included.
        unusable: why the reference could not be run, by seed.
    """

    def __init__(self, setup: Setup, runner: PairedRunner, state: SearchState) -> None:
        self._setup, self._runner, self._state = setup, runner, state
        self.references = {0: state.reference}
        self._whole = {} if state.whole is None else {0: state.whole}
        self.benign = {run.seed: run for run in state.store.records if run.kind == "noise" and run.seed}
        self.unusable: dict[int, str] = {}

    @property
    def baseline(self) -> Baseline:
        """What policies are compared with: benign gaps under further seeds, too, where they were measured."""
        own, runs = self._state.reference.baseline, self.benign.values()
        found = own.over_seeds([_gaps(run.curve, run.reference_curve) for run in runs])
        if found.loss is None:
            return found
        return replace(found, loss=found.loss.over_seeds([_gaps(run.losses, run.reference_losses) for run in runs]))

    def measure(self, plan: Run, error: float, *, by_block: bool) -> Run | None:
        """Run a policy under the seed of its plan, and return its record; None where that seed cannot be used.

        Where the seed's reference runs out of time, so has the record, for the reference's reason.

        Args:
            error: the policy's gradient error, as predicted or measured.
            by_block: whether it compiles blocks, and so is compared with a reference that does.
        """
        runner, began = self._runner, (time.time(), time.monotonic())
        spec, whole = runner.train_spec(plan.policy, plan.params, by_block=by_block), runner.by_block.active
        with runner.threads(runner.final_workers, "finalist") as threads:  # one after the other where there is one
            first = threads.submit(self.reference, plan.seed, whole=whole and not by_block)
            running = threads.submit(runner.measure, spec, plan.seed)
            try:
                reference = first.result()
            except _LateError as late:
                running.cancel()
                return replace(plan, status=OUT_OF_TIME, reason=late.what)
            except AutoPrecError as failed:
                self._state.note(f"paired seed {plan.seed} could not be used: {failed.what}")
                self.unusable[plan.seed] = failed.what  # nothing that is held against the policy
                running.cancel()
                return None
            return scored(self._setup, self._state, plan, running.result(), reference, error, began)

    def reference(self, seed: int, *, whole: bool = False) -> Reference:
        """Return the reference of a paired seed; where runs compile blocks, the one that is compiled ``whole``.

        Raises:
            AutoPrecError: it could not be run.
        """
        references = self._whole if whole else self.references
        if seed not in references:
            by_block = self._runner.by_block.active and not whole
            spec = self._runner.train_spec(self._setup.reference_policy(), by_block=by_block)
            result = self._runner.measure(spec, seed)
            if result.status == OUT_OF_TIME:
                raise _LateError(f"its reference: {result.reason}")
            if not result.ok:
                raise AutoPrecError(f"the reference failed: {result.status}: {result.reason}")
            own = self._state.reference
            references[seed] = reference_of(self._setup, result).with_noise(own.baseline, own.deterministic)
            known = compared(self._setup.options, own.baseline)
            if not whole and any(one.noise_floor_upper > budget for budget, one in known):
                self.perturb(seed)
        return references[seed]

    def perturb(self, *seeds: int) -> None:
        """Run the benign perturbation under paired seeds: what the gaps of policies are compared with.

        All are stored when the last was run: a search that is killed between them judges nothing by some of them.
        """
        spec = self._runner.train_spec(self._setup.reference_policy(), perturb="bf16")
        asked = [seed for seed in seeds if seed not in self.benign]
        results = {seed: self._runner.measure(spec, seed) for seed in asked}
        for seed, result in results.items():
            if result.ok:
                reference, number = self.reference(seed), self._state.store.next_number()
                run = own_record(self._setup, reference, result, number, "noise", ROUNDED, seed=seed)
                self.benign[seed] = run
                self._state.store.add(run)


def _gaps(curve: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    return divergence(curve, reference), signed_gap(curve, reference)


def scored(
    setup: Setup,
    state: SearchState,
    plan: Run,
    result: TrialResult,
    reference: Reference,
    error: float,
    began: tuple[float, float],
) -> Run:
    """Return a planned record with everything that its run measured.

    Args:
        reference: the reference of the same paired seed.
        error: the policy's gradient error, as predicted or measured.
        began: when, by the wall clock (which may jump) and by the monotonic one (which durations are taken from).
    """
    estimate = None if setup.measured else setup.steps.of(plan.params)
    doubt = result.unreliable if setup.measured else ""
    found = score(plan, result, reference, estimate=estimate, error=error)
    if found.ok and setup.measured and not result.memory_bytes and plan.params:
        peak = float(setup.steps.of(plan.params).memory_bytes)
        found = found.with_metrics({"memory_bytes": Metric(peak, MODELLED)})
    for problem in result.problems:
        state.note(f"{plan.name}, seed {plan.seed}: {problem}; its divergence is raised by what is beyond the limit")
    done = replace(
        found,
        reason=found.reason or doubt,
        tags=(*plan.tags, *(["unreliable"] if doubt else ()), *([BY_BLOCK] if result.blocks else ())),
        started=began[0],
        seconds=time.monotonic() - began[1],
    )
    return with_gain(setup, state, done)


def with_gain(setup: Setup, state: SearchState, record: Run) -> Run:
    """Return a record with its gain over the best 16-bit run that is known by now, where there is one.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        record: a run that ended.
    """
    known = state.store.records
    stored = any(r.number == record.number for r in known)
    over = over_sixteen_bit(record.figures, sixteen_bit_speedup(setup, known if stored else [*known, record]))
    return record.with_metrics(
        {name: Metric(x, setup.source, *setup.bounds(record.params, x)) for name, x in over.items()}
    )


def leader(setup: Setup, state: SearchState) -> Run | None:
    """Return the best acceptable trial so far with the figures of all its runs, or None."""
    best = state.best()
    return None if best is None else with_gain(setup, state, pooled(state.store.records).get(best.name, best))
