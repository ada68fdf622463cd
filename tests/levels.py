"""Policies that store weights, gradients and optimizer state in few bits, by name: MS-AMP's levels and others."""

from __future__ import annotations

from typing import Any

from autoprec.policy import OptimizerPolicy, Policy
from autoprec.policy.library import published
from autoprec.precision.recipes import BUILTIN_RECIPES


def _policy(recipe: str, **changes: Any) -> Policy:
    document = {"recipes": {recipe: BUILTIN_RECIPES[recipe].to_dict()}, "default": recipe, "activations": "bf16"}
    return Policy.model_validate(document | changes)


def _msamp(name: str, *, exact: bool = False) -> Policy:
    found = published(f"msamp-{name}")
    policy = found.around().model_copy(update={"recipes": found.recipes, "default": found.use})
    ours = {"e4m3_tensor": "e4m3", "fp16_tensor": "fp16_scaled"} if exact else {}
    stored = {part: ours.get(value, value) for part, value in policy.optimizer.model_dump().items()}
    return policy.model_copy(update={"optimizer": OptimizerPolicy.model_validate(stored)})


_FP16 = {"activations": "fp16", "loss_scaling": "dynamic"}
_NARROW = {"weights": "bf16_stochastic", "gradients": "e4m3", "exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"}

LEVELS: dict[str, Policy] = {
    "amp-fp16": _policy("fp16", **_FP16),
    "amp-bf16": _policy("bf16"),
    "te": _policy("fp8_delayed"),
    **{f"msamp-{name}": _msamp(name) for name in ("o1", "o2", "o3")},
    **{f"msamp-{name}-exact": _msamp(name, exact=True) for name in ("o1", "o2", "o3")},
    "bf16-kahan": _policy("bf16", optimizer={"weights": "bf16_kahan", "gradients": "bf16"}),
    "bf16-sr-fp8": _policy("bf16", optimizer=_NARROW, communication={"gradients": "fp8"}),
}
