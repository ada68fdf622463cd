"""The search problem of one model: groups of layers, what each may run, and the parameters beside them.

Everything else in this room speaks of ``params`` (what Optuna decided: ``layer:<group>`` -> choice name, and plain
parameter names) and of tables ``[G, C]``: one row per group, one column per choice name, in the order of
:attr:`Problem.groups` and :attr:`Problem.choice_names`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autoprec.errors import NothingAcceptableError, UsageError
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.summary import has_fused_attention, has_images, has_large_vocabulary
from autoprec.policy import LayerPlan, ModelInfo, Policy, glob_matches
from autoprec.policy.rollout import ROLLOUT, SAME, section
from autoprec.policy.sections import STEPPING
from autoprec.policy.solver import FloatTable, IntVector
from autoprec.policy.space import WIDE_OPERATORS, Choice, SearchSpace
from autoprec.precision.recipes import GEMMS, KEEP, Recipe
from autoprec.support.arrays import np, npt
from autoprec.tuning.decide.rules import glob_table, layer_rules, recipes_in
from autoprec.tuning.study.run import Params as Params

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution

CanRun = Callable[[Layer, Recipe], tuple[bool, str]]
#: What identifies the numerics of a point (:meth:`Problem.key`).
Point = tuple[Any, ...]

#: The parameter that says under which variant of the script's arguments a run is.
VARIANT = "variant"

#: The parameters that say how the optimizer steps.
UPDATE, PRODUCTS = "optimizer.update", "optimizer.products"
#: The parameter that says how attention in 16 bits is computed.
UNFUSED = "implementation.attention"
#: The parameters that say how operators are implemented.
WAYS = (UNFUSED, "implementation.loss", "implementation.layout", "implementation.gelu")
#: Share of a step's FLOPs from which on an optimizer's products may be computed in another dtype: up to four times
#: faster in bf16, 40 times in fp32 on a CPU without bf16.
_LEAST_SHARE = {"bf16": 0.01, "fp32": 0.001}
#: Autocast dtype -> the recipe that ``keep`` comes to under it.
_AUTOCAST = {"bf16": "bf16", "fp16": "fp16"}
#: What leaves everything around the layers as the script wrote it.
_KEPT = ("activations", "attention", "execution", ROLLOUT, *(f"optimizer.{name}" for name in STEPPING), *WAYS)
_AS_WRITTEN: dict[str, Any] = dict.fromkeys(_KEPT, KEEP)
_AS_WRITTEN["embedding_gradient"] = 1.0


def layer_key(group: str) -> str:
    """Return the parameter name of a group's choice."""
    return f"layer:{group}"


