"""Steps back from a policy, each giving some speed away for some safety; pure data in, pure data out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from autoprec.errors import UnknownNameError
from autoprec.policy import LayerRule, Policy, escape
from autoprec.policy.phases import plain_recipe
from autoprec.precision.recipes import GEMMS, Gemm

P = TypeVar("P", bound=Policy)

#: Fallbacks by name, in the order in which they give speed away.
FALLBACKS = ("wgrad_bf16", "dgrad_bf16", "head_bf16", "ends_bf16", "all_bf16", "script")


def fall_back(policy: P, name: str, layers: Sequence[str]) -> P:
    """Return the policy after one fallback, in each of its phases.

    Args:
        name: one of :data:`FALLBACKS`: ``wgrad_bf16`` and ``dgrad_bf16`` take one GEMM of every quantised layer to
            bf16, ``head_bf16`` the last layer, ``ends_bf16`` first and last, ``all_bf16`` all; ``script`` takes
            the policy off.
        layers: the model's tunable layers, in model order.

    Raises:
        UnknownNameError: no such fallback.
    """
    if name not in FALLBACKS:
        raise UnknownNameError("fallback", name, FALLBACKS)
    if not policy.phases:
        return _stepped_back(policy, name, layers)
    return policy.with_stages([_stepped_back(stage, name, layers) for stage in policy.stages])


def _stepped_back(policy: P, name: str, layers: Sequence[str]) -> P:
    if name == "script":
        return type(policy)()
    plain, recipes = plain_recipe(policy)
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
