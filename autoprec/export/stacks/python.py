"""``--to python``: one module that needs only PyTorch; ``--to lightning``: that, and a ``Precision`` plugin around it.

The plugin is for Fabric and for the Trainer.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, literal, name_plans, rule_table
from autoprec.export.settings import IN_FORWARD, LOOKUP, SCALER, report_settings
from autoprec.export.snippets import template
from autoprec.export.summary import changes, lose
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Recipe

_START = "# --- the policy ---"
_END = "# --- the mechanics ---"
_PLAIN = {"fp32", "bf16", "fp16"}


def _nearest_recipe(recipe: Recipe | None) -> Recipe | None:
    if recipe is None or recipe.format in (*_PLAIN, "fp8"):
        return recipe
    return BUILTIN_RECIPES["fp32" if recipe.format == "tf32" else "bf16"]


def _recipe(recipe: Recipe | None) -> dict[str, Any] | None:
    """Return a recipe as the module reads it."""
    if recipe is None:
        return None
    if recipe.scaling is None or recipe.operands is None:
        return {"format": recipe.format} | ({"output": "fp32"} if recipe.output == "fp32" else {})
    out: dict[str, Any] = {"format": "fp8", **recipe.operands.model_dump()}
    out |= {k: v for k, v in recipe.scaling.model_dump().items() if k in recipe.to_dict()["scaling"]}
    return out | ({"accumulation": "fast"} if recipe.accumulation == "fast" else {})


def standalone_source(request: Request, losses: Losses) -> str:
    """Return the module's text: the mechanics of :mod:`.standalone` with this policy's tables."""
    rules = request.rules()
    names = name_plans(request.policy, rules)
    runs = {rule.plan: LayerPlan(**{gemm: _nearest_recipe(rule.plan.recipe(gemm)) for gemm in GEMMS}) for rule in rules}
    why = "the module knows fp32, bf16, fp16 and fp8"
    lose(losses, request, lambda plan, _: changes(plan, runs[plan], request.policy.activations), why)
    plans = {
        names[plan]: {gemm: _recipe(one.recipe(gemm)) for gemm in GEMMS} for plan, one in runs.items() if not plan.keeps
    }
    own = resources.files("autoprec.export").joinpath("standalone.py").read_text(encoding="utf-8")
    before, rest = own.split(_START, 1)
    ruler, after = rest.split(_END, 1)[0].split("\n", 1)[0], rest.split(_END, 1)[1]
    policy = request.policy
    kinds = [k for k in ("softmax", "norm", "loss", "output") if getattr(policy.operators, k) == "fp32"]
    protected = "(" + "".join(f'"{kind}", ' for kind in kinds).rstrip() + ")" if kinds else "()"
    table = (
        f"{_START}{ruler}\n"
        "# plan -> recipe of each product; None leaves it as the script wrote it\n"
        f"PLANS: dict[str, dict[str, Any]] = {literal(plans)}\n"
        "# (regular expression on module names, plan); the first match wins\n"
        f"RULES: list[tuple[str, str]] = {rule_table(rules, names)}\n"
        f'ACTIVATIONS = "{request.policy.activations}"  # autocast dtype around the model: keep, bf16 or fp16\n'
        f'ATTENTION = "{policy.operators.attention}"  # dtype of scaled_dot_product_attention\n'
        f"PROTECTED: tuple[str, ...] = {protected}  # computed in fp32 under autocast: softmax, norm, loss, output\n"
        f"EMBEDDING_GRADIENT = {policy.embedding_gradient!r}  "
        "# share of their gradient that the tables of embeddings get\n"
    )
    return header(request, "Plain PyTorch") + before + table + _END + after


def write(request: Request, losses: Losses) -> Written:
    """Return ``precision_policy.py``."""
    source = standalone_source(request, losses)
    # the module protects operators itself, inside the model's forward
    by = dict.fromkeys(("softmax", "norm", "loss", "output", "attention", "wide", "embedding_gradient"), IN_FORWARD)
    report_settings(request, losses, SCALER, kept=by | LOOKUP, autocast=False)
    return {"precision_policy.py": source}, ("import precision_policy; precision_policy.apply(model)",)


def write_lightning(request: Request, losses: Losses) -> Written:
    """Return ``precision_policy.py`` and ``precision_lightning.py``."""
    files, _ = write(request, losses)
    files = {**files, "precision_lightning.py": header(request, "Lightning") + template("lightning")}
    return files, ("Trainer(plugins=[PolicyTrainerPrecision(prefix='model')])",)
