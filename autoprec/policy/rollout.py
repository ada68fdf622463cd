"""What a search may decide of the copy of the model that generates, as one parameter beside those of training.

The copy is in no recorded step, so that nothing is known of its time, and it has no gradients to be in error. How far
it is from training only trials tell; of policies that cost the same the one whose sides are closest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoprec.policy.schema import LayerRule, RolloutPolicy
from autoprec.precision.recipes import KEEP, Recipe

#: The parameter, and the value under which the copy runs the recipes of training.
ROLLOUT, SAME = "rollout", "same"
#: Recipe of training -> what it is called where the copy runs it by current scales: it learns no others.
_CURRENT = "{}_current"


def section(
    value: str, rules: Sequence[LayerRule], recipes: Mapping[str, Recipe], activations: str
) -> tuple[RolloutPolicy | None, dict[str, Recipe]]:
    """Return the section of a policy for the copy, None for as written, and the recipes that it has of its own.

    Args:
        value: ``keep``, ``same``, or a dtype that weights and products are in.
        rules: of training.
        recipes: by name.
        activations: of training.
    """
    if value == KEEP or (value == SAME and not rules and activations == KEEP):
        return None, {}
    if value != SAME:
        return RolloutPolicy.model_validate({"activations": value, "weights": value}), {}
    own: dict[str, Recipe] = {}
    theirs = []
    for rule in rules:
        name = rule.gemms.get("fprop", rule.recipe)
        recipe = recipes.get(name)
        if recipe is not None and recipe.scaling is not None and recipe.scaling.scale == "delayed":
            name = _CURRENT.format(name)
            own[name] = _current(recipe)
        theirs.append(rule.model_copy(update={"recipe": name, "gemms": {}}))
    side = {"layers": tuple(theirs), "activations": activations, "weights": activations}
    return RolloutPolicy.model_validate(side), own


def _current(recipe: Recipe) -> Recipe:
    document = recipe.to_dict()
    document["scaling"] = {"granularity": "tensor", "scale": "current"}
    return Recipe.model_validate(document)
