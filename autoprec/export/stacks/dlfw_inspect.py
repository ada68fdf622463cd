"""``--to dlfw-inspect``: nvidia-dlfw-inspect's YAML, which takes layers or single GEMMs out of FP8 without code.

A layer may be in one section only, so each rule's pattern excludes what earlier rules match. What is left in FP8 runs
the recipe of the training script's own ``te.autocast``; the export names it.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, literal
from autoprec.export.settings import CAST_LOGITS, SCALER, by_script, report_settings
from autoprec.export.stacks.transformer_engine import SCALINGS, builtin_plan, fp8_format, keywords, scaling_of
from autoprec.export.summary import changes, lose, main_plan
from autoprec.policy import LayerPlan, dump_yaml, glob_regex
from autoprec.precision.recipes import GEMMS, Recipe

#: The loader refuses a file without a section; this one matches no layer, so that nothing is switched off.
_NOTHING = {"nothing": {"enabled": True, "layers": {"layer_name_regex_pattern": r"(?!)"}, "transformer_engine": {}}}


def section_pattern(match: str, earlier: list[str]) -> str:
    """Return the regular expression of what ``match`` matches and no earlier glob does.

    ``infer_and_assign_layer_names`` puts ``model.`` before every name, which is allowed for.
    """
    excluded = "".join(rf"(?!(?:model\.)?(?:{glob_regex(glob)})$)" for glob in earlier)
    return rf"^{excluded}(?:model\.)?(?:{glob_regex(match)})$"


def _features(plan: LayerPlan) -> dict[str, Any]:
    off = [gemm for gemm, r in zip(GEMMS, plan.recipes, strict=True) if r is None or not r.scaled]
    if len(off) == len(GEMMS):
        return {"DisableQuantizationLayer": {"enabled": True}}
    return {"DisableQuantizationGEMM": {"enabled": True, "gemms": off}} if off else {}


def _builtin(recipe: Recipe) -> str:
    """Return the call of Transformer Engine's own recipe of that kind."""
    forms = [] if recipe.format == "nvfp4" else [f"fp8_format=recipe.Format.{fp8_format(recipe)}"]
    words = [f"{name}={literal(value)}" for name, value in keywords(recipe).items()]
    return f"recipe.{SCALINGS[scaling_of(recipe)][0]}({', '.join([*forms, *words])})"


def _switched(runs: LayerPlan, plan: LayerPlan) -> LayerPlan:
    """Return what a layer runs under a recipe with its own products switched off as the plan says."""
    pairs = zip(GEMMS, plan.recipes, runs.recipes, strict=True)
    return LayerPlan(**{gemm: other for gemm, own, other in pairs if own is not None and own.scaled})


def write(request: Request, losses: Losses) -> Written:
    """Return ``dlfw_inspect.yaml``."""
    rules = request.rules()
    main = main_plan(request)
    runs = builtin_plan(main.scaled[0]) if main else LayerPlan()
    dtype = request.policy.activations
    sections: dict[str, Any] = {}
    earlier: list[str] = []
    for index, rule in enumerate(rules):
        features = _features(rule.plan)
        if features:
            pattern = section_pattern(rule.match, earlier)
            sections[f"rule_{index:02d}" if index < len(rules) - 1 else "default"] = {
                "enabled": True,
                "layers": {"layer_name_regex_pattern": pattern},
                "transformer_engine": features,
            }
        earlier.append(rule.match)
    why = "one recipe per run, Transformer Engine's own"
    lose(losses, request, lambda plan, _: changes(plan, _switched(runs, plan), dtype), why)
    report_settings(request, losses, SCALER, lost=CAST_LOGITS, activations=by_script(request))
    notes = [
        "debug_api.initialize(config_file='dlfw_inspect.yaml', feature_dirs=[...]) before the first TE module, "
        "then debug_api.infer_and_assign_layer_names(model)",
        "for diagnosis: the debug path of Transformer Engine is slow",
    ]
    if runs.scaled:
        # of the whole layer: what a policy says of its single GEMMs is in the sections
        notes.append(f"run the model under te.autocast(recipe={_builtin(runs.scaled[0])})")
    return {"dlfw_inspect.yaml": header(request, "dlfw-inspect") + dump_yaml(sections or _NOTHING)}, notes
