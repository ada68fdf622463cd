"""The conformance suite of exporters: a pytest class to subclass, for an exporter of your own and for ours alike.

::

    from autoprec.testing.exporters import ExporterSuite

    class TestMyExporter(ExporterSuite):
        exporter = MyExporter()

        def read(self, done, request):
            ...  # load done.files as the target would; return {layer: {gemm: label}}

An export is right when the target, reading the files, runs what the policy says on every layer, or when the list of
losses names the rule it departs from. So the suite exports policies that together use everything a target may be asked
for, for five models, and compares what ``read`` found with what the policy says. A reader that asks the real library is
worth more than one written from its documentation.
"""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from autoprec.errors import MissingDependencyError
from autoprec.export import Export, Exporter, Request
from autoprec.export.operators import OPERATORS
from autoprec.policy import Policy, glob_matches, policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm, Recipe

__all__ = [
    "MODELS",
    "POLICIES",
    "Executed",
    "ExporterSuite",
    "check_files",
    "check_operators",
    "differences",
    "gemm_label",
]

#: layer -> GEMM -> label of :func:`gemm_label`; ``high`` stands for "the dtype of the activations".
Executed = Mapping[str, Mapping[str, str]]

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


def differences(request: Request, done: Export, executed: Executed) -> list[str]:
    """Return where an export runs something else than the policy says, and no loss names the rule that decides."""
    problems = []
    for layer, plan in request.plans().items():
        match = next(rule.match for rule in request.rules() if glob_matches(rule.match, layer))
        if any(loss.match in (match, layer) for loss in done.losses):
            continue
        for gemm in GEMMS:
            want = gemm_label(plan.recipe(gemm), gemm, request.policy.activations)
            got = executed.get(layer, {}).get(gemm, "nothing")
            if want != got:
                problems.append(f"{layer} {gemm}: the policy says {want}, the export runs {got}")
    return problems


class ExporterSuite(ABC):
    """Subclass it in a test file as ``Test...``, set ``exporter`` and write ``read``; pytest runs its checks.

    Attributes:
        exporter: the exporter under test.
    """

    exporter: Exporter

    @abstractmethod
    def read(self, done: Export, request: Request) -> Executed:
        """Load the exported files as the target would, and return what each layer runs.

        Raises:
            MissingDependencyError: the target's library is not installed; the check is skipped with that reason.
        """

    @pytest.fixture(params=list(POLICIES))
    def requests(self, request: pytest.FixtureRequest) -> list[Request]:
        """Each policy of :data:`POLICIES`, for every model of :data:`MODELS`."""
        policy = POLICIES[request.param]
        return [Request(policy, layers, f"{request.param}, {model}") for model, layers in MODELS.items()]

    def test_it_runs_what_the_policy_says_or_lists_the_difference(self, requests: list[Request]) -> None:
        """Layer by layer and GEMM by GEMM, as the target itself reads the files."""
        for request in requests:
            done = self.exporter.export(request)
            try:
                executed = self.read(done, request)
            except MissingDependencyError as error:
                pytest.skip(str(error))
            assert differences(request, done, executed) == [], request.name

    def test_its_files_are_whole(self, requests: list[Request]) -> None:
        """They parse, hold no path of this machine, and two exports of one policy are the same."""
        for request in requests:
            done = self.exporter.export(request)
            assert check_files(done) == [], request.name
            assert self.exporter.export(request) == done, request.name

    def test_it_speaks_of_every_operator_once(self, requests: list[Request]) -> None:
        """What is kept in FP32 beside the layers is either kept by somebody who is named, or a listed loss."""
        for request in requests:
            assert check_operators(request, self.exporter.export(request)) == [], request.name
