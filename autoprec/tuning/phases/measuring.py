"""One policy under one paired seed: what is known of it before, the run, and its scored record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoprec.policy.schema import LayerPlan
from autoprec.trial.protocol import TrialResult
from autoprec.tuning.decide.metrics import Reference, score
from autoprec.tuning.decide.noise import uninformative
from autoprec.tuning.decide.sampler.expectation import Goals
from autoprec.tuning.decide.sampler.prior import Prior, build_prior
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import over_sixteen_bit, sixteen_bit_speedup
from autoprec.tuning.study.run import BY_BLOCK, Metric, Run, pooled


def make_prior(setup: Setup, ledger: Ledger, table: SensitivityTable) -> Prior:
    """Return what the cost model and the sensitivity table say before the first trial.

    Where steps are timed, modelled times are in units of the reference's measured one: gains are ratios, and under a
    model that overstates every time no policy would look faster than the script.
    """
    level = ledger.reference.step_ms / setup.steps.of_reference().time_ms if setup.measured else 1.0

    def step_cost(params: Mapping[str, Any]) -> tuple[float, float]:
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
        with_memory=setup.limits.memory is not None or setup.options.objective != "throughput",
    )


def goals_of(setup: Setup, ledger: Ledger, table: SensitivityTable) -> Goals:
    """Return what the search is for, in the units of the sampler's models."""
    reference, limit = ledger.reference, ledger.gradient_limit()
    return Goals(
        max_divergence=setup.limits.divergence,
        max_gradient=None if limit is None else limit / table.misfit.ratio,
        max_memory=setup.limits.memory,
        objective=setup.options.objective,
        uninformative=uninformative(setup.limits.divergence, reference.baseline) is not None,
        seeds=setup.options.seeds,
        reference=(reference.step_ms, float(max(reference.memory_bytes, 1))),
        timed=setup.measured,
    )


def scored(
    setup: Setup,
    ledger: Ledger,
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
    done = replace(
        found,
        reason=found.reason or doubt,
        tags=(*plan.tags, *(["unreliable"] if doubt else ()), *([BY_BLOCK] if result.payload.get(BY_BLOCK) else ())),
        started=began[0],
        seconds=time.monotonic() - began[1],
    )
    return with_gain(setup, ledger, done)


def with_gain(setup: Setup, ledger: Ledger, record: Run) -> Run:
    """Return a record with its gain over the best 16-bit run that is known by now, where there is one."""
    known = ledger.store.records
    stored = any(r.number == record.number for r in known)
    over = over_sixteen_bit(record.figures, sixteen_bit_speedup(setup, known if stored else [*known, record]))
    return record.with_metrics(
        {name: Metric(x, setup.source, *setup.bounds(record.params, x)) for name, x in over.items()}
    )


def leader(setup: Setup, ledger: Ledger) -> Run | None:
    """Return the best acceptable trial so far with the figures of all its runs, or None."""
    best = ledger.best()
    return None if best is None else with_gain(setup, ledger, pooled(ledger.store.records).get(best.name, best))
