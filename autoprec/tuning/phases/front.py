"""The policies of the Pareto front as files, each with what its runs measured, and so with a checksum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autoprec.policy import Policy, save_policy
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.records import SearchResult, TrialRecord, pooled

__all__ = ["front_policy", "save_front"]

KEPT = ("speedup", "divergence", "gradient_error", "memory_bytes", "step_time_ms")


def front_policy(setup: Setup, record: TrialRecord) -> Policy:
    """Return the policy of one point of the front, with its figures (four digits) as evidence."""
    seeds = int(record.metrics.get("seeds", 1))
    measured = {name: record.metrics[name] for name in KEPT if name in record.metrics}
    evidence: dict[str, Any] = {
        **record.policy.get("evidence", {}),
        "target": setup.target.name,
        "source": setup.source,
        "trial": record.name,
        "reference": setup.options.reference,
        "seeds": seeds,
        "steps": setup.options.steps,
        **{name: float(f"{value:.4g}") for name, value in measured.items() if math.isfinite(value)},
        "limit": "one short trial, not measured again" if seeds == 1 else "short trials see early divergence only",
    }
    return Policy.model_validate({**record.policy, "evidence": evidence})


def save_front(setup: Setup, ledger: Ledger, result: SearchResult) -> None:
    """Write ``front/00.yaml``, ``01.yaml``, ... into the study's folder, in the order of the result's front."""
    by_name = pooled(ledger.store.records)
    for index, point in enumerate(result.front):
        record = by_name.get(str(point["name"]))
        if record is not None:
            metrics = {**record.metrics, "gradient_error": point.get("gradient_error", math.nan)}
            record = replace(record, metrics=metrics)
            save_policy(front_policy(setup, record), setup.study_dir / "front" / f"{index:02d}.yaml")
