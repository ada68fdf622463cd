"""The conformance suite of exporters: a pytest class to subclass, for an exporter of your own and for ours alike.

::

    from tests.conformance.exporters import ExporterSuite

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
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
import yaml

from autoprec.errors import MissingDependencyError
from autoprec.export import Export, Exporter, Request
from autoprec.export.settings import OPERATORS
from autoprec.policy import ImplementationPolicy, OptimizerPolicy, Policy, glob_matches, policy_from_dict
from autoprec.policy.sections import STEPPING
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm, Recipe

#: layer -> GEMM -> label of :func:`gemm_label`; ``high`` stands for "the dtype of the activations".
Executed = Mapping[str, Mapping[str, str]]
#: What the target runs beside the layers, under the keys of :func:`wanted_settings`.
Settings = Mapping[str, str]

_NONE: Settings = {}
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

#: Globs of random rules: some match in every model, some in none.
_GLOBS = ["*head", "*fc*", "*mlp*", "*attn*", "*experts*", "*layers.1.*", "*.0.*", "[02]", "*router", "lm_head", "*w*"]
_OPERANDS = [dict(zip(("input", "weight", "grad_output"), forms, strict=True)) for forms in
             (("e4m3",) * 3, ("e4m3", "e4m3", "e5m2"), ("e5m2", "e4m3", "e4m3"))]  # fmt: skip
_NAMES = ("bf16", "fp32", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "int8")


def _policy(default: str, *rules: dict[str, Any], **rest: Any) -> Policy:
    used = {default, *(rule["recipe"] for rule in rules), *(n for r in rules for n in r.get("gemms", {}).values())}
    recipes = {name: BUILTIN_RECIPES[name].to_dict() for name in _NAMES if name in used}
    layers = [{**rule, "optional": True} for rule in rules]
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": layers, "default": default}
    return policy_from_dict({**document, "activations": "bf16", **rest})


def _fast_fprop(name: str) -> Policy:
    """A recipe on every layer with a fast accumulator in fprop alone, as torchao and Transformer Engine have it."""
    full = BUILTIN_RECIPES[name].to_dict()
    rule = {"match": "*", "recipe": name, "gemms": {"dgrad": "full", "wgrad": "full"}}
    recipes = {name: full | {"accumulation": "fast"}, "full": full}
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": [rule], "activations": "bf16"}
    return policy_from_dict(document)


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
    "tensorwise, fast fprop": _fast_fprop("fp8_tensorwise"),
    "rowwise, fast fprop": _fast_fprop("fp8_rowwise"),
    "delayed, fast fprop": _fast_fprop("fp8_delayed"),
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
    "shrunk embedding": _policy("fp8_rowwise", embedding_gradient=0.1),
}


#: int8_tensor is exported as int8 is. Drawn as well, seed 7 is another policy, of which all exporters list a loss that
#: is none: a head whose fprop is kept and whose dgrad and wgrad are bf16.
_DRAWN = [name for name in BUILTIN_RECIPES if name != "int8_tensor"]


def random_policy(seed: int) -> Policy:
    """Return a policy with something of everything, also where it is odd; the same seed gives the same policy."""
    draw = random.Random(seed)
    recipes = {name: _random_recipe(name, draw) for name in draw.sample(_DRAWN, draw.randint(1, 4))}
    rules = []
    for match in draw.sample(_GLOBS, draw.randint(0, 4)):
        gemms = {gemm: draw.choice([*recipes, "keep"]) for gemm in GEMMS if draw.random() < 0.25}
        rules.append({"match": match, "recipe": draw.choice([*recipes, "keep"]), "gemms": gemms, "optional": True})
    activations = draw.choice(["keep", "bf16", "bf16", "fp16"])
    operators = {name: draw.choice(["fp32", "keep"]) for name in OPERATORS}
    fields = OptimizerPolicy.model_fields
    state = {
        name: draw.choice(get_args(field.annotation)) if draw.random() < 0.3 else field.default
        for name, field in fields.items()
    }
    return policy_from_dict(
        {
            "schema": "autoprec.policy/1",
            "recipes": {name: recipe.to_dict() for name, recipe in recipes.items()},
            "layers": rules,
            "default": draw.choice([*recipes, "keep"]),
            "activations": activations,
            "operators": operators | {"attention": draw.choice(["keep", "keep", "fp32", "bf16"])},
            "optimizer": state,
            "implementation": {
                name: draw.choice(get_args(field.annotation))
                for name, field in ImplementationPolicy.model_fields.items()
            },
            "communication": {"gradients": draw.choice(["fp32", "fp32", "bf16", "fp8"])},
            "loss_scaling": draw.choice(["none", "dynamic"]) if activations == "fp16" else "none",
            "execution": draw.choice(["keep", "keep", "compile", "eager"]),
            "embedding_gradient": draw.choice([1.0, 1.0, 0.1]),
        }
    )


def _random_recipe(name: str, draw: random.Random) -> Recipe:
    """Return a built-in recipe, half the time with other parameters than its own."""
    recipe = BUILTIN_RECIPES[name]
    if draw.random() < 0.5:
        return recipe
    if recipe.format == "nvfp4":
        flags = ("hadamard", "stochastic_rounding", "weight_2d")
        return recipe.model_copy(update={flag: draw.random() < 0.5 for flag in flags})
    if recipe.operands is None or recipe.format == "mxfp8":
        return recipe
    document = recipe.to_dict()
    document["accumulation"] = draw.choice(["full", "fast"])
    document["operands"] = draw.choice(_OPERANDS)
    document["scaling"] |= {"power_of_2": draw.random() < 0.5, "amax_epsilon": draw.choice([0.0, 0.0, 1e-6])}
    if document["scaling"]["scale"] == "delayed":
        document["scaling"] |= {"margin": draw.choice([0, 1]), "amax_history_len": draw.choice([1, 16, 1024])}
        document["scaling"]["amax_compute_algo"] = draw.choice(["max", "most_recent"])
    return Recipe.model_validate(document)


def gemm_label(recipe: Recipe | None, gemm: Gemm, activations: str = "keep") -> str:
    """Return what one GEMM runs, in a form two libraries can agree on: everything that changes its result.

    ``fp8 row current e4m3*e4m3 pow2 fast``: scaling, the formats of its two operands in the order of ``GEMM_OPERANDS``,
    scales that are powers of two, and an accumulator of limited precision.
    """
    if recipe is None:
        return "high"
    if not recipe.scaled:
        kept = gemm != "fprop" or recipe.output == "keep"
        return recipe.describe() if not kept else "high" if recipe.format == activations else recipe.format
    a, b = (recipe.operand_format(operand) for operand in GEMM_OPERANDS[gemm])
    if recipe.format == "nvfp4":
        square = recipe.weight_2d and gemm != "wgrad"
        marks = {"2d": square, "stochastic": recipe.stochastic_rounding and gemm != "fprop"}
        return _marked("nvfp4", marks | {"hadamard": recipe.hadamard and gemm == "wgrad"})
    scaling = recipe.canonical().scaling
    if scaling is None or recipe.format == "int8":
        return f"mxfp8 {a}*{b}" if recipe.format == "mxfp8" else recipe.format
    marks = {"pow2": scaling.power_of_2, "fast": recipe.accumulation == "fast"}
    marks[f"epsilon {scaling.amax_epsilon:g}"] = scaling.amax_epsilon > 0
    if scaling.scale == "delayed":
        history = f"{scaling.amax_compute_algo} of {scaling.amax_history_len}"
        marks[f"margin {scaling.margin}, {history}"] = True
    return _marked(f"fp8 {scaling.granularity} {scaling.scale} {a}*{b}", marks)


def _marked(name: str, marks: Mapping[str, bool]) -> str:
    return " ".join([name, *(mark for mark, there in marks.items() if there)])


def wanted_settings(policy: Policy) -> dict[str, str]:
    """Return what a policy says beside layers and operators, flat: ``optimizer.exp_avg`` -> ``bf16``."""
    state = {f"optimizer.{name}": value for name, value in policy.optimizer.model_dump(exclude={*STEPPING}).items()}
    plain = ("activations", "loss_scaling", "execution")
    return {
        **{name: getattr(policy, name) for name in plain},
        **state,
        "communication.gradients": policy.communication.gradients,
    }


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

    That is: every operator that it wants in FP32, the dtype of attention, whether the model is compiled, which of
    torch's ways a thing is computed in, and how the optimizer steps.
    """
    problems = []
    policy = request.policy
    wanted = {f"operators.{name}: fp32": getattr(policy.operators, name) == "fp32" for name in OPERATORS}
    wanted[f"operators.attention: {policy.operators.attention}"] = policy.operators.attention != "keep"
    wanted[f"execution: {policy.execution}"] = policy.execution != "keep"
    for name, value in policy.implementation.model_dump().items():
        wanted[f"implementation.{name}: {value}"] = value != "keep"
    for name in STEPPING:
        value = getattr(policy.optimizer, name)
        wanted[f"optimizer.{name}: {value}"] = value != "keep"
    for what, speak in wanted.items():
        said = (what in done.kept) + sum(loss.what == what for loss in done.losses)
        if said != speak:
            problems.append(f"{what} is spoken of {said} times")
    return problems


