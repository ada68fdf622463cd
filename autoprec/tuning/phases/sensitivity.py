"""Runs the sensitivity scan: one forward and backward per question, all on the same weights and batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoprec.errors import FileError, NothingAcceptableError
from autoprec.support.files import read_document, with_checksum, without_checksum, write_json
from autoprec.trial.protocol import Probe, TrialSpec
from autoprec.tuning.context import Context
from autoprec.tuning.decide.scan import SensitivityScan, scan_batches
from autoprec.tuning.decide.table import SensitivityTable

__all__ = ["measure_errors", "measure_table"]

#: A complete scan may take as many passes as this share of the trials has steps, and so many at most.
SCAN_SHARE, MOST_PASSES = 0.2, 300


def _warmup(context: Context) -> int:
    """Return the steps before the scan: late enough to leave the initialisation, early enough to be cheap."""
    return min(10, max(2, context.options.steps // 2))


def measure_table(context: Context) -> SensitivityTable:
    """Measure (or, on resume, read back) the table of gradient errors.

    Raises:
        NothingAcceptableError: the scan could not be run, or there was no gradient to compare with.
    """
    path = context.study_dir / "sensitivity.json"
    if context.options.resume and path.exists():
        try:
            context.table = SensitivityTable.from_json(without_checksum(read_document(path), where=str(path)))
            return context.table
        except (FileError, KeyError, ValueError, TypeError) as error:
            context.note(f"the stored sensitivity table cannot be used ({error}); it is measured again")
    began = time.monotonic()
    options = context.options
    later = options.warmup + options.steps - _warmup(context)  # batches that the script surely has from there on
    room = min(MOST_PASSES, int(SCAN_SHARE * options.trials * (options.warmup + options.steps)))
    asked = SensitivityScan(context.problem, room=room, batches=max(1, min(scan_batches(context.graph), later)))
    while probes := asked.next_round():
        asked.add(*(_probe(context, probes, later) for later in range(asked.batches)))
    table = context.table = asked.table()
    _refuse_without_gradient(context, table)
    context.timings["sensitivity_s"] = time.monotonic() - began
    context.timings["sensitivity_passes"] = float(asked.passes)
    write_json(path, with_checksum(table.to_json()), indent=None)
    return table


def _refuse_without_gradient(context: Context, table: SensitivityTable) -> None:
    """Refuse a script whose gradient has vanished: every relative error is then infinite, and no policy is wrong."""
    hopeless = [
        group.name
        for group, row in zip(context.problem.groups, table.error2, strict=True)
        if not np.isfinite(row).any()
    ]
    if hopeless:
        step = _warmup(context)
        raise NothingAcceptableError(
            f"after {step} steps the gradient of '{hopeless[0]}' is zero or not finite, whatever it runs in, "
            "so there is nothing to compare a policy with",
            fix="look at the loss: a model that has stopped learning (dead ReLUs, a loss of 0) cannot be tuned",
        )


def measure_errors(context: Context, policies: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Return the measured relative gradient error of whole policies, by name; those that failed are left out."""
    probes = [Probe(name, policy | {"execution": "keep"}) for name, policy in policies.items()]  # same numerics
    try:
        payload = _probe(context, probes)
    except NothingAcceptableError as error:
        context.note(f"the finalists' gradient errors could not be measured: {error.what}")
        return {}
    return {
        str(row["id"]): float(row["gradient_error"])
        for row in payload["probes"]
        if row.get("gradient_error") is not None and not row.get("nonfinite")
    }


def _probe(context: Context, probes: Sequence[Probe], later: int = 0) -> dict[str, Any]:
    """Ask on the batch ``later`` steps after the scan's first."""
    options = context.options
    result = context.run(
        TrialSpec(
            kind="sensitivity",
            policy=context.reference_policy(),
            warmup=_warmup(context) + later,
            steps=1,
            probes=tuple(probes),
            batches=2,
            seed=None if context.host.launch == "fork" else options.seed,
            backend=options.backend if context.measured else "emulated",
            timeout_s=max(300.0, 5.0 * len(probes) * context.timings.get("reference_run_s", 30.0)),
        )
    )
    if not result.ok:
        raise NothingAcceptableError(
            f"the sensitivity scan failed: {result.status}: {result.reason}",
            fix=f"the trial printed:\n{result.tail}" if result.tail else "run with -v",
        )
    return result.payload
