"""What stacks that name whole recipes have words for: a table each, which its exporter and its importer share.

A table gives every word what a layer runs under it. An export takes the word nearest to a layer's plan and lists what
differs; an import takes the plan of the word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoprec.errors import FileError, UnknownNameError
from autoprec.export.summary import changes, distance
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, KEEP, Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """A stack's words; the empty one is high precision, in the dtype of the activations.

    Attributes:
        said: a word in a sentence, such as ``torchao's {} recipe``.
        plans: word -> what a layer runs under it.
        besides: word -> what it does that no plan says.
    """

    said: str
    plans: Mapping[str, LayerPlan]
    besides: Mapping[str, str] = field(default_factory=dict)

    def nearest(self, plan: LayerPlan) -> str:
        """Return the word nearest to a plan; empty where nothing is scaled, or no word has its format."""
        if not plan.scaled:
            return ""
        alike = (word for word, runs in self.plans.items() if runs.scaled[0].format == plan.scaled[0].format)
        return min(alike, key=lambda word: distance(plan, self.plans[word]), default="")

    def lost(self, plan: LayerPlan, word: str, dtype: str, asked: str = "") -> str:
        """Return what a layer runs under a word instead of its plan; empty where it is the same.

        Args:
            dtype: what products in high precision run in there.
            asked: the policy's activations, where the target has others and that is listed already.
        """
        found = changes(plan, self.plans.get(word, LayerPlan()), dtype, asked)
        listed = ", ".join(filter(None, (found, self.besides.get(word, ""))))
        return f"{self.said.format(word)}: {listed}" if word and listed else listed


def section(document: Mapping[str, Any], name: str, known: Collection[str] = ()) -> Mapping[str, Any]:
    """Return a part of a configuration; empty where it is left out.

    Args:
        document: the whole configuration.
        name: key of the part.
        known: keys that the part may have; empty for any.

    Raises:
        FileError: it is not a mapping.
        UnknownNameError: it has a key that is not ``known`` (where keys are given): perhaps a later version's.
    """
    found = document.get(name) or {}
    if not isinstance(found, Mapping):
        raise FileError(f"{name} is not a mapping")
    for key in found if known else ():
        if key not in known:
            raise UnknownNameError("key", str(key), known, where=f"{name} (what a later version has is not read)")
    return found


def as_rule(match: str, plan: LayerPlan, recipes: dict[str, Any]) -> dict[str, Any]:
    """Return the rule of a policy under which layers run a plan, and add its recipes to ``recipes``.

    Args:
        match: glob on layer names.
        plan: what these layers run.
        recipes: name -> recipe document; receives those that the rule names.
    """
    names = {}
    for gemm in GEMMS:
        recipe = plan.recipe(gemm)
        names[gemm] = KEEP if recipe is None else _name(recipe)
        if recipe is not None:
            recipes[names[gemm]] = recipe.to_dict()
    usual = names["dgrad"]
    gemms = {gemm: name for gemm, name in names.items() if name != usual}
    return {"match": match, "recipe": usual, "optional": True, **({"gemms": gemms} if gemms else {})}


def _name(recipe: Recipe) -> str:
    full = recipe.model_copy(update={"accumulation": "full"})
    known = (name for name, one in BUILTIN_RECIPES.items() if one == full)
    return next(known, recipe.format) + ("_fast" if recipe.accumulation == "fast" else "")
