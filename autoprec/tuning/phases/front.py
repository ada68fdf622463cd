"""The policies of the Pareto front as files, each with what its runs measured, and so with a checksum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprec.policy import Policy, save_policy
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.phases.answer import figures_of_evidence
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.records import SearchResult


def front_policy(setup: Setup, document: Mapping[str, Any], point: Mapping[str, Any]) -> Policy:
    """Return the policy of one point of a result's front, with its figures (four digits) as evidence."""
    seeds = int(point["seeds"])
    evidence: dict[str, Any] = {
        **document.get("evidence", {}),
        "target": setup.target.name,
        "source": setup.source,
        "trial": point["name"],
        "reference": setup.options.reference,
        "seeds": seeds,
        "steps": setup.options.steps,
        **figures_of_evidence(point),
        "limit": "one short trial, not measured again" if seeds == 1 else "short trials see early divergence only",
    }
    return Policy.model_validate({**document, "evidence": evidence})


def save_front(setup: Setup, ledger: Ledger, result: SearchResult) -> None:
    """Write ``front/00.yaml``, ``01.yaml``, ... into the study's folder, in the order of the result's front."""
    documents = {record.name: record.policy for record in ledger.store.learned()}
    for index, point in enumerate(result.front):
        policy = front_policy(setup, documents[str(point["name"])], point)
        save_policy(policy, setup.study_dir / "front" / f"{index:02d}.yaml")