def differences(request: Request, done: Export, executed: Executed, found: Settings = _NONE) -> list[str]:
    """Return where an export runs something else than the policy says, and no loss names the rule that decides.

    A layer that the policy leaves to the activations is accounted for by a loss of the activations.
    """
    problems = []
    activations = any(loss.what.startswith("activations:") for loss in done.losses)
    for layer, match, gemm, want, got in _compared(request, executed, found):
        listed = any(loss.match in (match, layer) for loss in done.losses) or (want == "high" and activations)
        if want != got and not listed:
            problems.append(f"{layer} {gemm}: the policy says {want}, the export runs {got}")
    return problems


def setting_differences(request: Request, done: Export, found: Settings) -> list[str]:
    """Return what an export sets otherwise than the policy beside the layers, and no loss says so."""
    problems = []
    for name, want in wanted_settings(request.policy).items():
        got = found.get(name, want)
        if want != got and not any(loss.what == f"{name}: {want}" for loss in done.losses):
            problems.append(f"{name}: the policy says {want}, the export runs {got}")
    return problems


def superfluous(request: Request, done: Export, executed: Executed, found: Settings = _NONE) -> list[str]:
    """Return losses of something that the target runs as the policy says, and losses that say nothing."""
    wanted = wanted_settings(request.policy)
    changed, decided = set(), set()
    for layer, match, _, want, got in _compared(request, executed, found):
        decided |= {layer, match}
        changed |= {layer, match} if want != got else set()
    problems = [str(loss) for loss in done.losses if loss.instead.startswith(loss.what)]
    for loss in done.losses:
        name = loss.what.split(":")[0]
        if loss.match in decided - changed or (not loss.match and found.get(name, "unread") == wanted.get(name)):
            problems.append(f"not lost: {loss}")
    return problems


