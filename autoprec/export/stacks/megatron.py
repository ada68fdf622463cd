"""``--to megatron``: ``--te-precision-config-file`` (ordered globs, first match wins, as ours) and launch flags.

Megatron-Core reads ``configs`` and ``matchers`` (megatron/core/quantization/quant_config.py); a recipe is one
built-in for a whole layer (``TEQuantizationRecipe``). Delayed scaling exists globally only, so it becomes flags, and
its layers get a matcher that inherits the global context.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, name_plans
from autoprec.export.settings import report_settings
from autoprec.export.stacks.transformer_engine import builtin_plan, fp8_format, keywords, scaling_of
from autoprec.export.summary import changes, current_scaling, lose
from autoprec.policy import LayerPlan, dump_yaml
from autoprec.precision.recipes import Recipe

_OPTIMIZER = {
    "gradients": ("--main-grads-dtype", {"bf16": "bf16"}),
    "weights": ("--main-params-dtype", {"fp16_scaled": "fp16"}),
    "exp_avg": ("--exp-avg-dtype", {"bf16": "bf16", "e4m3": "fp8"}),
    "exp_avg_sq": ("--exp-avg-sq-dtype", {"fp16_scaled": "fp16"}),
}


#: How Transformer Engine scales -> Megatron's word.
NAMES = {"tensor": "tensorwise", "block": "blockwise", "mxfp8": "mxfp8"}
#: Fields of Megatron's TEQuantizationRecipe (core/extensions/transformer_engine.py).
TRAINING_KEYS = (
    *("fp8_quantization_recipe", "fp4_quantization_recipe", "custom_recipe_factory", "fp8_format", "tp_only_amax_red"),
    *("override_quantized_autocast", "override_nonquantized_autocast"),
)
_ALL_ON = {"hadamard": True, "stochastic_rounding": True, "weight_2d": True}


def _runs(recipe: Recipe, delayed: bool) -> LayerPlan:
    """Return what Megatron runs in a layer for a recipe; ``delayed``: the run's own delayed recipe is this one."""
    plan = builtin_plan(recipe)
    first = plan.scaled[0] if plan.scaled else None
    if first is None:
        return plan
    if first.format == "nvfp4":
        return LayerPlan.uniform(first.model_copy(update=_ALL_ON))
    if first.scaling is not None and first.scaling.scale == "delayed" and not delayed:
        return builtin_plan(first.model_copy(update={"scaling": current_scaling(first.scaling)}))
    return plan


def _training_recipe(plan: LayerPlan) -> dict[str, Any]:
    """Return Megatron's words for what it runs in a layer; delayed scaling is inherited from the flags."""
    if not plan.scaled:
        return {}
    recipe, enabled = plan.scaled[0], {"override_nonquantized_autocast": True}
    if recipe.format == "nvfp4":
        return {"fp4_quantization_recipe": "nvfp4", **enabled}
    if scaling_of(recipe) == "delayed":
        return {"override_quantized_autocast": False}
    return {"fp8_quantization_recipe": NAMES[scaling_of(recipe)], "fp8_format": fp8_format(recipe).lower(), **enabled}


def _delayed_flags(recipe: Recipe) -> list[str]:
    words = (f"--fp8-{name.replace('_', '-')} {value}" for name, value in keywords(recipe).items())
    return [f"--fp8-format {fp8_format(recipe).lower()}", "--fp8-recipe delayed", *words]


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
    held, sent = request.policy.optimizer.gradients, request.policy.communication.gradients
    low = "bf16" in (held, sent)
    if sent == "bf16":
        flags.append("--grad-reduce-in-bf16")
    # one buffer is both what gradients are accumulated in and what is reduced
    if sent != ("bf16" if low else "fp32"):
        losses.add(
            f"communication.gradients: {sent}", "bf16: gradients are reduced as they are held" if low else "fp32"
        )
    if held == "fp32" and low:
        losses.add("optimizer.gradients: fp32", "bf16: gradients are held as they are reduced")
    return flags


#: Megatron's modules run in bf16 as a whole; what it computes in FP32 it computes so itself, or is told to by a flag.
_FLAGS = {"softmax": "--attention-softmax-in-fp32", "embedding": "--fp32-residual-connection"}
_KEPT = {
    "softmax": _FLAGS["softmax"],
    "norm": "its norm kernels compute in fp32 inside",
    "embedding": f"{_FLAGS['embedding']} casts the embedding's output",
    "loss": "its cross entropy computes in fp32 (without --fp16-lm-cross-entropy)",
    "output": "Float16Module returns fp32",
}


def _evaluation(request: Request, plan: LayerPlan) -> dict[str, Any]:
    """Return the evaluation recipe that a plan's layers had in the configuration that was imported."""
    known = request.policy.evidence.get("evaluation")
    for name, recipe in known.items() if isinstance(known, dict) else ():
        if request.policy.recipes.get(name) == plan.fprop:
            return {"evaluation_recipe": recipe}
    return {}


def write(request: Request, losses: Losses) -> Written:
    """Return ``te_precision_config.yaml`` and ``megatron_flags.txt``."""
    rules = request.rules()
    names = name_plans(request.policy, rules)
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    flags = ["--fp16" if request.policy.activations == "fp16" else "--bf16"]
    dtype = flags[0].removeprefix("--")
    delayed: Recipe | None = None
    ran: dict[LayerPlan, LayerPlan] = {}
    for index, rule in enumerate(rules):
        runs = LayerPlan()
        if rule.plan.scaled:
            first = rule.plan.scaled[0]
            runs = _runs(first, delayed in (None, first))
            if any(r.scaling is not None and r.scaling.scale == "delayed" for r in runs.scaled) and delayed is None:
                delayed = first
                flags += _delayed_flags(runs.scaled[0])
        ran[rule.plan] = runs
        recipe = _training_recipe(runs)
        configs[names[rule.plan]] = {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": recipe,
            **_evaluation(request, rule.plan),
        }
        key = f"rule_{index:02d}" if index < len(rules) - 1 else "default"
        pattern = rule.match
        matchers[key] = {"config": names[rule.plan], "type": "glob", "pattern": pattern, "enabled": True}
    lose(
        losses,
        request,
        lambda plan, _: changes(plan, ran[plan], dtype, request.policy.activations),
        "Megatron has one built-in recipe per layer, one delayed per run",
    )
    flags += [flag for name, flag in _FLAGS.items() if getattr(request.policy.operators, name) == "fp32"]
    flags += _state_flags(request, losses)
    flags.append("--te-precision-config-file te_precision_config.yaml")
    report_settings(
        request,
        losses,
        "Megatron scales the loss under --fp16, and only there",
        scales=dtype == "fp16",
        kept=_KEPT,
        lost={"attention": "attention as Megatron runs it"},
        autocast=False,
        own=("optimizer", "gradients"),
        activations=f"{dtype}: Megatron trains in bf16 or fp16 as a whole",
    )
    files = {
        "te_precision_config.yaml": header(request, "Megatron") + dump_yaml({"configs": configs, "matchers": matchers}),
        "megatron_flags.txt": "\n".join(flags) + "\n",
    }
    notes = (
        "matchers see Megatron's module names (decoder.layers.0.self_attention.linear_qkv): the policy must be "
        "one for the Megatron model",
    )
    return files, notes
