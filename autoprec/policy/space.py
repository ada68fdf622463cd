"""What may be decided: search spaces (``autoprec.space/1``), as frozen data read from YAML.

A space names the recipes, which layers may choose among them, and the other things a search may vary. The spaces that
ship with AutoPrec lie in ``search_spaces/``; a user's own file is as good as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from autoprec.errors import FileError, SpaceError, UnknownNameError, nearest
from autoprec.policy import (
    CommunicationPolicy,
    Glob,
    ImplementationPolicy,
    LayerPlan,
    OperatorPolicy,
    OptimizerPolicy,
    glob_matches,
)
from autoprec.policy.schema import EmbeddingGradient
from autoprec.precision import hardware
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, KEEP, Gemm, Recipe
from autoprec.support.files import read_document
from autoprec.support.validation import Frozen, explain, validated

SCHEMA = "autoprec.space/1"
#: As large as a policy may be.
MAX_SPACE_BYTES = 1024 * 1024
#: Values of recipe parameters in one space; each is tried on its recipe when the space is read.
MOST_PARAMETER_VALUES = 1000
#: Classes of operators that a policy keeps in FP32 under autocast unless it says otherwise: a search may vary them.
WIDE_OPERATORS = ("norm", "softmax")
#: Flags and kinds of layers that a rule can ask for (see :class:`autoprec.graph.report.Layer`).
LayerFlag = Literal["first", "head", "tied", "router"]


class Choice(Frozen):
    """What one layer may run: a recipe, and other recipes for single GEMMs."""

    recipe: str
    gemms: dict[Gemm, str] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """The value Optuna sees: ``fp8_rowwise``, or ``fp8_rowwise/wgrad=bf16`` with exceptions."""
        return "/".join([self.recipe, *(f"{g}={self.gemms[g]}" for g in GEMMS if g in self.gemms)])

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, name: str) -> Choice:
        """Return the choice behind a name (the inverse of :attr:`name`)."""
        recipe, *overrides = name.split("/")
        return cls.model_validate({"recipe": recipe, "gemms": dict(part.split("=", 1) for part in overrides)})

    def check(self, recipes: Mapping[str, Recipe], where: str = "") -> None:
        """Raise ValueError, which begins with ``where``, for a recipe that is not among these."""
        for name in (self.recipe, *self.gemms.values()):
            if name != KEEP and name not in recipes:
                close = nearest(name, [*recipes, KEEP])
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise ValueError(f"{where}unknown recipe '{name}'{hint}")

    def recipe_of(self, gemm: Gemm) -> str:
        """Return the name of the recipe of one GEMM (``fprop``, ``dgrad`` or ``wgrad``)."""
        return self.gemms.get(gemm, self.recipe)

    def plan(self, recipes: Mapping[str, Recipe]) -> LayerPlan:
        """Return the recipes behind the names (``keep`` is None)."""
        named = {gemm: self.recipe_of(gemm) for gemm in GEMMS}
        return LayerPlan.of({g: None if name == KEEP else recipes[name] for g, name in named.items()}, self.gemms)


class ChoiceRule(Frozen):
    """Which layers may choose among what; the first rule that matches a layer wins.

    ``flag`` narrows the glob to layers in a position that no name tells (``head``, ``first``, ``tied``, ``router``).
    """

    match: Glob = Field("*", description="glob on module names")
    flag: LayerFlag | None = Field(None, description="only layers that carry this flag")
    choices: tuple[Choice, ...] = Field(min_length=1)

    @field_validator("choices", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [Choice.parse(item) if isinstance(item, str) else item for item in value]
        return value

    def applies(self, name: str, flags: tuple[str, ...] = ()) -> bool:
        """Say whether the rule is about a layer of this name and with these flags (``head``, ``first``, ``router``)."""
        return (self.flag is None or self.flag in flags) and glob_matches(self.match, name)


class OptimizerSpace(Frozen):
    """Storage formats of weights and optimizer state, and ways to step, that may be tried; the first is the default."""

    weights: tuple[str, ...] = ("fp32",)
    exp_avg: tuple[str, ...] = ("fp32",)
    exp_avg_sq: tuple[str, ...] = ("fp32",)
    gradients: tuple[str, ...] = ("fp32",)
    update: tuple[str, ...] = ("keep",)
    products: tuple[str, ...] = ("keep",)


class CommunicationSpace(Frozen):
    """Formats of communication that may be tried; the first is the default."""

    gradients: tuple[str, ...] = ("fp32",)


class ImplementationSpace(Frozen):
    """Ways to compute a thing in that may be tried; the first is the default."""

    loss: tuple[str, ...] = ("keep",)
    attention: tuple[str, ...] = ("keep",)
    gelu: tuple[str, ...] = ("keep",)
    layout: tuple[str, ...] = ("keep",)


#: Sections of a space whose fields are values of the same section of a policy.
_SECTIONS: dict[str, type[BaseModel]] = {
    "optimizer": OptimizerPolicy,
    "communication": CommunicationPolicy,
    "implementation": ImplementationPolicy,
}


class Blocks(Frozen):
    """Some of a model's blocks: the first or last so many, or that share of them (rounded up)."""

    first: int = Field(0, ge=0)
    last: int = Field(0, ge=0)
    last_share: float = Field(0.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _one(self) -> Blocks:
        if sum(map(bool, (self.first, self.last, self.last_share))) != 1:
            raise ValueError("blocks: give one of first, last and last_share")
        return self

    @property
    def text(self) -> str:
        """In words: ``the first 2 blocks``."""
        if self.last_share:
            return f"the last {self.last_share:.0%} of the blocks"
        count, side = (self.first, "first") if self.first else (self.last, "last")
        return f"the {side} {count} blocks" if count > 1 else f"the {side} block"


class SpacePreset(Frozen):
    """A named starting point beside the built-in ones: a choice for some layers, and parameter values."""

    name: str = Field(min_length=1)
    choice: str = Field("", description="for every layer that offers it; empty is the baseline")
    layers: tuple[Glob, ...] = Field(("*",), description="globs of the layers that get the choice")
    kept: Blocks | None = Field(None, description="blocks that stay at the baseline, with what lies in no block")
    parameters: dict[str, Any] = Field(default_factory=dict)


class SearchSpace(Frozen):
    """A search space; see docs/policy-format.md."""

    schema_: Literal["autoprec.space/1"] = Field("autoprec.space/1", alias="schema")
    name: str = Field(min_length=1)
    description: str = ""
    targets: tuple[str, ...] = Field((), description="targets the recipes run on")
    default_for: tuple[str, ...] = Field((), description="targets for which this space is taken when none is named")
    recipes: dict[str, Recipe] = Field(default_factory=dict, description="recipes beside the built-in ones")
    baseline: str = Field(KEEP, description="the choice of layers no rule is about, and of presets' other layers")
    choices: tuple[ChoiceRule, ...] = ()
    groups: tuple[tuple[Glob, ...], ...] = Field(
        (), description="globs of layers that move together, beside the graph's"
    )
    operators: OperatorPolicy = OperatorPolicy()
    activations: tuple[Literal["keep", "bf16", "fp16"], ...] = Field(("keep",), min_length=1)
    attention: tuple[Literal["keep", "fp32", "bf16", "fp16"], ...] = Field(("keep",), min_length=1)
    norm: tuple[Literal["keep", "fp32"], ...] = Field((), description="instead of operators.norm")
    softmax: tuple[Literal["keep", "fp32"], ...] = Field((), description="instead of operators.softmax")
    optimizer: OptimizerSpace = OptimizerSpace()
    communication: CommunicationSpace = CommunicationSpace()
    implementation: ImplementationSpace = ImplementationSpace()
    loss_scaling: Literal["none", "dynamic"] = Field("none", description="dynamic: where a policy uses fp16")
    embedding_gradient: tuple[EmbeddingGradient, ...] = Field(
        (1.0,), min_length=1, description="share of their gradient that the tables of embeddings get"
    )
    execution: tuple[Literal["keep", "compile", "compile_whole", "eager"], ...] = Field(
        ("keep",),
        min_length=1,
        description="torch.compile of blocks or the whole model; tried where trials are timed",
    )
    rollout: tuple[Literal["keep", "same", "bf16", "fp16"], ...] = Field(
        ("keep",), min_length=1, description="the copy that generates: as written, as training, or all in a dtype"
    )
    parameters: dict[str, tuple[bool | int | float | str, ...]] = Field(
        default_factory=dict, description="recipe parameters: <recipe>.<field>[.<field>] to values, the default first"
    )
    presets: tuple[SpacePreset, ...] = ()

    @field_validator("recipes", mode="before")
    @classmethod
    def _no_reserved_names(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name == KEEP or "/" in name or "=" in name or "." in name:
                raise ValueError(f"'{name}' cannot name a recipe: 'keep' is reserved, and / = . have a meaning")
        return value

    @model_validator(mode="after")
    def _names_resolve(self) -> SearchSpace:
        recipes = self.all_recipes
        Choice.parse(self.baseline).check(recipes, "baseline: ")
        for index, rule in enumerate(self.choices):
            for choice in rule.choices:
                choice.check(recipes, f"choices[{index}]: ")
        for preset in self.presets:
            if preset.choice:
                Choice.parse(preset.choice).check(recipes, f"presets '{preset.name}': ")
        count = sum(len(values) for values in self.parameters.values())
        if count > MOST_PARAMETER_VALUES:
            raise ValueError(f"parameters: {count} values; more than {MOST_PARAMETER_VALUES} no search can try")
        for path, values in self.parameters.items():
            if not values:
                raise ValueError(f"parameters.{path}: no values")
            for value in values:
                with_value(recipes, path, value)
        self._state_is_valid()
        known = self.parameter_values()
        for preset in self.presets:
            for key, value in preset.parameters.items():
                if value not in known.get(key, ()):
                    raise ValueError(f"preset '{preset.name}': {key} = {value!r} is not in this space")
        return self

    def _state_is_valid(self) -> None:
        for section, policy in _SECTIONS.items():
            for name, values in getattr(self, section):
                for value in values:
                    policy.model_validate({name: value})

    @property
    def all_recipes(self) -> dict[str, Recipe]:
        """Every recipe by name: the built-in ones, and the space's own, which replace those of the same name."""
        return {**BUILTIN_RECIPES, **self.recipes}

    def rule_for(self, name: str, flags: tuple[str, ...] = ()) -> tuple[Choice, ...]:
        """Return the choices of a layer: those of the first rule about it, else the baseline alone."""
        for rule in self.choices:
            if rule.applies(name, flags):
                return rule.choices
        return (Choice.parse(self.baseline),)

    def parameter_values(self) -> dict[str, tuple[Any, ...]]:
        """Return every parameter beside the layers' choices with its values, the default first."""
        out: dict[str, tuple[Any, ...]] = {"activations": self.activations, "attention": self.attention}
        out |= {name: values for name in WIDE_OPERATORS if (values := getattr(self, name))}
        out |= {f"{section}.{name}": values for section in _SECTIONS for name, values in getattr(self, section)}
        out["embedding_gradient"], out["execution"] = self.embedding_gradient, self.execution
        out["rollout"] = self.rollout
        return out | {path: tuple(values) for path, values in self.parameters.items()}

    def warnings(self) -> list[str]:
        """Return what a person should know before searching here.

        FP16 gradients underflow without loss scaling; E5M2 has two bits of mantissa, too few for the forward pass:
        "FP8 Formats for Deep Learning" (arXiv 2209.05433, section 3) takes it for gradients only.
        """
        offered = {c.recipe_of(gemm) for rule in self.choices for c in rule.choices for gemm in GEMMS} - {KEEP}
        return [*self._underflowing(offered), *self._coarse_forward(offered)]

    def _coarse_forward(self, offered: set[str]) -> list[str]:
        found = []
        for name in sorted(offered):
            operands = self.all_recipes[name].operands
            for role in ("input", "weight"):
                values = self.parameters.get(f"{name}.operands.{role}", (getattr(operands, role, None),))
                found += [f"{name}.operands.{role}"] if "e5m2" in values else []
        return [
            f"space '{self.name}' offers e5m2 in fprop ({', '.join(found)}): its two bits of mantissa may do "
            "for a short trial and not for a long run; e4m3 is the format for input and weight"
        ] * bool(found)

    def _underflowing(self, offered: set[str]) -> list[str]:
        narrow = [name for name in sorted(offered) if self.all_recipes[name].format == "fp16"]
        narrow += ["activations: fp16"] if "fp16" in self.activations else []
        if not narrow or self.loss_scaling == "dynamic":
            return []
        return [
            f"space '{self.name}' offers fp16 ({', '.join(narrow)}) without loss scaling: gradients below 6e-8 become "
            "zero; add 'loss_scaling: dynamic', or leave it out where the script has a GradScaler of its own"
        ]

    def executed(self, *, compiled: bool, measured: bool, ranks: int = 1) -> SearchSpace:
        """Return the space with only those values of ``execution`` and ``implementation`` that differ on this script.

        Args:
            compiled: the script compiles its model itself, and torch then chooses how a thing is computed.
            measured: trials are timed; a rehearsal's time is modelled and its numerics are the same either way.
            ranks: processes of the script; what a model returns is its own only in one.
        """
        same = {"compile", "compile_whole"} if compiled else {"eager"}
        values = tuple(v for v in self.execution if v not in same) if measured else ("keep",)
        ways = self.implementation if measured else ImplementationSpace()
        if compiled:  # torch.compile chooses, but calls attention's kernel as eager code does
            ways = ImplementationSpace(attention=ways.attention)
        if ranks > 1:
            ways = ways.model_copy(update={"loss": ways.loss[:1]})
        return self.model_copy(update={"execution": values or ("keep",), "implementation": ways})

    def with_rollout(self) -> SearchSpace:
        """Return the space for a search by how far training and the copy that generates are apart.

        The copy may run what training does, or be in one dtype; and wherever bf16 is offered fp16 is as well, whose
        three bits more are what brings the sides together (arXiv 2510.26788).
        """

        def both(rule: ChoiceRule) -> ChoiceRule:
            narrow = {name: name.replace("bf16", "fp16") for name in ("bf16", "bf16_fp32_output")}
            offered = [(choice, narrow.get(choice.name, "")) for choice in rule.choices]
            found = [one for choice, name in offered for one in (choice, *([Choice(recipe=name)] if name else []))]
            return rule.model_copy(update={"choices": tuple({one.name: one for one in found}.values())})

        wide = ("fp16",) if "bf16" in self.activations and "fp16" not in self.activations else ()
        changes: dict[str, Any] = {"choices": tuple(map(both, self.choices)), "loss_scaling": "dynamic"}
        if "rollout" not in self.model_fields_set:
            changes["rollout"] = ("same", "keep", "bf16", "fp16")
        return self.model_copy(update=changes | {"activations": (*self.activations, *wide)})

    def without_surroundings(self) -> SearchSpace:
        """Return the space without what surrounds the model's forward, for a script that calls the model's parts."""
        narrow = {name: getattr(self, name)[:1] for name in WIDE_OPERATORS}
        plain: dict[str, Any] = {"activations": ("keep",), "attention": ("keep",), "embedding_gradient": (1.0,)}
        plain["implementation"] = ImplementationSpace()
        return self.model_copy(update=plain | narrow)

    def with_bf16(self, *, multiplied: bool) -> SearchSpace:
        """Return the space for a device that multiplies bf16, or for a CPU that has no instructions for it.

        There autocast, attention and an optimizer's products are many times slower in bf16; elsewhere in fp32.
        """
        slow, found = "fp32" if multiplied else "bf16", dict[str, Any]()
        products = tuple(value for value in self.optimizer.products if value != slow) or ("keep",)
        found["optimizer"] = self.optimizer.model_copy(update={"products": products})
        if not multiplied:
            for name in ("activations", "attention"):
                found[name] = tuple(value for value in getattr(self, name) if value != "bf16") or ("keep",)
        return self.model_copy(update=found)

    def recipes_with(self, parameters: Mapping[str, Any]) -> dict[str, Recipe]:
        """Return every recipe by name, with the values that a trial chose for the space's ``parameters``.

        Raises:
            ValueError: a recipe refuses the value.
        """
        recipes = self.all_recipes
        for path in self.parameters:
            if path in parameters:
                recipes = with_value(recipes, path, parameters[path])
        return recipes


def with_value(recipes: Mapping[str, Recipe], path: str, value: Any) -> dict[str, Recipe]:
    """Return recipes with one field changed: ``fp8_delayed.scaling.amax_history_len``.

    Args:
        recipes: by name; they stay as they are.
        path: recipe and field, joined by dots.
        value: what the field becomes.

    Raises:
        ValueError: no such recipe or field, or a value that the recipe refuses.
    """
    name, _, rest = path.partition(".")
    if name not in recipes or not rest:
        raise ValueError(f"parameters.{path}: '{name}' is not a recipe; write <recipe>.<field>[.<field>]")
    return {**recipes, name: _changed(recipes[name], path, value)}


@lru_cache(maxsize=1024, typed=True)  # a search asks for the same few a thousand times
def _changed(recipe: Recipe, path: str, value: Any) -> Recipe:
    """Return a recipe with the value at ``path``, which begins with its name."""
    name, *fields = path.split(".")
    document = recipe.model_dump()
    if len(fields) == 2 and fields[0] == "accumulation" and isinstance(document["accumulation"], str):
        document["accumulation"] = dict.fromkeys(GEMMS, document["accumulation"])
    inner = document
    for field in fields[:-1]:
        deeper = inner.get(field)
        inner = deeper if isinstance(deeper, dict) else {}
    if fields[-1] not in inner:
        raise ValueError(f"parameters.{path}: recipe '{name}' has no field '{'.'.join(fields)}'")
    inner[fields[-1]] = value
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"parameters.{path} = {value!r}: {explain(error, Recipe)[0]}") from error


def space_from_dict(document: dict[str, Any], *, where: str = "space") -> SearchSpace:
    """Validate a plain-data search space.

    Raises:
        SpaceError: an unknown key, recipe, parameter or value; the message names it and the nearest valid one.
    """
    if document.get("schema") != SCHEMA:
        raise SpaceError(
            f"schema is {str(document.get('schema'))[:120]!r}, not '{SCHEMA}'",
            where=where,
            fix="is it a search-space file?",
        )
    return validated(SearchSpace, document, where=where, about="search-spaces", error=SpaceError)


def spaces_dir() -> Path:
    """Return the folder of the shipped spaces, in an installed package or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def space_names() -> list[str]:
    """Return the names of the shipped spaces."""
    return sorted(path.stem for path in spaces_dir().glob("*.yaml"))


@lru_cache(maxsize=32)
def _shipped(name: str) -> SearchSpace:
    return _read(spaces_dir() / f"{name}.yaml")


def _read(path: Path) -> SearchSpace:
    try:
        document = read_document(path, most_bytes=MAX_SPACE_BYTES)
    except FileError as error:
        raise SpaceError(error.what, where=error.where, fix=error.fix) from error
    return space_from_dict(document, where=str(path))


def load_space(name_or_path: str | Path) -> SearchSpace:
    """Load a shipped space by name, or any space by path (``.yaml``, ``.yml`` or ``.json``). Data only.

    Raises:
        UnknownNameError: neither a shipped name nor a path.
        SpaceError: a file that is missing or not a valid space.
    """
    text = str(name_or_path)
    if text in space_names():
        return _shipped(text)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml", ".json")):
        return _read(Path(text))
    raise UnknownNameError("search space", text, space_names())


def default_space(target: str | hardware.Target) -> SearchSpace:
    """Return the space taken for a target when none is named.

    A target that no space claims (a user's own GPU) takes that of the shipped ones of its architecture, and one of an
    architecture of its own ``hopper-fp8`` where it multiplies FP8; else, and for a mere name, ``ampere-bf16``.
    """
    if isinstance(target, str):
        return _claimed(target) or _shipped("ampere-bf16")
    kin = [name for name, known in hardware.TARGETS.items() if known.architecture == target.architecture]
    for name in (target.name, *kin):
        # a user's name may be that of another device: what it multiplies decides
        known = hardware.TARGETS.get(name)
        found = _claimed(name) if known is None or known.architecture == target.architecture else None
        if found is not None:
            return found
    fp8 = any(capability.ok for family, capability in target.recipes.items() if family.startswith("fp8_"))
    return _shipped("hopper-fp8" if fp8 else "ampere-bf16")


def _claimed(target_name: str) -> SearchSpace | None:
    """Return the space that names a target as its default, else one that names it at all."""
    spaces = [_shipped(name) for name in space_names()]
    by_default = (space for space in spaces if target_name in space.default_for)
    return next(by_default, next((space for space in spaces if target_name in space.targets), None))