def _compared(request: Request, executed: Executed, found: Settings) -> Iterator[tuple[str, str, Gemm, str, str]]:
    """Yield layer, glob of the rule that decides about it, GEMM, what the policy says and what the export runs."""
    activations = request.policy.activations
    high = found.get("activations", activations)
    high = "high" if high in (activations, "keep") else high
    for layer, plan in request.plans().items():
        match = next(rule.match for rule in request.rules() if glob_matches(rule.match, layer))
        for gemm in GEMMS:
            got = executed.get(layer, {}).get(gemm, "nothing")
            yield layer, match, gemm, gemm_label(plan.recipe(gemm), gemm, activations), high if got == "high" else got


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

    def settings(self, done: Export, request: Request) -> Settings:
        """Return what the files set beside the layers, under the keys of :func:`wanted_settings`.

        Keys that are left out are not checked; the default reads none.
        """
        del done, request
        return {}

    @pytest.fixture(params=list(POLICIES))
    def requests(self, request: pytest.FixtureRequest) -> list[Request]:
        """Each policy of :data:`POLICIES`, for every model of :data:`MODELS`."""
        policy = POLICIES[request.param]
        return [Request(policy, layers, f"{request.param}, {model}") for model, layers in MODELS.items()]

    def test_what_it_lists_as_lost_is_what_is_lost(self, requests: list[Request]) -> None:
        """Layer by layer and GEMM by GEMM, and setting by setting, as the target itself reads the files."""
        for request in requests:
            self.check(request)
        assert self.exporter.export(requests[0]) == self.exporter.export(requests[0])

    def check(self, request: Request) -> None:
        """Assert that what the target runs is the policy less the listed losses, and that each of them is one.

        The files parse and hold no path of this machine; what is kept in FP32 beside the layers is either kept by
        somebody who is named, or a listed loss.
        """
        done = self.exporter.export(request)
        assert check_files(done) == [], request.name
        try:
            executed, found = self.read(done, request), self.settings(done, request)
        except MissingDependencyError as error:
            assert check_operators(request, done) == [], request.name
            pytest.skip(str(error))
        unlisted = differences(request, done, executed, found) + setting_differences(request, done, found)
        assert unlisted == [], request.name
        assert superfluous(request, done, executed, found) == [], request.name
        assert check_operators(request, done) == [], request.name

    @pytest.mark.parametrize("seed", range(24))
    def test_it_loses_nothing_unlisted_of_a_random_policy(self, seed: int) -> None:
        """The same of two dozen policies that nobody would write, each for one of the models."""
        model = [*MODELS][seed % len(MODELS)]
        self.check(Request(random_policy(seed), MODELS[model], f"policy {seed}, {model}"))
