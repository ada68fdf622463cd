"""The policy: what is decided, as frozen data (``autoprec.policy/1``).

Nothing here touches a model: :mod:`autoprec.applying.policy` adds the methods that do.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from autoprec.errors import nearest
from autoprec.policy.globs import MOST_RULES, Glob, glob_matches
from autoprec.policy.sections import (
    STEPPING,
    CommunicationPolicy,
    ImplementationPolicy,
    OperatorPolicy,
    OptimizerPolicy,
)
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, KEEP, Gemm, Recipe
from autoprec.support.validation import Frozen

SCHEMA = "autoprec.policy/1"
#: What is left of the gradient of a look-up; 0 would freeze the table.
EmbeddingGradient = Annotated[float, Field(gt=0.0, le=1.0)]


class LayerRule(Frozen):
    """One line of ``layers``: a glob on module names, and the recipe of what it matches.

    ``gemms`` overrides the recipe of single GEMMs; ``optional`` allows the rule to match nothing.
    """

    match: Glob = Field(description="glob on module names: * any text, ? one character, [ab] a choice")
    recipe: str = Field(description="a name in recipes, or keep")
    gemms: dict[Gemm, str] = Field(default_factory=dict, description="recipe of single GEMMs: fprop, dgrad, wgrad")
    optional: bool = Field(False, description="the rule may match nothing")


class Silenced(Frozen):
    """A finding of ``autoprec lint`` that is meant: its code, of which layers, and why."""

    code: str = Field(description="a code of docs/cli.md")
    reason: str = Field(min_length=1, description="why it is meant, for a reader")
    layers: Glob = Field("*", description="glob on module names")

    def silences(self, code: str, layers: Sequence[str]) -> bool:
        """Say whether a finding about these layers is meant."""
        return code == self.code and all(glob_matches(self.layers, name) for name in layers)


class ModelInfo(Frozen):
    """Which model a policy was made for."""

    class_name: str = Field(alias="class")
    parameters: int = Field(ge=0)
    fingerprint: str = ""
    layers: tuple[str, ...] = Field(
        (), max_length=MOST_RULES, description="layers that the search saw, numbers as ranges"
    )


#: What a guard can watch -> the threshold where a policy names the metric without one.
GUARD_METRICS: dict[str, float] = {
    "loss_gap": 0.02,  # relative: smoothed loss above its own best
    "gradient_norm_ratio": 3.0,  # median of the last steps over the median of the window
    "nonfinite_steps": 3.0,  # losses or gradient norms in the window that are not finite
}


class Guard(Frozen):
    """What to watch in the long run, and what to fall back to, in order."""

    metrics: tuple[str, ...] = ()
    thresholds: dict[str, float] = Field(default_factory=dict)
    fallback: tuple[str, ...] = ()


class Phase(Frozen):
    """What changes at a boundary of the run: the entries named here replace those in force until then.

    ``from`` is a share of the run (0.85), whose number of steps must then be known, or a step (200: after 200 optimizer
    steps). A phase that names ``layers`` replaces all rules; what it does not name stays as it was before it.
    """

    start: float | int = Field(alias="from", description="share of the run (0.85), or optimizer steps before it (200)")
    layers: tuple[LayerRule, ...] | None = Field(None, max_length=MOST_RULES)
    default: str | None = Field(None, description="recipe of tunable layers that no rule names")
    activations: Literal["keep", "bf16", "fp16"] | None = None
    optimizer: OptimizerPolicy | None = None
    communication: CommunicationPolicy | None = None
    loss_scaling: Literal["none", "dynamic"] | None = None
    embedding_gradient: EmbeddingGradient | None = None

    @field_validator("start", mode="before")
    @classmethod
    def _share_or_step(cls, value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if whole or (isinstance(value, float) and 0.0 < value < 1.0):
            return value
        raise ValueError("a phase begins at a share of the run between 0 and 1 (0.85), or at a step from 1 on (200)")

    @model_validator(mode="after")
    def _changes_something(self) -> Phase:
        if not self.changes:
            raise ValueError("this phase changes nothing: name layers, default, activations, optimizer or another part")
        return self

    @property
    def changes(self) -> dict[str, Any]:
        """What this phase says, by field; what it leaves as the run began is left out."""
        parts = {name: getattr(self, name) for name in type(self).model_fields if name != "start"}
        return {name: value for name, value in parts.items() if value is not None}

    @property
    def label(self) -> str:
        """When it begins, for people: ``85 % of the run`` or ``step 200``."""
        return f"step {self.start}" if isinstance(self.start, int) else f"{self.start * 100:g} % of the run"

    def to_dict(self) -> dict[str, Any]:
        """Return the phase as plain data, as it stands in a file (``from``, then what changes)."""
        out: dict[str, Any] = {"from": self.start}
        for name, value in self.changes.items():
            if name == "layers":
                out[name] = [rule.model_dump(exclude_defaults=True) for rule in value]
            else:
                out[name] = value.model_dump() if isinstance(value, BaseModel) else value
        return out


class RolloutPolicy(Frozen):
    """What the other side of reinforcement learning runs: the copy of the model that generates.

    Its layers have the names of the model that trains; ``weights`` is the dtype that its copy of them is held in.
    """

    layers: tuple[LayerRule, ...] = Field((), max_length=MOST_RULES)
    default: str = Field(KEEP, description="recipe of tunable layers that no rule names")
    activations: Literal["keep", "bf16", "fp16"] = Field("keep", description="autocast dtype around the model")
    weights: Literal["keep", "fp32", "bf16", "fp16"] = Field("keep", description="dtype of its copy of the weights")

    def to_dict(self) -> dict[str, Any]:
        """Return the section as plain data, without defaults."""
        rules = [rule.model_dump(exclude_defaults=True) for rule in self.layers]
        return ({"layers": rules} if rules else {}) | self.model_dump(exclude_defaults=True, exclude={"layers"})


class LayerPlan(Frozen):
    """What one layer runs: a recipe per GEMM, ``None`` meaning "as the script wrote it".

    A recipe with ``output: fp32`` is about the output: dgrad and wgrad of its layer run as without. Named for wgrad
    itself, it returns the weight's gradient as FP32 sums; a gradient of the input has the input's dtype.
    """

    fprop: Recipe | None = None
    dgrad: Recipe | None = None
    wgrad: Recipe | None = None

    @field_validator(*GEMMS)
    @classmethod
    def _as_the_gemm_runs_it(cls, value: Recipe | None, info: ValidationInfo) -> Recipe | None:
        gemm: Any = info.field_name
        found = None if value is None else value.of_gemm(gemm)
        return found.backward() if found is not None and gemm == "dgrad" else found

    @property
    def keeps(self) -> bool:
        """True when all three GEMMs run as the script wrote them."""
        return self.fprop is None and self.dgrad is None and self.wgrad is None

    def recipe(self, gemm: Gemm) -> Recipe | None:
        """Return the recipe of one GEMM; None where it runs as the script wrote it."""
        found: Recipe | None = getattr(self, gemm)
        return found

    @property
    def recipes(self) -> tuple[Recipe | None, ...]:
        """The recipes of fprop, dgrad and wgrad, in this order; None where a GEMM runs as written."""
        return (self.fprop, self.dgrad, self.wgrad)

    @property
    def scaled(self) -> tuple[Recipe, ...]:
        """The recipes that run in 8 bits or fewer, in GEMM order; empty where the layer needs no scales."""
        return tuple(recipe for recipe in self.recipes if recipe is not None and recipe.scaled)

    @property
    def labels(self) -> dict[str, str]:
        """What each GEMM runs in words, ``keep`` where that is the script's own."""
        return {gemm: KEEP if r is None else r.describe() for gemm, r in zip(GEMMS, self.recipes, strict=True)}

    def describe(self) -> str:
        """Return the plan in a few words: one recipe, or one per GEMM where they differ."""
        labels = self.labels
        if len(set(labels.values())) == 1:
            return labels["fprop"]
        return ", ".join(f"{gemm}: {label}" for gemm, label in labels.items())

    @classmethod
    def uniform(cls, recipe: Recipe | None) -> LayerPlan:
        """Return a plan that runs all three GEMMs under one recipe; None keeps all as written."""
        return cls.of(dict.fromkeys(GEMMS, recipe))

    @classmethod
    def of(cls, recipes: Mapping[Gemm, Recipe | None], named: Collection[str] = ()) -> LayerPlan:
        """Return a plan of a layer's recipe by GEMM, where the GEMMs in ``named`` have one of their own."""
        wgrad = recipes["wgrad"]
        if wgrad is not None and "wgrad" not in named:
            wgrad = wgrad.backward()
        return cls(fprop=recipes["fprop"], dgrad=recipes["dgrad"], wgrad=wgrad)


