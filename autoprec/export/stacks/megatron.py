"""``--to megatron``: ``--te-precision-config-file`` (ordered globs, first match wins, as ours) and launch flags.

Megatron-Core reads ``configs`` and ``matchers`` (megatron/core/quantization/quant_config.py); a recipe is one
built-in for a whole layer (``TEQuantizationRecipe``). Delayed scaling exists globally only, so it becomes flags, and
its layers get a matcher that inherits the global context.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Export, Losses, Request, RulePlan
from autoprec.export.naming import header, name_plans
from autoprec.export.operators import report_operators
from autoprec.export.summary import high_dtype, lose_rule
from autoprec.policy import LayerPlan, dump_yaml
from autoprec.precision.recipes import Recipe

__all__ = ["MegatronExporter"]

_OPTIMIZER = {
    "gradients": ("--main-grads-dtype", {"bf16": "bf16"}),
    "weights": ("--main-params-dtype", {"fp16_scaled": "fp16"}),
    "exp_avg": ("--exp-avg-dtype", {"bf16": "bf16", "e4m3": "fp8"}),
    "exp_avg_sq": ("--exp-avg-sq-dtype", {"fp16_scaled": "fp16"}),
}


def _format_of(recipe: Recipe, losses: Losses, rule: RulePlan) -> str:
    if recipe.operand_format("input") != "e4m3" or recipe.operand_format("weight") != "e4m3":
        lose_rule(losses, rule, "e4m3 input and weight")
    return "hybrid" if recipe.operand_format("grad_output") == "e5m2" else "e4m3"


def _training_recipe(recipe: Recipe, losses: Losses, rule: RulePlan) -> dict[str, Any] | None:
    """Return Megatron's recipe for a layer; None for delayed scaling, which only flags can ask for."""
    enabled = {"override_nonquantized_autocast": True}
    if recipe.format == "nvfp4":
        if not (recipe.hadamard and recipe.stochastic_rounding and recipe.weight_2d):
            lose_rule(losses, rule, "nvfp4 with Hadamard, stochastic rounding and 2-D weight scales")
        return {"fp4_quantization_recipe": "nvfp4", **enabled}
    if recipe.format == "int8":
        lose_rule(losses, rule, "bf16")
        return {}
    if recipe.format == "mxfp8" or recipe.scaling is None:
        return {"fp8_quantization_recipe": "mxfp8", "fp8_format": _format_of(recipe, losses, rule), **enabled}
    if recipe.scaling.scale == "delayed":
        return None
    names = {"tensor": "tensorwise", "row": "tensorwise", "block": "blockwise"}
    if recipe.scaling.granularity == "row":
        lose_rule(losses, rule, "one scale per tensor (Transformer Engine has none per row)")
    elif recipe.scaling.power_of_2 != (recipe.scaling.granularity == "block"):
        wanted = "power-of-two" if recipe.scaling.granularity == "block" else "exact"
        lose_rule(losses, rule, f"{wanted} scales")
    name = names[recipe.scaling.granularity]
    return {"fp8_quantization_recipe": name, "fp8_format": _format_of(recipe, losses, rule), **enabled}


def _delayed_flags(recipe: Recipe, losses: Losses, rule: RulePlan) -> list[str]:
    scaling = recipe.scaling
    if scaling is None:
        return []
    if scaling.power_of_2:
        lose_rule(losses, rule, "scales that are not powers of two")
    return [
        f"--fp8-format {_format_of(recipe, losses, rule)}",
        "--fp8-recipe delayed",
        f"--fp8-margin {scaling.margin}",
        f"--fp8-amax-history-len {scaling.amax_history_len}",
        f"--fp8-amax-compute-algo {scaling.amax_compute_algo}",
    ]


def _state_flags(request: Request, losses: Losses) -> list[str]:
    flags = []
    for name, (flag, known) in _OPTIMIZER.items():
        value = getattr(request.policy.optimizer, name, "fp32")
        if value in known:
            flags.append(f"{flag} {known[value]}")
        elif value != "fp32":
            losses.add(f"optimizer.{name}: {value}", "fp32")
    if flags:
        flags = ["--use-distributed-optimizer", "--use-precision-aware-optimizer", *flags]
    gradients = request.policy.communication.gradients
    if gradients == "bf16":
        flags.append("--grad-reduce-in-bf16")
    elif gradients != "fp32":
        losses.add(f"communication.gradients: {gradients}", "fp32")
    return flags


