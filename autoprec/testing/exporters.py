"""The conformance suite of exporters: what an export runs, per layer and GEMM, is what the policy says, or is listed.

A third-party exporter passes it by giving :func:`check_exporter` a *reader*: a function that loads the exported files
as the target would and says what each layer runs. Readers for the built-in targets are in
:mod:`autoprec.testing.readers`; those of installable targets ask the real library.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from autoprec.export import Export, Exporter, Request
from autoprec.export.operators import OPERATORS
from autoprec.policy import Policy, glob_matches, policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm, Recipe

__all__ = [
    "MODELS",
    "POLICIES",
    "Executed",
    "Reader",
    "check_exporter",
    "check_files",
    "check_operators",
    "gemm_label",
    "requests",
]

#: layer -> GEMM -> label of :func:`gemm_label`; ``high`` stands for "the dtype of the activations".
Executed = Mapping[str, Mapping[str, str]]
Reader = Callable[[Export, Request], Executed]

#: Layer names of five models: GPT-2 like, Llama like, ViT, MLP, mixture of experts.
MODELS: dict[str, tuple[str, ...]] = {
    "gpt": (
        *(f"transformer.h.{i}.{part}" for i in range(3) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")),
        "lm_head",
    ),
    "llama": (
        *(f"model.layers.{i}.{part}" for i in range(11) for part in ("self_attn.o_proj", "mlp.up_proj")),
        "lm_head",
    ),
    "vit": ("patch_embed", *(f"blocks.{i}.{part}" for i in range(4) for part in ("qkv", "proj", "fc1", "fc2")), "head"),
    "mlp": ("0", "2", "4"),
    "moe": tuple(
        f"layers.{i}.{part}" for i in range(2) for part in ("wq", "wo", "router", "experts.0.w1", "experts.1.w1")
    ),
}

_NAMES = ("bf16", "fp32", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "int8")


def _policy(default: str, *rules: dict[str, Any], **rest: Any) -> Policy:
    used = {default, *(rule["recipe"] for rule in rules), *(n for r in rules for n in r.get("gemms", {}).values())}
    recipes = {name: BUILTIN_RECIPES[name].to_dict() for name in _NAMES if name in used}
    layers = [{**rule, "optional": True} for rule in rules]
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": layers, "default": default}
    return policy_from_dict({**document, "activations": "bf16", **rest})


#: Policies that together use everything a target may be asked for.
POLICIES: dict[str, Policy] = {
    "empty": _policy("keep", activations="keep"),
    "bf16": _policy("bf16"),
    "tensorwise everywhere": _policy("fp8_tensorwise"),
    "rowwise but the ends": _policy(
        "fp8_rowwise",
        {"match": "*head", "recipe": "bf16"},
        {"match": "*embed", "recipe": "bf16"},
        {"match": "0", "recipe": "bf16"},
    ),
    "mixed": _policy(
        "bf16",
        {"match": "*layers.1.*", "recipe": "keep"},
        {"match": "*fc*", "recipe": "fp8_rowwise"},
        {"match": "*mlp*", "recipe": "fp8_tensorwise"},
        {"match": "*experts*", "recipe": "fp8_tensorwise", "gemms": {"wgrad": "bf16"}},
        {"match": "*head", "recipe": "fp32"},
        {"match": "2", "recipe": "fp8_tensorwise", "gemms": {"dgrad": "bf16", "wgrad": "bf16"}},
    ),
    "delayed": _policy("fp8_delayed", {"match": "*head", "recipe": "bf16"}),
    "blocks": _policy("fp8_block", {"match": "*router", "recipe": "fp32"}, {"match": "[04]", "recipe": "keep"}),
    "microscaling": _policy("mxfp8", {"match": "*qkv", "recipe": "nvfp4"}, {"match": "*wo", "recipe": "int8"}),
    "state": _policy(
        "bf16",
        optimizer={"weights": "fp16_scaled", "exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"},
        communication={"gradients": "fp8"},
    ),
    "fp16": _policy("keep", activations="fp16", loss_scaling="dynamic"),
    "compiled": _policy("bf16", execution="compile"),
    "eager": _policy("fp8_tensorwise", execution="eager"),
    "unprotected": _policy(
        "bf16", operators={"softmax": "keep", "norm": "keep", "embedding": "keep", "loss": "keep", "output": "keep"}
    ),
    "attention": _policy("fp8_tensorwise", operators={"attention": "fp32"}),
}


def gemm_label(recipe: Recipe | None, gemm: Gemm, activations: str = "keep") -> str:
    """Return what one GEMM runs, in a form two libraries can agree on.

    ``fp8 tensor current e4m3*e5m2``: scaling and the formats of its two operands in the order of ``GEMM_OPERANDS``.
    """
    if recipe is None:
        return "high"
    if not recipe.scaled:
        return "high" if recipe.format == activations else recipe.format
    if recipe.format != "fp8" or recipe.scaling is None:
        return recipe.format
    a, b = (recipe.operand_format(operand) for operand in GEMM_OPERANDS[gemm])
    return f"fp8 {recipe.scaling.granularity} {recipe.scaling.scale} {a}*{b}"


def requests() -> Iterator[tuple[str, Request]]:
    """Yield (name, request) for every model and policy."""
    for model, layers in MODELS.items():
        for name, policy in POLICIES.items():
            yield f"{name} on {model}", Request(policy, layers)


@dataclass(frozen=True, slots=True)
class _Rule:
    match: str
    lost: bool


def _rule_of(request: Request, done: Export, layer: str) -> _Rule:
    match = next(rule.match for rule in request.rules() if glob_matches(rule.match, layer))
    return _Rule(match, any(loss.match in (match, layer) for loss in done.losses))


def check_files(done: Export) -> list[str]:
    """Return what is wrong with the files as files: empty, not parsable, or with a path of this machine in them."""
    problems = []
    for name, text in done.files.items():
        if not text.strip():
            problems.append(f"{name} is empty")
        try:
            if name.endswith(".py"):
                ast.parse(text)
            elif name.endswith(".json"):
                json.loads(text)
            elif name.endswith((".yaml", ".yml")):
                yaml.safe_load(text)
        except (SyntaxError, ValueError, yaml.YAMLError) as error:
            problems.append(f"{name} cannot be parsed: {error}")
        if "/home/" in text or "/root/" in text or "/tmp/" in text:
            problems.append(f"{name} holds a path of this machine")
    return problems if done.files else ["no files"]


def check_operators(request: Request, done: Export) -> list[str]:
    """Return what the policy says beside layers and state and the export says nothing about, or two things.

    That is: every operator that it wants in FP32, the dtype of attention, and whether the model is compiled.
    """
    problems = []
    policy = request.policy
    wanted = {f"operators.{name}: fp32": getattr(policy.operators, name) == "fp32" for name in OPERATORS}
    wanted[f"operators.attention: {policy.operators.attention}"] = policy.operators.attention != "keep"
    wanted[f"execution: {policy.execution}"] = policy.execution != "keep"
    for what, speak in wanted.items():
        said = (what in done.kept) + sum(loss.what == what for loss in done.losses)
        if said != speak:
            problems.append(f"{what} is spoken of {said} times")
    return problems


def check_exporter(exporter: Exporter, reader: Reader) -> list[str]:
    """Export every policy for every model, read it back, and return what disagrees (empty: it conforms).

    A layer may run something else than the policy says only when the loss list names the rule that decides about it;
    and the same request must give the same files twice.
    """
    problems = []
    for case, request in requests():
        done = exporter.export(request)
        problems += [f"{case}: {problem}" for problem in (*check_files(done), *check_operators(request, done))]
        if exporter.export(request) != done:
            problems.append(f"{case}: two exports differ")
        executed = reader(done, request)
        for layer, plan in request.plans().items():
            if _rule_of(request, done, layer).lost:
                continue
            for gemm in GEMMS:
                want = gemm_label(plan.recipe(gemm), gemm, request.policy.activations)
                got = executed.get(layer, {}).get(gemm, "nothing")
                if want != got:
                    problems.append(f"{case}: {layer} {gemm}: the policy says {want}, the export runs {got}")
    return problems