class Policy(Frozen):
    """A precision policy; see docs/policy-format.md."""

    schema_: Literal["autoprec.policy/1"] = Field("autoprec.policy/1", alias="schema")
    recipes: dict[str, Recipe] = Field(default_factory=dict)
    layers: tuple[LayerRule, ...] = Field((), max_length=MOST_RULES)
    default: str = Field(KEEP, description="recipe of tunable layers that no rule names")
    activations: Literal["keep", "bf16", "fp16"] = Field("keep", description="autocast dtype around the model")
    operators: OperatorPolicy = OperatorPolicy()
    optimizer: OptimizerPolicy = OptimizerPolicy()
    communication: CommunicationPolicy = CommunicationPolicy()
    implementation: ImplementationPolicy = ImplementationPolicy()
    loss_scaling: Literal["none", "dynamic"] = "none"
    embedding_gradient: EmbeddingGradient = Field(
        1.0, description="share of their gradient that the tables of embeddings get; GLM-130B's is 0.1, 1 is off"
    )
    execution: Literal["keep", "compile", "compile_whole", "eager"] = Field(
        "keep", description="torch.compile: of repeated blocks by themselves, of the whole model, or of nothing"
    )
    model: ModelInfo | None = None
    evidence: dict[str, Any] = Field(default_factory=dict, description="how it was found; plain data")
    guard: Guard | None = None
    phases: tuple[Phase, ...] = Field((), max_length=16, description="what changes during the run, in order")
    silenced: tuple[Silenced, ...] = Field((), max_length=MOST_RULES, description="findings of lint that are meant")
    rollout: RolloutPolicy | None = Field(None, description="the copy of the model that generates, in RL")

    @field_validator("recipes")
    @classmethod
    def _no_reserved_names(cls, value: dict[str, Recipe]) -> dict[str, Recipe]:
        if KEEP in value:
            raise ValueError("'keep' is reserved for 'as the script wrote it'; choose another recipe name")
        return value

    @model_validator(mode="after")
    def _names_resolve(self) -> Policy:
        named = _named_recipes("", self.layers, self.default)
        for index, phase in enumerate(self.phases):
            named |= _named_recipes(f"phases[{index}].", phase.layers or (), phase.default)
        if self.rollout is not None:
            named |= _named_recipes("rollout.", self.rollout.layers, self.rollout.default)
        undefined = {where: name for where, name in named.items() if name != KEEP and name not in self.recipes}
        if undefined:
            where, name = next(iter(undefined.items()))
            fix = _recipe_fix([*undefined.values()], [*self.recipes])
            what = "{where}: recipe '{name}' is not defined under recipes"
            raise PydanticCustomError("undefined_recipe", what, {"where": where, "name": name, "fix": fix})
        for kind in (float, int):
            starts = [phase.start for phase in self.phases if isinstance(phase.start, kind)]
            if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
                raise ValueError(f"phases: each must begin after the one before it, not at {starts}")
        for stage in self.stages:
            fp16 = stage.uses_format("fp16") or stage.activations == "fp16"
            if stage.loss_scaling == "dynamic" and not fp16:
                raise ValueError("loss_scaling: dynamic is for fp16 only, and this policy uses no fp16; set it to none")
        if self.rollout is not None:
            _check_generates(self.rollout, self.recipes)
        return self

    @property
    def rollout_side(self) -> Self | None:
        """The policy of the copy that generates, operators as in training; None where that stays as written."""
        side = self.rollout
        if side is None:
            return None
        quiet = {name: field.get_default() for name, field in type(self).model_fields.items() if name in _PHASED}
        own = {"layers": side.layers, "default": side.default, "activations": side.activations}
        return self.model_copy(update=quiet | {"execution": KEEP, "phases": (), "guard": None, "rollout": None} | own)

    @property
    def stages(self) -> tuple[Self, ...]:
        """The policies of the run one after the other, each without phases; the first is how it begins."""
        found = [self if not self.phases else self.model_copy(update={"phases": ()})]
        for phase in self.phases:
            found.append(found[-1].model_copy(update=phase.changes))
        return tuple(found)

    def with_stages(self, stages: Sequence[Self]) -> Self:
        """Return this policy running ``stages`` instead of its own, phase by phase at the same boundaries.

        Recipes of all stages are taken along; each name must mean the same in all.
        """
        first, *later = stages
        phases = tuple(
            phase.model_copy(update={name: getattr(stage, name) for name in _PHASED})
            for phase, stage in zip(self.phases, later, strict=True)
        )
        recipes = {name: recipe for stage in stages for name, recipe in stage.recipes.items()}
        return first.model_copy(update={"recipes": recipes, "phases": phases})

    def __repr__(self) -> str:
        """Return one line: the whole document is :meth:`to_dict`'s, and ``autoprec show``'s."""
        around = [f"{name}={value}" for name in ("activations", "execution") if (value := getattr(self, name)) != KEEP]
        parts = [f"{len(self.layers)} rules", f"recipes={list(self.recipes)}", f"default={self.default}", *around]
        return f"Policy({', '.join(parts)})"

    __str__ = __repr__

    def uses_format(self, name: str) -> bool:
        """True when a layer recipe in use has this format."""
        used = {self.default, *(r.recipe for r in self.layers), *(n for r in self.layers for n in r.gemms.values())}
        return any(recipe.format == name for key, recipe in self.recipes.items() if key in used)

    def recipe_named(self, name: str) -> Recipe | None:
        """Return the recipe behind a name of this policy; None for ``keep``."""
        return None if name == KEEP else self.recipes[name]

    def plan_of_rule(self, rule: LayerRule | None) -> LayerPlan:
        """Return what a layer matched by ``rule`` runs (``None``: no rule matched, the default applies)."""
        name = self.default if rule is None else rule.recipe
        overrides = {} if rule is None else rule.gemms
        return LayerPlan.of({gemm: self.recipe_named(overrides.get(gemm, name)) for gemm in GEMMS}, overrides)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain-data form that is written to a file (defaults that matter to a reader included)."""
        out: dict[str, Any] = {"schema": self.schema_}
        out["recipes"] = {name: recipe.to_dict() for name, recipe in self.recipes.items()}
        out["layers"] = [rule.model_dump(exclude_defaults=True) for rule in self.layers]
        out |= {"default": self.default, "activations": self.activations}
        for name in ("operators", "optimizer", "communication"):
            out[name] = getattr(self, name).model_dump()
        for name in STEPPING:
            if out["optimizer"][name] == KEEP:
                del out["optimizer"][name]
        if self.implementation != ImplementationPolicy():
            out["implementation"] = self.implementation.model_dump(exclude_defaults=True)
        out["loss_scaling"] = self.loss_scaling
        if self.embedding_gradient != 1.0:
            out["embedding_gradient"] = self.embedding_gradient
        if self.execution != "keep":
            out["execution"] = self.execution
        if self.model is not None:
            out["model"] = self.model.model_dump(by_alias=True, exclude={"layers"})
            out["model"] |= {"layers": list(self.model.layers)} if self.model.layers else {}
        if self.evidence:
            out["evidence"] = dict(self.evidence)
        if self.guard is not None:
            out["guard"] = self.guard.model_dump(mode="json")
        if self.silenced:
            out["silenced"] = [entry.model_dump(exclude_defaults=True) for entry in self.silenced]
        if self.phases:
            out["phases"] = [phase.to_dict() for phase in self.phases]
        if self.rollout is not None:
            out["rollout"] = self.rollout.to_dict()
        return out


#: What a phase may change.
_PHASED = tuple(name for name in Phase.model_fields if name != "start")


def _check_generates(side: RolloutPolicy, recipes: Mapping[str, Recipe]) -> None:
    """Refuse what has no effect on a copy that generates: it runs fprop alone, and learns no scales."""
    if any(rule.gemms for rule in side.layers):
        raise ValueError("rollout.layers: what generates runs fprop alone; name its recipe, and leave gemms out")
    for name in dict.fromkeys([side.default, *(rule.recipe for rule in side.layers)]):
        scaling = recipes[name].scaling if name != KEEP else None
        if scaling is not None and scaling.scale == "delayed":
            raise ValueError(f"rollout: delayed scales ('{name}') learn from training steps; name current scales")


def compiles(policy: Policy | Mapping[str, Any]) -> bool:
    """Say whether a policy, or its document, compiles a model or its blocks, whatever the script itself compiles."""
    executed = policy.execution if isinstance(policy, Policy) else policy.get("execution", KEEP)
    return executed in ("compile", "compile_whole")


def _named_recipes(prefix: str, layers: Sequence[LayerRule], default: str | None) -> dict[str, str]:
    """Return every place that names a recipe, with the name."""
    named = {} if default is None else {f"{prefix}default": default}
    for index, rule in enumerate(layers):
        named[f"{prefix}layers[{index}].recipe"] = rule.recipe
        for gemm, name in rule.gemms.items():
            named[f"{prefix}layers[{index}].gemms.{gemm}"] = name
    return named


def _recipe_fix(undefined: Sequence[str], defined: Sequence[str]) -> str:
    """Return what to write for recipe names that a policy uses and does not define; the first is what is reported."""
    meant = ""
    if undefined[0] not in BUILTIN_RECIPES:
        close = nearest(undefined[0], [*defined, KEEP]) or nearest(undefined[0], BUILTIN_RECIPES)
        if not close:
            return f"define it, or use one of {', '.join([*defined[:20], KEEP])}"
        meant = f"did you mean '{close[0]}'?"
        if close[0] not in BUILTIN_RECIPES or close[0] in defined:
            return meant
        meant, undefined = meant + " Then ", close
    lines = {name: BUILTIN_RECIPES[name].to_dict() for name in undefined if name in BUILTIN_RECIPES}
    if not defined:
        lines = {"recipes": lines}
    shown = [yaml.safe_dump({k: v}, default_flow_style=True, sort_keys=False, width=10_000) for k, v in lines.items()]
    where = "under recipes:" if defined else "this block:"
    return f"{meant or 'a policy spells out what it uses: '}add {where} " + ", ".join(
        line.strip()[1:-1] for line in shown
    )
