"""Puts a policy document on what a script trains: its primary model and its optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoprec.support.plain import Document
from autoprec.trial.inside.observe.discovery import Found

if TYPE_CHECKING:
    from torch import nn

    from autoprec.applying.policy import TorchPolicy


def apply_document(
    document: Document | None,
    found: Found,
    backend: str,
    *,
    run_steps: int | None = None,
    say: Callable[[str], None] | None = None,
) -> TorchPolicy | None:
    """Apply a policy document to the primary model and its optimizers (``apply_policy``); returns the policy, or None.

    Args:
        run_steps: optimizer steps of the run, for phases that begin at a share of it.
        say: called with a line of text whenever a phase begins.

    Raises:
        UsageError, PolicyError, PolicyMismatchError, UnsupportedError: as ``apply_policy``.
    """
    if document is None:
        return None
    from autoprec.applying.policy import TorchPolicy
    from autoprec.policy import policy_from_dict

    policy = policy_from_dict(document, cls=TorchPolicy)
    policy.apply(found.root, backend=backend, run_steps=run_steps, on_change=say)
    for optimizer in found.optimizers:  # changes nothing where the policy leaves state, loss and communication alone
        policy.wrap_optimizer(optimizer, model=found.root)
    return policy


@contextmanager
def by_its_backend(document: Document | None, root: nn.Module) -> Iterator[None]:
    """Refuse a policy that the body applies and of which no layer runs by a library that its evidence names.

    Args:
        document: of the policy; None for one that may run as it does.
        root: the model.

    Raises:
        UnsupportedError: with what the backend said.
    """
    from autoprec.applying.swap import root_of
    from autoprec.errors import AutoPrecWarning, UnsupportedError

    rows = ((document or {}).get("evidence") or {}).get("backends") or {}
    asked = {row["backend"] for row in rows.values()} - {"native"}
    if not asked:
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutoPrecWarning)
        yield
    execution = root_of(root)
    if asked.isdisjoint(one.name for one in (execution.backends if execution is not None else ())):
        said = [str(one.message) for one in caught if issubclass(one.category, AutoPrecWarning)]
        raise UnsupportedError("; ".join(said) or f"no layer runs by {', '.join(sorted(asked))}")


def by_block(document: Document | None, root: nn.Module) -> Document | None:
    """Return the policy that compiles a model's repeated blocks where it, or the script, compiles the whole model."""
    from autoprec.applying.compiling import is_compiled

    asked = document or {"schema": "autoprec.policy/1"}
    whole = {"keep": is_compiled(root), "compile_whole": True}.get(asked.get("execution", "keep"), False)
    return asked | {"execution": "compile"} if whole else document


def watch_state(policy: Any, found: Found, steps: int) -> list[Any]:
    """Watch about six steps of every optimizer from the inside, where a policy stores weights or state low.

    Short losses flatter a broken second moment, and gradient errors do not see it: see :mod:`autoprec.optim.monitors`.

    Args:
        policy: that was applied; None for none.
        found: models and optimizers of the script.
        steps: steps of the trial.
    """
    if policy is None or not policy.optimizer.stores:
        return []
    from autoprec.optim.monitors import StateMonitor

    return [StateMonitor(optimizer, every=max(2, steps // 6)) for optimizer in found.optimizers]


@dataclass(frozen=True, slots=True)
class StateSeen:
    """What was seen of stored weights and optimizer state from the inside.

    Attributes:
        penalty: penalty for updates that were lost, added to the divergence; ``problems`` says where.
        skipped_steps: steps that our loss scaling left out.
        audit: rows of the audit by the part of the optimizer.
        hints: notes of the audit.
    """

    penalty: float = 0.0
    problems: tuple[str, ...] = ()
    skipped_steps: int = 0
    audit: dict[str, Document] = field(default_factory=dict)
    hints: tuple[str, ...] = ()


def state_seen(policy: Any, found: Found, monitors: list[Any]) -> StateSeen:
    """Return what was seen of weights and state under a policy.

    Args:
        policy: the policy that was applied.
        found: models and optimizers of the script.
        monitors: what :func:`watch_state` returned.
    """
    from autoprec.optim.audit import audit_optimizer, joined, optimizer_hints
    from autoprec.optim.optimizer import skipped_steps

    reports = [monitor.report() for monitor in monitors]
    audit: dict[str, Document] = {}
    for optimizer in found.optimizers:
        joined(audit, audit_optimizer(policy, optimizer, found.root))
    return StateSeen(
        penalty=max((report.penalty() for report in reports), default=0.0),
        problems=tuple(problem for report in reports for problem in report.problems()),
        skipped_steps=sum(skipped_steps(optimizer) for optimizer in found.optimizers),
        audit=audit,
        hints=tuple(dict.fromkeys(hint for one in found.optimizers for hint in optimizer_hints(policy, one))),
    )
