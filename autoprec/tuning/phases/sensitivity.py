"""The sensitivity scan: how far each layer's gradient moves under each recipe, before any policy is trained.

After a short warm-up the script is stopped at one step, and every question (one layer group, one choice) is one more
forward and backward on the same weights and batches. The relative errors add in quadrature over the layers of a policy,
so that a few dozen passes rank the gradient error of every combination (:mod:`~autoprec.tuning.decide.table`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoprec.errors import FileError, NothingAcceptableError
from autoprec.support.arrays import np
from autoprec.support.files import read_document, with_checksum, without_checksum, write_json
from autoprec.support.plain import Document
from autoprec.trial.protocol import NOISE_BATCHES, GradientErrors, Probe, ProbeResult
from autoprec.tuning.decide.scan import SensitivityScan, scan_batches
from autoprec.tuning.decide.sentences import unmoved
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.paired import PairedRunner
from autoprec.tuning.schedule import USUAL_PASSES, scan_warmup
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState

#: A complete scan may take as many passes as this share of the trials has steps, and this many at most; where there is
#: a time budget, this share of what is left of it. An incomplete one takes the usual number.
SCAN_SHARE, MOST_PASSES = 0.2, 300


def measure_table(setup: Setup, runner: PairedRunner, state: SearchState) -> SensitivityTable:
    """Measure (or, on resume, read back) the table of gradient errors.

    Args:
        setup: what is searched.
        runner: runs trials beside the reference.
        state: what the search has learnt so far.

    Raises:
        NothingAcceptableError: the scan could not be run, or no gradient to compare with was seen.
    """
    path, options = setup.study_dir / "sensitivity.json", setup.options
    if options.resume and path.exists():
        try:
            state.table = SensitivityTable.from_json(without_checksum(read_document(path), where=str(path)))
            return state.table
        except (FileError, KeyError, ValueError, TypeError) as error:
            state.note(f"the stored sensitivity table cannot be used ({error}); it is measured again")
    began = runner.clock()
    table = _scanned(setup, runner, state)
    if table.hardly_moved:
        step = scan_warmup(options.steps)
        later = "a script that resumes from a later checkpoint is searched there"
        state.note(f"at step {step} {unmoved(table.hardly_moved)}; {later}")
    state.table = table
    state.seconds.sensitivity_s = runner.clock() - began
    write_json(path, with_checksum(table.to_json()), indent=None)
    return table


def _scanned(setup: Setup, runner: PairedRunner, state: SearchState) -> SensitivityTable:
    """Measure the table of gradient errors at the step of the script at which a runner's trials start."""
    options, began = setup.options, time.monotonic()
    # batches that the script surely has after the scan's first
    later = options.warmup + options.steps - scan_warmup(options.steps)
    room = min(MOST_PASSES, int(SCAN_SHARE * options.trials * (options.warmup + options.steps)))
    within_s = _within(setup, state)
    scan = SensitivityScan(setup.problem, USUAL_PASSES, room, max(1, min(scan_batches(setup.graph), later)))
    answers: list[ProbeResult] = []
    while probes := scan.next_round():
        found: list[GradientErrors] = []
        for later in range(scan.batches):
            left_s = None if within_s is None else within_s - (time.monotonic() - began)
            if found and left_s is not None and left_s < 0:
                scan.batches = later
                break
            batches = 1 if scan.knows_noise or found else NOISE_BATCHES
            found.append(_probe(setup, runner, state, probes, later, within_s=left_s, noise_batches=batches))
        scan.add(*found)
        answers += [row for one in found for row in one.probes]
    if scan.unanswered:
        state.cut(
            f"the time budget of {options.budget_s:.0f} s ended the gradient errors: {scan.unanswered} were not "
            "measured but follow from others of the same layers and recipes"
        )
    table = scan.table()
    _refuse_without_gradient(setup, table, answers)
    return table