#: Megatron's modules run in bf16 as a whole; what it computes in FP32 it computes so itself, or is told to by a flag.
_KEPT = {
    "softmax": "--attention-softmax-in-fp32",
    "norm": "its norm kernels compute in fp32 inside",
    "embedding": "--fp32-residual-connection casts the embedding's output",
    "loss": "its cross entropy computes in fp32 (without --fp16-lm-cross-entropy)",
    "output": "Float16Module returns fp32",
}


def _operator_flags(request: Request, losses: Losses) -> list[str]:
    report_operators(request, losses, _KEPT, {"attention": "attention as Megatron runs it"})
    wanted = {"softmax": "--attention-softmax-in-fp32", "embedding": "--fp32-residual-connection"}
    return [flag for name, flag in wanted.items() if getattr(request.policy.operators, name) == "fp32"]


class MegatronExporter:
    """Megatron-LM / Megatron-Core."""

    name = "megatron"
    summary = "Megatron-LM: --te-precision-config-file YAML and launch flags"

    def export(self, request: Request) -> Export:
        """Return ``te_precision_config.yaml`` and ``megatron_flags.txt``."""
        losses = Losses()
        rules = request.rules()
        names = name_plans(request.policy, rules)
        configs: dict[str, Any] = {}
        matchers: dict[str, Any] = {}
        flags = ["--fp16" if request.policy.activations == "fp16" else "--bf16"]
        if request.policy.activations == "keep":
            losses.add("activations: keep", "bf16: Megatron trains in bf16 or fp16 as a whole")
        delayed: LayerPlan | None = None
        for index, rule in enumerate(rules):
            recipe: dict[str, Any] | None = {}
            if rule.plan.scaled:
                first = rule.plan.scaled[0]
                if len(set(rule.plan.recipes)) > 1:
                    lose_rule(losses, rule, f"{first.describe()} for all three products")
                recipe = _training_recipe(first, losses, rule)
                if recipe is None and delayed in (None, rule.plan):
                    if delayed is None:
                        flags += _delayed_flags(first, losses, rule)
                    delayed = rule.plan
                    recipe = {"override_quantized_autocast": False}
                elif recipe is None:
                    lose_rule(losses, rule, "current scaling per tensor (one delayed recipe per run)")
                    form = _format_of(first, losses, rule)
                    recipe = {"fp8_quantization_recipe": "tensorwise", "fp8_format": form}
                    recipe["override_nonquantized_autocast"] = True
            elif high_dtype(request, rule.plan) not in ("keep", flags[0].removeprefix("--")):
                lose_rule(losses, rule, flags[0].removeprefix("--"))
            configs[names[rule.plan]] = {
                "transformer_engine_config_type": "TEQuantizationParams",
                "training_recipe": recipe,
            }
            key = f"rule_{index:02d}" if rule.match != "*" else "default"
            pattern = rule.match
            matchers[key] = {"config": names[rule.plan], "type": "glob", "pattern": pattern, "enabled": True}
        flags += _operator_flags(request, losses)
        flags += _state_flags(request, losses)
        flags.append("--te-precision-config-file te_precision_config.yaml")
        if request.policy.loss_scaling == "dynamic" and flags[0] != "--fp16":
            losses.add("loss_scaling: dynamic", "none (Megatron scales the loss under --fp16)")
        files = {
            "te_precision_config.yaml": header(request, "Megatron")
            + dump_yaml({"configs": configs, "matchers": matchers}),
            "megatron_flags.txt": "\n".join(flags) + "\n",
        }
        notes = (
            "matchers see Megatron's module names (decoder.layers.0.self_attention.linear_qkv): the policy must be "
            "one for the Megatron model",
        )
        return Export(self.name, files, losses.done(), notes, losses.kept)
