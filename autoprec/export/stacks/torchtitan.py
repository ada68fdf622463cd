"""``--to torchtitan``: its quantization converters, one for each recipe that torchtitan has a word for.

``filter_fqns`` (what a converter skips) and ``fqns`` (what it takes) are *substrings*: ``layers.1`` is in ``layers.10``
too. Both lists are therefore built from the model's layer names and checked against them. Experts are one module with a
weight of three dimensions there, and their converters take them all.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import expert, header, literal, substrings
from autoprec.export.settings import LOST_IN_BF16, report_settings
from autoprec.export.snippets import fill
from autoprec.export.stacks.torchao import NAMED
from autoprec.export.summary import lose, main_plan
from autoprec.export.words import Words
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES

#: Recipe names of torchtitan's Float8LinearConverter; the other converters have one recipe each.
_FLOAT8 = ("rowwise", "rowwise_with_gw_hp")
_WORDS = Words(
    "torchtitan's {} converter",
    {
        **{name: NAMED.plans[name] for name in _FLOAT8},
        **{name: LayerPlan.uniform(BUILTIN_RECIPES[name]) for name in ("mxfp8", "nvfp4")},
    },
    NAMED.besides,
)
_LINEAR = {"mxfp8": "MXFP8LinearConverter", "nvfp4": "NVFP4LinearConverter"}
_EXPERTS = {"rowwise": "Float8GroupedExpertsConverter", "mxfp8": "MXFP8GroupedExpertsConverter"}


_NOTHING = '''def converters(model_compile_enabled=True, emulate=False):
    """No layer runs in FP8."""
    return []
'''


def nearest_converter(plan: LayerPlan, name: str = "") -> str:
    """Return the recipe that a layer gets: a name of Float8LinearConverter, mxfp8, nvfp4; empty for bf16."""
    found = _WORDS.nearest(plan)
    if expert(name):
        return {"rowwise_with_gw_hp": "rowwise"}.get(found, found if found in _EXPERTS else "")
    return found


_KEPT = dict.fromkeys(("loss", "output"), "torchtitan's loss casts the model's output to fp32")


def write(request: Request, losses: Losses) -> Written:
    """Return ``precision_torchtitan.py``."""
    policy = request.policy
    plans = request.plans() or {"": main_plan(request) or LayerPlan()}
    recipes = {name: nearest_converter(plan, name) for name, plan in plans.items()}
    made = _converters(recipes)
    why = "" if request.layers else "substrings need layer names, pass --layers"
    lose(losses, request, lambda plan, name: _WORDS.lost(plan, recipes[name], "bf16", policy.activations), why)
    mixed = "bf16 (torchtitan's mixed precision)"
    said = "torchtitan scales no loss"
    report_settings(request, losses, said, kept=_KEPT, lost=LOST_IN_BF16, autocast=False, activations=mixed)
    body = _NOTHING
    if made:
        imports = ", ".join(dict.fromkeys(cls for cls, _ in made))
        body = fill("torchtitan", request, IMPORTS=imports, CONVERTERS="".join(_call(*one) for one in made))
    notes = [
        "--training.mixed_precision_param bfloat16; layers without FP8 run in bf16",
        "layer names must be torchtitan's own (layers.0.feed_forward.w1): the policy must be one for its model",
        "needs torchtitan 0.3 or newer",
    ]
    return {"precision_torchtitan.py": header(request, "torchtitan") + body}, notes


def _converters(recipes: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the converters for layers' recipes, which are changed to what layers get; a name "" is every layer."""
    experts = [name for name in recipes if expert(name)]
    grouped = max(sorted({recipes[n] for n in experts}), key=[recipes[n] for n in experts].count) if experts else ""
    recipes |= dict.fromkeys(experts, grouped)
    made: list[tuple[str, dict[str, Any]]] = []
    for recipe in [*_FLOAT8, *_LINEAR]:
        taken = [name for name in recipes if recipes[name] == recipe and not expert(name)]
        others = [name for name in recipes if recipes[name] != recipe and not expert(name)]
        if taken and recipe in _FLOAT8:
            skipped, stuck = substrings(others, taken)
            made.append(("Float8LinearConverter", {"recipe_name": recipe, "filter_fqns": skipped}))
            # of several converters that take a layer the last one has it
            recipes |= {name: recipe for name in stuck if recipes[name] in ("", *_FLOAT8)}
        elif taken:
            listed, stuck = substrings(taken, others)
            if listed:
                made.append((_LINEAR[recipe], {"fqns": [part for part in listed if part]}))
            recipes |= dict.fromkeys(stuck, "")
    return [*made, (_EXPERTS[grouped], {})] if grouped else made


def _call(cls: str, fields: dict[str, Any]) -> str:
    lines = [f"{name}={literal(value)}" for name, value in fields.items()]
    lines += ["emulate=emulate"] if cls == "Float8LinearConverter" else []
    lines.append("model_compile_enabled=model_compile_enabled")
    return f"        {cls}.Config(\n" + "".join(f"            {line},\n" for line in lines) + "        ),\n"