def _refuse_without_gradient(setup: Setup, table: SensitivityTable, rows: Sequence[ProbeResult]) -> None:
    """Refuse a script whose gradient has vanished: every relative error is then infinite, and no policy is wrong.

    So does one under which every change fails, for the reason that the first of them gives.
    """
    failed = [row.failed for row in rows if row.failed]
    if rows and len(failed) == len(rows):
        raise NothingAcceptableError(
            f"no change of precision could be run in the script's step: {failed[0]}",
            fix="`autoprec check` with a policy of one bf16 layer shows where it fails",
        )
    for group, row in zip(setup.problem.groups, table.error2, strict=True):
        if not np.isfinite(row).any():
            raise NothingAcceptableError(
                f"after {scan_warmup(setup.options.steps)} steps the gradient of '{group.name}' is zero or not finite, "
                "whatever it runs in, so there is nothing to compare a policy with",
                fix="look at the loss: a model that has stopped learning (dead ReLUs, a loss of 0) cannot be tuned",
            )


def measure_errors(
    setup: Setup, runner: PairedRunner, state: SearchState, policies: Mapping[str, Document]
) -> dict[str, float]:
    """Return the measured relative gradient error of whole policies, by name; those that failed are left out.

    Args:
        setup: what is searched.
        runner: runs trials beside the reference.
        state: what the search has learnt so far.
        policies: name -> document.
    """
    began = runner.clock()
    try:
        found = probe_policies(setup, runner, state, policies, noise_batches=1)
    except NothingAcceptableError as error:
        state.note(f"the gradient error of {', '.join(policies)} could not be measured: {error.what}")
        return {}
    state.seconds.error_run_s = runner.clock() - began
    return errors_of(found)


def probe_policies(
    setup: Setup,
    runner: PairedRunner,
    state: SearchState,
    policies: Mapping[str, Document],
    seed: int = 0,
    *,
    noise_batches: int = NOISE_BATCHES,
) -> GradientErrors:
    """Compare the gradients of whole policies on one state and batch, and return what the scan says of each.

    Args:
        setup: what is searched.
        runner: runs trials beside the reference.
        state: what the search has learnt so far.
        policies: name -> document.
        seed: the paired seed.
        noise_batches: mini-batches whose gradients are compared for the gradient noise; 1 where that is known.

    Raises:
        NothingAcceptableError: it could not be run.
    """
    # the same numerics; and a gradient that is meant to be smaller is not in error
    asked = {"execution": "keep", "embedding_gradient": 1.0}
    probes = [Probe(name, policy | asked) for name, policy in policies.items()]
    return _probe(setup, runner, state, probes, seed=seed, noise_batches=noise_batches)


def errors_of(found: GradientErrors) -> dict[str, float]:
    """Return the relative gradient errors that a scan measured, by the names of its probes."""
    return {row.id: row.error for row in found.probes if math.isfinite(row.error)}


def _within(setup: Setup, state: SearchState) -> float | None:
    """Return the seconds that the scan may take; None where there is no time budget."""
    budget = setup.options.budget_s
    return None if budget is None else max(0.0, SCAN_SHARE * (budget - state.elapsed()))


def _probe(
    setup: Setup,
    runner: PairedRunner,
    state: SearchState,
    probes: Sequence[Probe],
    later: int = 0,
    *,
    within_s: float | None = None,
    seed: int = 0,
    noise_batches: int = NOISE_BATCHES,
) -> GradientErrors:
    """Ask on the batch ``later`` steps after the scan's first, under a paired seed."""
    one_run_s = state.seconds.reference_run_s or 30.0
    result = runner.measure(
        replace(
            runner.scan_spec(setup.reference_policy(), probes),
            warmup=scan_warmup(setup.options.steps) + later,
            within_s=within_s,
            noise_batches=noise_batches,
            timeout_s=max(300.0, 5.0 * len(probes) * one_run_s),
        ),
        seed,
    )
    if not isinstance(result.answer, GradientErrors):
        raise NothingAcceptableError(
            f"the sensitivity scan failed: {result.status}: {result.reason}\n{result.tail}".rstrip(),
            fix="`autoprec check` with a policy of one bf16 layer shows where a step fails; -v shows every trial",
        )
    return result.answer
