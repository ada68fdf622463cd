"""``--to torchtitan``: its quantization converters, one for each recipe that torchtitan has a word for.

``filter_fqns`` (what a converter skips) and ``fqns`` (what it takes) are *substrings*: ``layers.1`` is in ``layers.10``
too. Both lists are therefore built from the model's layer names and checked against them. Experts are one module with a
weight of three dimensions there, and their converters take them all.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import expert, header, literal, substrings
from autoprec.export.settings import report_settings
from autoprec.export.stacks.torchao import NAMED
from autoprec.export.summary import lose_rule, main_plan, other_dtype
from autoprec.export.words import Words
from autoprec.policy import LayerPlan, glob_matches
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

_BODY = '''from torchtitan.components.quantization import @IMPORTS@


def converters(model_compile_enabled=True, emulate=False):
    """Use in a config function: model_registry(..., converters=converters()).

    emulate=True, with model_compile_enabled=False, runs without FP8 hardware; torchtitan emulates one scale per tensor.
    """
    return [
@CONVERTERS@    ]
'''


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


_IN_BF16 = "bf16 in and out, accumulated in fp32 inside the kernel (FSDP2's mixed precision, no autocast)"
_KEPT = dict.fromkeys(("loss", "output"), "torchtitan's loss casts the model's output to fp32")
_LOST = {"softmax": _IN_BF16, "norm": _IN_BF16, "embedding": "bf16"}


def write(request: Request, losses: Losses) -> Written:
    """Return ``precision_torchtitan.py``."""
    made = _with_layers(request, losses) if request.layers else _without_layers(request, losses)
    for rule in request.rules():
        if not rule.plan.scaled and other_dtype(rule.plan, "bf16", request.policy.activations):
            lose_rule(losses, rule, "bf16")
    if request.policy.activations != "bf16":
        losses.add(f"activations: {request.policy.activations}", "bf16 (torchtitan's mixed precision)")
    report_settings(request, losses, "torchtitan scales no loss", kept=_KEPT, lost=_LOST, autocast=False)
    body = _NOTHING
    if made:
        imports = ", ".join(dict.fromkeys(cls for cls, _ in made))
        body = _BODY.replace("@IMPORTS@", imports).replace("@CONVERTERS@", "".join(_call(*one) for one in made))
    notes = [
        "--training.mixed_precision_param bfloat16; layers without FP8 run in bf16",
        "layer names must be torchtitan's own (layers.0.feed_forward.w1): the policy must be one for its model",
        "needs torchtitan 0.3 or newer",
    ]
    return {"precision_torchtitan.py": header(request, "torchtitan") + body}, notes


def _words(plan: LayerPlan, recipe: str) -> str:
    return _WORDS.lost(plan, recipe, "bf16") if recipe or plan.scaled else ""


def _with_layers(request: Request, losses: Losses) -> list[tuple[str, dict[str, Any]]]:
    plans = request.plans()
    recipes = {name: nearest_converter(plan, name) for name, plan in plans.items()}
    experts = [name for name in plans if expert(name)]
    grouped = max(sorted({recipes[n] for n in experts}), key=[recipes[n] for n in experts].count) if experts else ""
    recipes |= dict.fromkeys(experts, grouped)
    made: list[tuple[str, dict[str, Any]]] = []
    for recipe in [*_FLOAT8, *_LINEAR]:
        taken = [name for name in plans if recipes[name] == recipe and not expert(name)]
        others = [name for name in plans if recipes[name] != recipe and not expert(name)]
        if taken and recipe in _FLOAT8:
            skipped, stuck = substrings(others, taken)
            made.append(("Float8LinearConverter", {"recipe_name": recipe, "filter_fqns": skipped}))
            # of several converters that take a layer the last one has it
            recipes |= {name: recipe for name in stuck if recipes[name] in ("", *_FLOAT8)}
        elif taken:
            listed, stuck = substrings(taken, others)
            if listed:
                made.append((_LINEAR[recipe], {"fqns": listed}))
            recipes |= dict.fromkeys(stuck, "")
    if grouped:
        made.append((_EXPERTS[grouped], {}))
    for name, plan in plans.items():
        words = _words(plan, recipes[name])
        if words and recipes[name] == nearest_converter(plan, name):
            lose_rule(losses, next(r for r in request.rules() if glob_matches(r.match, name)), words)
        elif words:
            losses.add(plan.describe(), words, name)
    return made


def _without_layers(request: Request, losses: Losses) -> list[tuple[str, dict[str, Any]]]:
    main = main_plan(request)
    recipe = nearest_converter(main) if main is not None else ""
    for rule in request.rules():
        if rule.plan == main and (words := _words(rule.plan, recipe)):
            lose_rule(losses, rule, words)
        elif main is not None and rule.plan != main:
            lose_rule(losses, rule, f"{main.describe()} (substrings need layer names: pass --layers)")
    if recipe in _FLOAT8:
        return [("Float8LinearConverter", {"recipe_name": recipe, "filter_fqns": []})]
    return [(_LINEAR[recipe], {"fqns": []})] if recipe else []


def _call(cls: str, fields: dict[str, Any]) -> str:
    lines = [f"{name}={literal(value)}" for name, value in fields.items()]
    lines += ["emulate=emulate"] if cls == "Float8LinearConverter" else []
    lines.append("model_compile_enabled=model_compile_enabled")
    return f"        {cls}.Config(\n" + "".join(f"            {line},\n" for line in lines) + "        ),\n"
