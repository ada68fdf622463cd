"""The rollout section of a policy on the copy of the model that generates, and off it again.

A rollout engine runs a model in one dtype, weights and all, so beside rules and autocast the section has the dtype that
the weights are held in. What the script copies into them from then on is rounded to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from autoprec.applying.generating.pairs import recognise, rollout_of, weights_of
from autoprec.applying.generating.recast import cast, put_dtypes
from autoprec.applying.stage import put_stage, take_off
from autoprec.errors import UnsupportedError, UsageError
from autoprec.numerics.plan import NATIVE
from autoprec.policy import Policy
from autoprec.precision.recipes import KEEP


def put_rollout(policy: Policy, model: nn.Module, *, backend: str, strict: bool, only_try: bool = False) -> None:
    """Make the copy of a model that generates run the rollout section of its policy, in place; without one, as written.

    Args:
        policy: any.
        model: that the policy is applied to.
        backend, strict, only_try: as :func:`autoprec.applying.stage.put_stage`.

    Raises:
        UsageError: the policy has a section, the script has not named the copy, and there is not one copy alone.
        PolicyMismatchError, UnsupportedError: the copy cannot run it.
    """
    side = policy.rollout_side
    rollout = rollout_of(model) if side is None else recognise(model)
    if side is not None and rollout is None:
        raise UsageError(
            "the policy has a section for the copy of the model that generates, and which that is was not said",
            where="rollout",
            fix="before the policy is applied: autoprec.register(policy=model, rollout=rollout)",
        )
    if rollout is None or (side is None and only_try):
        return
    if side is not None:
        weights = KEEP if policy.rollout is None else policy.rollout.weights
        mine = {id(one) for one in weights_of(model).values()}
        if weights != KEEP and any(id(one) in mine for one in rollout.parameters()):
            raise UnsupportedError(
                f"rollout.weights: {weights} would cast the weights that are trained: both sides hold the same tensors",
                fix="leave it out, or give rollout a copy of the weights",
            )
        put_stage(side, rollout, backend=backend, strict=strict, only_try=True)
        if only_try:
            return
    take_off_rollout(model)
    if side is not None:
        if weights != KEEP:
            cast(model, rollout, NATIVE[weights])
        put_stage(side, rollout, backend=backend, strict=strict)


def take_off_rollout(model: nn.Module) -> None:
    """Give the copy of a model that generates its own behaviour and dtypes back; a no-op where nothing is on it."""
    rollout = rollout_of(model)
    if rollout is None:
        return
    take_off(rollout)
    put_dtypes(rollout, None)


def weights_row(policy: Policy, rollout: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the audit's row of the dtype that a copy's weights are held in, where the policy names one."""
    asked = KEEP if policy.rollout is None else policy.rollout.weights
    if asked != KEEP:
        short = {dtype: name for name, dtype in NATIVE.items()}
        held = dict.fromkeys(short.get(p.dtype, str(p.dtype)) for p in rollout.parameters() if p.is_floating_point())
        ok = [*held] == [asked]
        why = "" if ok else "the script gave it weights of its own, as load_state_dict(..., assign=True) does"
        yield "weights", {"requested": asked, "executed": ", ".join(held), "ok": ok, "reason": why}