@dataclass(frozen=True, slots=True)
class GroupVariable:
    """Layers that move together, and the names of the choices they have (one: nothing to decide)."""

    name: str
    layers: tuple[str, ...]
    choices: tuple[str, ...]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What a search decides about one model; built by :meth:`build`.

    Attributes:
        groups: the groups of layers in model order, those without a choice included.
        parameters: name -> values, the default first; only those with more than one.
        fixed: name -> value of the parameters with one value.
        refused: (group, choice, reason) of what the target or a shape rules out.
        steps: training forwards of a trial; longer amax histories are one and the same there. 0: not known.
    """

    report: GraphReport
    space: SearchSpace
    groups: tuple[GroupVariable, ...]
    parameters: dict[str, tuple[Any, ...]]
    fixed: dict[str, Any]
    baseline: str
    refused: tuple[tuple[str, str, str], ...] = ()
    steps: int = 0
    _recipes: dict[tuple[tuple[str, Any], ...], Recipe] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        report: GraphReport,
        space: SearchSpace,
        can_run: CanRun | None = None,
        *,
        steps: int = 0,
        variants: Sequence[str] = (),
    ) -> Problem:
        """Match a space against a recorded model.

        Args:
            can_run: says whether a layer can run a recipe on the target, and why not; None allows everything.
            steps: training forwards of a trial, 0 where that is not known.
            variants: names of the arguments under which the script may run, those of the reference first.

        Raises:
            NothingAcceptableError: the model has no tunable layer.
        """
        if not report.tunable:
            raise NothingAcceptableError(
                "the model has no layer whose precision could be chosen",
                fix="`autoprec inspect` lists every layer with the reason",
            )
        groups: list[GroupVariable] = []
        refused: list[tuple[str, str, str]] = []
        for name, layers in _grouped(report, space).items():
            group, no = _variable(name, layers, space, can_run)
            groups.append(group)
            refused += no
        values = _relevant_parameters(space, groups) | ({VARIANT: tuple(variants)} if variants else {})
        if report.operators and not any(operator.attends for operator in report.operators):
            values["attention"] = values["attention"][:1]
        if report.operators and not any(operator.cls == "embedding" for operator in report.operators):
            values["embedding_gradient"] = (1.0,)
        if not has_large_vocabulary(report):
            values["implementation.loss"] = values["implementation.loss"][:1]
        if not has_fused_attention(report):
            values[UNFUSED] = values[UNFUSED][:1]
        if not report.gelus_by_hand:
            values["implementation.gelu"] = values["implementation.gelu"][:1]
        if not has_images(report):
            values["implementation.layout"] = values["implementation.layout"][:1]
        if not report.can_fuse:
            values[UPDATE] = values[UPDATE][:1]
        gains = {dtype for dtype, least in _LEAST_SHARE.items() if report.movable(dtype) >= least}
        values[PRODUCTS] = tuple(value for value in values[PRODUCTS] if value in {KEEP, *gains}) or (KEEP,)
        if all(layer.dtype == "fp64" for layer in report.tunable):  # which autocast leaves alone
            values["activations"] = (KEEP,)
            refused.append(("all layers", "autocast", "it leaves float64 alone, which the script computes in"))
        for name in WIDE_OPERATORS if values["activations"] == ("keep",) else ():
            values[name] = values.get(name, ())[:1]
        return cls(
            report=report,
            space=space,
            groups=tuple(groups),
            parameters={name: options for name, options in values.items() if len(options) > 1},
            fixed={name: options[0] for name, options in values.items() if len(options) == 1},
            baseline=Choice.parse(space.baseline).name,
            refused=tuple(refused),
            steps=steps,
        )

    # --- names and shapes -------------------------------------------------------------------------------------------
    @cached_property
    def choice_names(self) -> tuple[str, ...]:
        """Every choice name any group has: the columns of all tables (``keep`` first where it exists)."""
        names = dict.fromkeys(choice for group in self.groups for choice in group.choices)
        return tuple(sorted(names, key=lambda name: name != KEEP))

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """``[G, C]``: which group offers which choice."""
        return np.array([[name in group.choices for name in self.choice_names] for group in self.groups], dtype=bool)

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers that are decided about, in model order."""
        inside = {name for group in self.groups for name in group.layers}
        return tuple(layer.name for layer in self.report.layers if layer.name in inside)

    @property
    def free_groups(self) -> tuple[GroupVariable, ...]:
        """The groups that have more than one choice."""
        return tuple(group for group in self.groups if len(group.choices) > 1)

    def size(self) -> float:
        """Return the number of points of the space (equal ones counted apart), possibly infinite as a float."""
        total = sum(math.log(len(g.choices)) for g in self.groups) + sum(
            math.log(len(v)) for v in self.parameters.values()
        )
        return math.exp(total) if total < 700 else math.inf

    def table(self, value: Callable[[GroupVariable, str], float]) -> FloatTable:
        """Return ``[G, C]`` float64 filled by ``value(group, choice name)``; infinity where it is not offered."""
        out = np.full((len(self.groups), len(self.choice_names)), np.inf)
        for g, group in enumerate(self.groups):
            for choice in group.choices:
                out[g, self.choice_names.index(choice)] = value(group, choice)
        return out

    def distributions(self) -> dict[str, CategoricalDistribution]:
        """Return what Optuna may draw of every parameter, by its name."""
        return dict(self._distributions)

    @cached_property
    def _distributions(self) -> dict[str, CategoricalDistribution]:
        from optuna.distributions import CategoricalDistribution

        out = {layer_key(g.name): CategoricalDistribution(g.choices) for g in self.free_groups}
        return out | {name: CategoricalDistribution(values) for name, values in self.parameters.items()}

    # --- points -----------------------------------------------------------------------------------------------------
    def complete(self, params: Params) -> dict[str, Any]:
        """Return params with every parameter present: defaults and the baseline where they are silent.

        Raises:
            UsageError: a name or value that is not in the space.
        """
        out = {**self.fixed, **{name: values[0] for name, values in self.parameters.items()}}
        for group in self.groups:
            out[layer_key(group.name)] = self.baseline if self.baseline in group.choices else group.choices[0]
        options = {**{k: (v,) for k, v in self.fixed.items()}, **self.parameters}
        options |= {layer_key(g.name): g.choices for g in self.groups}
        for name, value in params.items():
            if name not in options or value not in options[name]:
                raise UsageError(f"{name} = {value!r} is not in the search space '{self.space.name}'")
            out[name] = value
        return out

    def params_of(self, choice: str, layers: Sequence[str] = ("*",), **parameters: Any) -> dict[str, Any]:
        """Return the params of one choice for the layers that match a glob and offer it, the baseline elsewhere."""
        out = {k: v for k, v in self.complete(parameters).items() if k not in self.fixed}
        for group in self.groups:
            wanted = any(glob_matches(glob, name) for glob in layers for name in group.layers)
            if wanted and choice in group.choices:
                out[layer_key(group.name)] = choice
        known = self.distributions()
        return {name: value for name, value in out.items() if name in known}

    def choice_of(self, params: Params, group: GroupVariable) -> str:
        """Return the name of what a group runs under ``params``; the baseline where they do not say it."""
        default = self.baseline if self.baseline in group.choices else group.choices[0]
        return str(params.get(layer_key(group.name), default))

    def effective(self, params: Params, group: GroupVariable) -> str:
        """Return what a group really runs: under autocast ``keep`` is autocast's dtype, where that is a choice."""
        choice = self.choice_of(params, group)
        cast = _AUTOCAST.get(str(self.value(params, "activations")), "")
        return cast if choice == KEEP and cast in group.choices and group.name not in self._in_float64 else choice

    @cached_property
    def _in_float64(self) -> frozenset[str]:
        """Names of the groups whose products are in float64 as written: autocast leaves those alone."""
        wide = {layer.name for layer in self.report.layers if layer.dtype == "fp64"}
        return frozenset(group.name for group in self.groups if wide.issuperset(group.layers))

    @cached_property
    def _columns(self) -> dict[str, list[tuple[str, str, dict[str, int]]]]:
        """Return, per autocast dtype, (parameter name, default, choice -> column of what it comes to) of each group."""
        position = {name: i for i, name in enumerate(self.choice_names)}
        out = {}
        for activations in ("keep", *_AUTOCAST):
            rows = []
            for group in self.groups:
                quiet = {"activations": activations}
                names = {c: self.effective(quiet | {layer_key(group.name): c}, group) for c in group.choices}
                rows.append(
                    (layer_key(group.name), self.choice_of({}, group), {c: position[n] for c, n in names.items()})
                )
            out[activations] = rows
        return out

    def indices(self, params: Params) -> IntVector:
        """Return ``[G]``: the column of each group's effective choice."""
        rows = self._columns[str(self.value(params, "activations"))]
        return np.array([columns[params.get(key, default)] for key, default, columns in rows], dtype=np.int64)

    def from_indices(self, index: IntVector, parameters: Params) -> dict[str, Any]:
        """Return params from columns ``[G]`` and parameter values (the inverse of :meth:`indices`)."""
        out = {layer_key(g.name): self.choice_names[int(i)] for g, i in zip(self.groups, index, strict=True)}
        free = {layer_key(g.name) for g in self.free_groups}
        out = {name: value for name, value in out.items() if name in free}
        return out | {name: parameters.get(name, values[0]) for name, values in self.parameters.items()}

    def value(self, params: Params, name: str) -> Any:
        """Return the value of a parameter (a group has a choice instead): chosen, fixed, or the first it may have."""
        if name in params:
            return params[name]
        return self.fixed[name] if name in self.fixed else self.parameters[name][0]

    def key(self, params: Params) -> Point:
        """Return what identifies the numerics of a point: equal keys run the same, whatever the params say."""
        index = self.indices(params)
        used = {recipe for column in set(index.tolist()) for recipe in self._recipes_of[column]}
        values = [self.in_effect(params, name) for name in self.parameters if name not in self.space.parameters]
        return (index.tobytes(), *values, *self._canonical(used, params))

    def in_effect(self, params: Params, name: str) -> Any:
        """Return the value of a parameter, or the one that stands for it where another computes the same."""
        if name in WIDE_OPERATORS:
            return self._wide(params, name)
        own = {"attention": self._attention, UNFUSED: self._unfused, ROLLOUT: self._rollout}.get(name)
        return self.value(params, name) if own is None else own(params)

    def _canonical(self, used: set[str], params: Params) -> tuple[Recipe, ...]:
        """Return the recipes in use that have parameters, as what they compute in a trial."""
        tuned = sorted(used & {name.split(".")[0] for name in self.parameters if name in self.space.parameters})
        found = []
        for name in tuned:
            values = tuple((p, self.value(params, p)) for p in self.parameters if p.split(".")[0] == name)
            if values not in self._recipes:
                self._recipes[values] = self.space.recipes_with(dict(values))[name].canonical(self.steps)
            found.append(self._recipes[values])
        return tuple(found)

    def _attention(self, params: Params) -> str:
        """Return what is asked of attention: ``keep`` where it is in the dtype that is named without it."""
        value = str(self.value(params, "attention"))
        return KEEP if {value} == self._unasked_dtypes(params) else value

    def _unfused(self, params: Params) -> str:
        """Return how attention is computed: ``keep`` where it is not in 16 bits, in which alone it is written out."""
        asked = str(self.value(params, "attention"))
        dtypes = self._unasked_dtypes(params) if asked == KEEP else {asked}
        return KEEP if dtypes.isdisjoint(("bf16", "fp16")) else str(self.value(params, UNFUSED))

    def _unasked_dtypes(self, params: Params) -> set[str]:
        """Return the dtypes of attention where none is asked of it: those of activations, or of the script."""
        around = str(self.value(params, "activations"))
        return self._attention_dtypes if around == KEEP else {around}

    def _wide(self, params: Params, name: str) -> str:
        """Return what is asked of a class of operators: ``keep`` where nothing reaches it in 16 bits."""
        return str(self.value(params, name)) if self._narrowed or self.value(params, "activations") != KEEP else KEEP

    def _rollout(self, params: Params) -> str:
        """Return what the copy that generates runs: ``same`` only where that has no shorter name."""
        value = str(self.value(params, ROLLOUT))
        if value != SAME:
            return value
        if self.is_autocast(params):
            return str(self.value(params, "activations"))
        quiet = self.value(params, "activations") == KEEP
        return KEEP if quiet and all(self.effective(params, group) == KEEP for group in self.groups) else SAME

    @cached_property
    def _narrowed(self) -> bool:
        """Say whether the script as written computes anything in 16 bits."""
        return any(dtype in ("bf16", "fp16") for op in self.report.operators for dtype in op.dtypes)

    @cached_property
    def _attention_dtypes(self) -> set[str]:
        """Return the floating dtypes that reach attention in the script as written."""
        rows = [op for op in self.report.operators if op.attends and op.phase == "forward"]
        return {dtype for op in rows for dtype in op.dtypes if dtype in ("fp32", "bf16", "fp16")}

    @cached_property
    def _recipes_of(self) -> tuple[frozenset[str], ...]:
        return tuple(frozenset(recipes_in([name])) for name in self.choice_names)

    def is_script(self, params: Params) -> bool:
        """True when the point is the script as written: nothing is changed."""
        quiet = all(self.effective(params, group) == KEEP for group in self.groups)
        plain = _AS_WRITTEN | dict.fromkeys(WIDE_OPERATORS, KEEP)
        plain |= {name: options[0] for name, options in self.parameters.items() if name == VARIANT}
        names = [name for name in {**self.fixed, **self.parameters} if name not in self.space.parameters]
        return quiet and all(self.in_effect(params, name) == plain.get(name, "fp32") for name in names)

    def is_autocast(self, params: Params) -> bool:
        """True where activations are in 16 bits and every layer runs what ``torch.autocast`` gives it."""
        cast = _AUTOCAST.get(str(self.value(params, "activations")), "")
        return bool(cast) and all(self.effective(params, group) in (cast, KEEP) for group in self.groups)

    # --- policies ---------------------------------------------------------------------------------------------------
    def assignment(self, params: Params) -> dict[str, str]:
        """Return what every layer runs under ``params``, by the layer's name."""
        return {name: self.choice_of(params, group) for group in self.groups for name in group.layers}

    def plans(self, params: Params) -> dict[str, LayerPlan]:
        """Return what every decided layer runs (as named: ``keep`` stays ``keep``)."""
        recipes = self.space.recipes_with(params)
        known: dict[str, LayerPlan] = {}
        for choice in set(self.assignment(params).values()):
            known[choice] = Choice.parse(choice).plan(recipes)
        return {name: known[choice] for name, choice in self.assignment(params).items()}

    def policy(self, params: Params, *, evidence: Mapping[str, Any] | None = None) -> Policy:
        """Return the policy of a point, its layers as few glob rules as say it exactly.

        Args:
            params: what was decided; silent parameters take their defaults.
        """
        return self.render(self.complete(params), evidence=evidence)

    def quiet(self) -> dict[str, Any]:
        """Return full params, perhaps outside the space, that leave everything as the script wrote it."""
        params = {**self.complete({}), **_AS_WRITTEN}
        return params | {layer_key(group.name): KEEP for group in self.groups}

    def render(self, params: Params, *, evidence: Mapping[str, Any] | None = None) -> Policy:
        """Return the policy of full params without asking whether they lie in the space (see :meth:`quiet`)."""
        params = {**params, UNFUSED: self._unfused(params)}
        # what is 16 bit throughout is torch.autocast itself: what a person gets by writing it around the model
        assignment = {} if self.is_autocast(params) else self.assignment(params)
        table = glob_table(tuple(layer.name for layer in self.report.layers))
        rules = layer_rules(table, assignment, self.layer_names) if assignment else []
        recipes = self.space.recipes_with(params)
        used = {name for rule in rules for name in (rule.recipe, *rule.gemms.values())} - {KEEP}
        activations = params["activations"]
        fp16 = activations == "fp16" or any(recipes[name].format == "fp16" for name in used)
        rollout, own = section(params[ROLLOUT], rules, recipes, activations)
        policy_recipes = {name: recipe for name, recipe in recipes.items() if name in used} | own
        return Policy.model_validate(
            {
                "recipes": policy_recipes,
                "layers": tuple(rules),
                "activations": activations,
                "operators": {
                    **self.space.operators.model_dump(),
                    **{name: params[name] for name in ("attention", *WIDE_OPERATORS) if name in params},
                },
                **{section: _section(section, params) for section in ("optimizer", "communication", "implementation")},
                "embedding_gradient": params["embedding_gradient"],
                "execution": params["execution"],
                "rollout": rollout,
                "loss_scaling": "dynamic" if fp16 and self.space.loss_scaling == "dynamic" else "none",
                "model": ModelInfo.model_validate(dict(self.report.model)),
                "evidence": dict(evidence or {}),
            }
        )


