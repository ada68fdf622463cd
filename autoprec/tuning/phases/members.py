"""The policies of the front's members, as files: each with what its one trial measured, and so with a checksum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.policy import Policy, save_policy
from autoprec.tuning.study.records import SearchResult, TrialRecord

if TYPE_CHECKING:
    from autoprec.tuning.context import Context

__all__ = ["member_policy", "save_front"]

KEPT = ("speedup", "divergence", "gradient_error", "memory_bytes", "step_time_ms")


def member_policy(context: Context, record: TrialRecord) -> Policy:
    """Return the policy of one member of the front, with its trial's figures (four digits) as evidence."""
    measured = {name: record.metrics[name] for name in KEPT if name in record.metrics}
    evidence: dict[str, Any] = {
        "target": context.target.name,
        "source": context.source,
        "trial": record.name,
        "reference": context.options.reference,
        "seeds": 1,
        "steps": context.options.steps,
        **{name: float(f"{value:.4g}") for name, value in measured.items() if math.isfinite(value)},
        "limit": "one short trial, not measured again",
    }
    return Policy.model_validate({**record.policy, "evidence": evidence})


def save_front(context: Context, result: SearchResult, folder: Path) -> None:
    """Write ``00.yaml``, ``01.yaml``, ... into a folder, in the order of the result's front."""
    by_name = {record.name: record for record in context.store.records if record.policy}
    for index, member in enumerate(result.front):
        record = by_name.get(str(member["name"]))
        if record is not None:
            save_policy(member_policy(context, record), folder / f"{index:02d}.yaml")
