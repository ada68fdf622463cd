"""``--to dlfw-inspect``: nvidia-dlfw-inspect's YAML, which takes layers or single GEMMs out of FP8 without code.

A layer may be in one section only, so each rule's pattern excludes what earlier rules match. What is left in FP8 runs
the recipe of the training script's own ``te.autocast``; the export names it.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Export, Losses, Request, state_losses
from autoprec.export.naming import header
from autoprec.export.operators import autocast_operators
from autoprec.export.stacks.python import operator_losses
from autoprec.export.stacks.transformer_engine import nearest_te, nested_recipe
from autoprec.export.summary import lose_rule, main_plan
from autoprec.policy import LayerPlan, dump_yaml, glob_regex
from autoprec.precision.recipes import GEMMS

__all__ = ["DlfwInspectExporter", "section_pattern"]


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


class DlfwInspectExporter:
    """nvidia-dlfw-inspect for Transformer Engine models."""

    name = "dlfw-inspect"
    summary = "nvidia-dlfw-inspect: YAML that switches layers and GEMMs of a Transformer Engine model"

    def export(self, request: Request) -> Export:
        """Return ``dlfw_inspect.yaml``."""
        losses = Losses()
        rules = request.rules()
        main = main_plan(request)
        near = nearest_te(LayerPlan.uniform(main.scaled[0]))[0] if main else None
        target = near.fprop if near is not None and near.fprop is not None and near.fprop.scaled else None
        sections: dict[str, Any] = {}
        earlier: list[str] = []
        for index, rule in enumerate(rules):
            if any(recipe != target for recipe in rule.plan.scaled):
                lose_rule(losses, rule, f"{target.describe() if target else 'bf16'}: one recipe per run")
            plain = [r for r in rule.plan.recipes if r is not None and not r.scaled]
            if any(r.format != "bf16" for r in plain):
                lose_rule(losses, rule, "the dtype of the activations where FP8 is switched off")
            features = _features(rule.plan)
            if features:
                pattern = section_pattern(rule.match, earlier)
                sections[f"rule_{index:02d}" if rule.match != "*" else "default"] = {
                    "enabled": True,
                    "layers": {"layer_name_regex_pattern": pattern},
                    "transformer_engine": features,
                }
            earlier.append(rule.match)
        operator_losses(request, losses)
        autocast_operators(request, losses, lost="the autocast dtype: cast the logits in the script")
        state_losses(request, losses)
        notes = [
            "debug_api.initialize(config_file='dlfw_inspect.yaml', feature_dirs=[...]) before the first TE module, "
            "then debug_api.infer_and_assign_layer_names(model)",
            "for diagnosis: the debug path of Transformer Engine is slow",
        ]
        if target is not None:
            source, coarser = nested_recipe(LayerPlan.uniform(target))
            notes.append(f"run the model under te.autocast(recipe={source})" + (f" ({coarser})" if coarser else ""))
        text = dump_yaml(sections) if sections else "{}\n"
        return Export(
            self.name,
            {"dlfw_inspect.yaml": header(request, "dlfw-inspect") + text},
            losses.done(),
            tuple(notes),
            losses.kept,
        )
