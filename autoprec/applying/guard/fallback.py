"""Steps back from a policy, each giving some speed away for some safety; pure data in, pure data out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autoprec.errors import UnknownNameError
from autoprec.policy import LayerRule, Policy, escape
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Gemm

__all__ = ["FALLBACKS", "fall_back"]

#: Fallbacks by name, in the order in which they give speed away.
FALLBACKS = ("wgrad_bf16", "dgrad_bf16", "head_bf16", "ends_bf16", "all_bf16", "script")


def _bf16(policy: Policy) -> tuple[str, dict[str, Any]]:
    for name, recipe in policy.recipes.items():
        if recipe == BUILTIN_RECIPES["bf16"]:
            return name, dict(policy.recipes)
    name = "bf16" if "bf16" not in policy.recipes else "guard_bf16"
    return name, {**policy.recipes, name: BUILTIN_RECIPES["bf16"]}


def fall_back(policy: Policy, name: str, layers: Sequence[str]) -> Policy:
    """Return the policy after one fallback.

    Args:
        policy: what runs now.
        name: one of :data:`FALLBACKS`: ``wgrad_bf16`` and ``dgrad_bf16`` take one GEMM of every quantised layer to
            bf16, ``head_bf16`` the last layer, ``ends_bf16`` first and last, ``all_bf16`` all; ``script`` takes
            the policy off.
        layers: the model's tunable layers, in model order.

    Raises:
        UnknownNameError: no such fallback.
    """
    if name not in FALLBACKS:
        raise UnknownNameError("fallback", name, FALLBACKS)
    if name == "script":
        return type(policy)()
    plain, recipes = _bf16(policy)
    rules = [*policy.layers, LayerRule(match="*", recipe=policy.default, gemms={}, optional=True)]
    if name in ("head_bf16", "ends_bf16"):
        ends = list(dict.fromkeys([layers[-1], layers[0]]))[: 1 if name == "head_bf16" else 2] if layers else []
        rules = [LayerRule(match=escape(end), recipe=plain, gemms={}, optional=True) for end in ends] + rules
    else:
        gemms: tuple[Gemm, ...] = GEMMS if name == "all_bf16" else ("wgrad",) if name == "wgrad_bf16" else ("dgrad",)
        rules = [_without(policy, rule, plain, gemms) for rule in rules]
    return policy.model_copy(update={"recipes": recipes, "layers": tuple(rules), "default": "keep"})


def _without(policy: Policy, rule: LayerRule, plain: str, gemms: Iterable[Gemm]) -> LayerRule:
    plan = policy.plan_of_rule(rule)
    lowered = [gemm for gemm in gemms if (recipe := plan.recipe(gemm)) is not None and recipe.scaled]
    return rule.model_copy(update={"gemms": {**rule.gemms, **dict.fromkeys(lowered, plain)}})
