"""Puts a policy document on what a script trains: its primary model and its optimizers."""

from __future__ import annotations

from typing import Any

from autoprec.trial.discovery import Found

__all__ = ["apply_document"]


def apply_document(document: dict[str, Any] | None, found: Found, backend: str) -> Any:
    """Apply a policy document to the primary model and its optimizers; returns the policy, or None.

    Raises:
        PolicyError, PolicyMismatchError, UnsupportedError: see :func:`autoprec.apply.apply_policy`.
    """
    if document is None:
        return None
    from autoprec.apply import Policy
    from autoprec.policy import policy_from_dict

    policy = policy_from_dict(document, cls=Policy)
    policy.apply(found.root, backend=backend)
    for optimizer in found.optimizers:  # changes nothing where the policy leaves state, loss and communication alone
        policy.wrap_optimizer(optimizer, model=found.root)
    return policy
