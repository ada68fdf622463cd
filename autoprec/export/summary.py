"""What coarse targets need of a policy: is it one recipe, which one, and which layers fall out of it."""

from __future__ import annotations

from collections import Counter

from autoprec.export.base import Losses, Request, RulePlan
from autoprec.policy import LayerPlan, glob_matches

__all__ = ["high_dtype", "lose_rule", "main_plan", "matching_layers"]


def matching_layers(request: Request, index: int) -> tuple[str, ...]:
    """Return the known layers that the rule at ``index`` of ``request.rules()`` decides about."""
    rules = request.rules()
    earlier = rules[:index]
    return tuple(
        name
        for name in request.layers
        if glob_matches(rules[index].match, name) and not any(glob_matches(rule.match, name) for rule in earlier)
    )


def main_plan(request: Request) -> LayerPlan | None:
    """Return the quantised plan that most layers run (most rules, when layers are not known); None without any."""
    counts: Counter[LayerPlan] = Counter()
    for index, rule in enumerate(request.rules()):
        if rule.plan.scaled:
            counts[rule.plan] += len(matching_layers(request, index)) if request.layers else 1
    found = counts.most_common(1)
    return found[0][0] if found else None


def high_dtype(request: Request, plan: LayerPlan) -> str:
    """Return the plain format a layer runs in by its fprop; ``keep`` becomes the dtype of the activations."""
    recipe = plan.fprop
    if recipe is None or recipe.scaled:
        return request.policy.activations
    return recipe.format


def lose_rule(losses: Losses, rule: RulePlan, instead: str) -> None:
    """List a rule that a target runs differently."""
    losses.add(rule.plan.describe(), instead, rule.match)
