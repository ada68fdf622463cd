"""Names of plans, and rules as exported Python sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoprec.export.base import Request, RulePlan
from autoprec.policy import LayerPlan, Policy, glob_regex
from autoprec.precision.recipes import GEMMS, KEEP, Recipe

#: plain format -> the torch dtype as exported Python writes it
TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def recipe_name(policy: Policy, recipe: Recipe | None) -> str:
    """Return the policy's own name of a recipe."""
    if recipe is None:
        return KEEP
    return next((name for name, known in policy.recipes.items() if known == recipe), recipe.format)


def name_plans(policy: Policy, rules: Iterable[RulePlan]) -> dict[LayerPlan, str]:
    """Return a short unique name, usable as a Python name, for every distinct plan of the rules."""
    names: dict[LayerPlan, str] = {}
    for rule in rules:
        if rule.plan in names:
            continue
        used = [recipe_name(policy, rule.plan.recipe(gemm)) for gemm in GEMMS]
        name = used[0] if len(set(used)) == 1 else "_".join(f"{g}_{n}" for g, n in zip(GEMMS, used, strict=True))
        name = re.sub(r"\W", "_", name)
        name = name if name[:1].isalpha() else f"plan_{name}"
        while name in names.values():
            name += "_"
        names[rule.plan] = name
    return names


def rule_table(rules: Iterable[RulePlan], names: Mapping[LayerPlan, str]) -> str:
    """Return the Python list of (regular expression, plan name), one per line, first match wins."""
    lines = [f"    ({literal(glob_regex(rule.match))}, {literal(names[rule.plan])})," for rule in rules]
    return "[\n" + "\n".join(lines) + "\n]"


def substrings(wanted: Sequence[str], others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (substrings that are in every name of ``wanted`` and in none of ``others``, names none separates).

    Short common parts are preferred: ``attention.wo`` rather than 32 full names.
    """
    out: list[str] = []
    stuck: list[str] = []
    for name in wanted:
        if any(part in name for part in out):
            continue
        parts = name.split(".")
        options = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
        usable = [option for option in options if not any(option in other for other in others)]
        if usable:
            out.append(max(usable, key=lambda option: (sum(option in other for other in wanted), -len(option))))
        else:
            stuck.append(name)
    return out, stuck


def expert(name: str) -> bool:
    """Say whether a layer is one of a model's grouped experts rather than a linear layer."""
    return any(part.removesuffix("s") == "expert" or part.endswith("_experts") for part in name.split("."))


def literal(value: Any, indent: int = 0) -> str:
    """Return plain data as Python source with double quotes, dictionaries of dictionaries one key per line."""
    pad = " " * (indent + 4)
    if isinstance(value, dict) and any(isinstance(item, (dict, list)) for item in value.values()):
        rows = [f"{pad}{literal(key)}: {literal(item, indent + 4)},\n" for key, item in value.items()]
        return "{\n" + "".join(rows) + " " * indent + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    # not as JSON spells it in ASCII: its pair of surrogates is two characters to Python
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def header(request: Request, target: str) -> str:
    """Return the comment that says where a file comes from."""
    policy = request.policy
    model = f" for {policy.model.class_name}" if policy.model else ""
    # every control character and line separator: a name must not end the comment it stands in
    what = "".join(char if char.isprintable() else " " for char in f"{request.name}{model}")
    return f"# {target} form of the AutoPrec policy {what}; written by `autoprec export`\n"