def _section(name: str, params: Params) -> Params:
    """Return what params say about a section of the policy, by field."""
    return {field: value for n, value in params.items() for section, _, field in [n.partition(".")] if section == name}


def _grouped(report: GraphReport, space: SearchSpace) -> dict[str, list[Layer]]:
    """Return group name -> tunable layers, in model order: the graph's groups, widened by the space's globs."""
    home: dict[str, str] = {}
    for name, members in report.groups.items():
        home |= dict.fromkeys(members, name)
    for layer in report.tunable:
        home.setdefault(layer.name, layer.name)
    for globs in space.groups:
        joined = {home[x.name] for x in report.tunable if any(glob_matches(glob, x.name) for glob in globs)}
        home = {layer: globs[0] if name in joined else name for layer, name in home.items()}
    out: dict[str, list[Layer]] = {}
    for layer in report.tunable:
        out.setdefault(home[layer.name], []).append(layer)
    return out


def _variable(
    name: str, layers: Sequence[Layer], space: SearchSpace, can_run: CanRun | None
) -> tuple[GroupVariable, list[tuple[str, str, str]]]:
    """Return the variable of a group: choices that every member has and can run; the baseline is always there."""
    recipes = space.all_recipes
    offered = [space.rule_for(layer.name, layer.flags) for layer in layers]
    of_others = [{choice.name for choice in others} for others in offered[1:]]
    kept: dict[str, None] = {}
    refused = []
    for choice in offered[0]:
        if any(choice.name not in names for names in of_others):
            continue
        reason = _refusal(choice, layers, recipes, can_run)
        if reason:
            refused.append((name, choice.name, reason))
        else:
            kept[choice.name] = None
    baseline = Choice.parse(space.baseline)
    if not kept:
        kept[KEEP if _refusal(baseline, layers, recipes, can_run) else baseline.name] = None
    flags = tuple(dict.fromkeys(flag for layer in layers for flag in layer.flags))
    return GroupVariable(name, tuple(layer.name for layer in layers), tuple(kept), flags), refused


def _refusal(choice: Choice, layers: Sequence[Layer], recipes: Mapping[str, Recipe], can_run: CanRun | None) -> str:
    if can_run is None:
        return ""
    for layer in layers:
        for recipe in dict.fromkeys(map(choice.recipe_of, GEMMS)):
            if recipe == KEEP:
                continue
            ok, reason = can_run(layer, recipes[recipe])
            if not ok:
                return reason or f"{layer.name} cannot run {recipe}"
    return ""


def _relevant_parameters(space: SearchSpace, groups: Sequence[GroupVariable]) -> dict[str, tuple[Any, ...]]:
    """Return the parameters that can matter: those of recipes no group offers are left at their default."""
    used = recipes_in(name for group in groups for name in group.choices)
    out = space.parameter_values()
    for path in space.parameters:
        if path.split(".")[0] not in used:
            del out[path]
    return out
