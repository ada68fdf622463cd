"""A published policy made one of this model: roles and blocks become layer names, and what found no layer is said.

A role that the model lacks, a projection that is fused with others, a layer whose name does not say its role: each is
a note, never silently nothing. A policy that would leave no layer in its low precision here is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoprec.errors import AutoPrecError, PolicyMismatchError
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.roles import Place, places, shown
from autoprec.policy import CommunicationPolicy, LayerPlan, OptimizerPolicy, Policy
from autoprec.policy.library import PREFIX, SCALED, WITHIN, Published, published, published_names
from autoprec.policy.space import Blocks, Choice
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, KEEP
from autoprec.support.units import counted
from autoprec.tuning.decide.problem import Params, Problem, layer_key
from autoprec.tuning.decide.rules import glob_table, layer_rules, recipes_in

#: Policies published for the family of a model that a search measures beside its other presets: each is a trial.
MOST_PRESETS = 2
#: What libraries run where nobody says otherwise.
LIBRARIES = ("torchao-tensorwise", "torchao-rowwise", "torchao-rowwise-gw-hp", "te-delayed", "te-current", "te-mxfp8")
#: Which layers of a divided role are meant, by the last word of their name; a fused one (``c_attn``) is none of them.
_PARTS: dict[str, re.Pattern[str]] = {
    "attention.q": re.compile(r"(to_)?w?q(_proj|_lin|_a_proj|_b_proj)?|(\w+_)?query(_proj)?|queries"),
    "attention.k": re.compile(r"(to_)?w?kv?(_proj|_lin)?|kv_[ab]_proj\w*|(\w+_)?key(_proj)?|keys"),
    "attention.v": re.compile(r"(to_)?w?k?v(_proj|_lin)?|kv_[ab]_proj\w*|(\w+_)?value(_proj)?|values"),
    "mlp.gate": re.compile(r"gate(_proj)?|w1|wi_0"),
    "mlp.up": re.compile(r"up(_proj)?|w3|wi_1|c_?fc|fc_?(in|1)?|lin1|linear(1|_fc1)|dense_h_to_4h|mlp_in|ffn_in"),
}
#: Roles that only some architectures have, known by a word anywhere in a name.
_WORDS: dict[str, re.Pattern[str]] = {"latent": re.compile(r"latent"), "mtp": re.compile(r"(^|\.)mtp")}


@dataclass(frozen=True)
class Resolved:
    """A published policy on one model.

    Attributes:
        name: as the command line says it, ``published:nvfp4-12b``.
        policy: in globs on this model's layers.
        choices: per tunable layer what it runs, as search spaces name it (``nvfp4/wgrad=bf16``).
        notes: what found no layer, and what else a reader should know, a sentence each.
    """

    name: str
    policy: Policy
    choices: Mapping[str, str]
    notes: tuple[str, ...] = ()


def is_of(role: str, place: Place) -> bool:
    """Say whether a layer has a role that a rule may name."""
    if role in _WORDS:
        return bool(_WORDS[role].search(place.name))
    if role in _PARTS:
        return place.role == WITHIN[role] and bool(_PARTS[role].fullmatch(place.part.lower()))
    return place.role == role or (role == "conv" and place.role.startswith("conv."))


def in_blocks(blocks: Blocks, place: Place, depth: int = 0) -> bool:
    """Say whether a layer lies in some of its model's blocks; counts are of a model of ``depth``, 0: of this one.

    Args:
        blocks: so many at the front or the back.
        place: where the layer stands.
        depth: blocks of the model that counts are of; 0 for this one.
    """
    count = blocks.first or blocks.last
    if blocks.last_share:
        count = math.ceil(blocks.last_share * place.blocks)
    elif depth:
        count = math.ceil(count * place.blocks / depth)
    return 0 <= place.block < count if blocks.first else place.block >= max(0, place.blocks - count)


def resolve_published(name: str, report: GraphReport) -> Resolved:
    """Make a published policy one of the model of a recorded step.

    Args:
        name: ``published:NAME``; with ``:scaled`` behind it, counts of blocks are the same share of this model's.

    Raises:
        UnknownNameError: with the nearest name.
        PolicyMismatchError: nothing would be lowered, or its counts cannot be scaled.
    """
    entry = published(name)
    full = f"{PREFIX}{entry.name}"
    if name.endswith(SCALED):
        full += SCALED
        if not entry.blocks:
            raise PolicyMismatchError(
                f"{full}: it is not known for how many blocks this was published, or it counts none",
                fix=f"use {PREFIX}{entry.name}",
            )
    found = places(report.layers)
    inside = {layer.name: found[layer.name] for layer in report.tunable}
    depth = entry.blocks if name.endswith(SCALED) else 0
    choices = {layer.name: _choice(entry, layer, inside[layer.name], depth) for layer in report.tunable}
    _refuse_nothing(entry, full, choices)
    notes = [*_missing(entry, report, found), *([] if depth else _depths(entry, full, inside))]
    facts = {"published": entry.name, "published_in": entry.source, "published_on": entry.date}
    return Resolved(full, _rendered(entry, report, choices, facts), choices, tuple(notes))


def _choice(entry: Published, layer: Layer, place: Place, depth: int) -> str:
    """Return what a layer runs; counts of blocks are of a model of ``depth``, 0: of this one."""
    if entry.sizes is not None:
        fprop = next((gemm for gemm in layer.gemms if gemm.role == "fprop"), None)
        if layer.kind != "linear" or fprop is None or not entry.sizes.take(fprop.n, fprop.k):
            return KEEP
    for rule in entry.rules:
        named = not rule.roles or any(is_of(role, place) for role in rule.roles)
        if named and (rule.blocks is None or in_blocks(rule.blocks, place, depth)):
            return rule.use
    return entry.use


def _refuse_nothing(entry: Published, full: str, choices: Mapping[str, str]) -> None:
    """Refuse a policy under which no layer would run in its low precision."""
    if any(entry.all_recipes[name].scaled for name in recipes_in(choices.values())):
        return
    kept = " and ".join(rule.blocks.text for rule in entry.rules if rule.blocks is not None)
    roles = ", ".join(dict.fromkeys(role for rule in entry.rules for role in rule.roles))
    why = f"it keeps {kept} high" if kept else f"it is about {roles}"
    if entry.sizes is not None:
        why = f"it leaves out what is not an nn.Linear, or where {entry.sizes.text}"
    fix = "`autoprec show published:` lists others"
    if kept and entry.blocks and not full.endswith(SCALED):
        fix = f"{full}{SCALED} keeps the same share of this model's blocks; or {fix}"
    raise PolicyMismatchError(f"{full}: no layer would run in its low precision: {why}", fix=fix)


def _missing(entry: Published, report: GraphReport, found: Mapping[str, Place]) -> Iterator[str]:
    """Yield a sentence for every role or choice of blocks that is about no layer, and for layers without a role."""
    tunable = {layer.name for layer in report.tunable}
    reasons = {layer.name: layer.reason for layer in report.layers if not layer.tunable}
    for rule in entry.rules:
        for role in rule.roles:
            named = [place.name for place in found.values() if is_of(role, place)]
            if tunable.isdisjoint(named):
                yield _why_none(role, named, reasons)
        if rule.blocks is not None and not any(found[name].blocks for name in tunable):
            yield f"{rule.blocks.text}: the layers of this model are in no numbered blocks"
    if any(rule.roles for rule in entry.rules):
        unknown = [name for name in tunable if not found[name].role and not any(is_of(w, found[name]) for w in _WORDS)]
        if unknown:
            listed = shown([layer.name for layer in report.tunable if layer.name in unknown])
            count = counted(len(unknown), "layer")
            yield f"the names of {count} do not say a role, and no rule for a role takes them: {listed}"


def _why_none(role: str, named: list[str], reasons: Mapping[str, str]) -> str:
    if named:
        return f"{role}: {shown(named)} runs as the script wrote it: {reasons[named[0]]}"
    return f"{role}: no layer of this model has this role alone"


def _depths(entry: Published, full: str, inside: Mapping[str, Place]) -> Iterator[str]:
    """Yield that a count of blocks is of a model of another depth."""
    counts = any(rule.blocks is not None and rule.blocks.first + rule.blocks.last for rule in entry.rules)
    depths = dict.fromkeys(place.blocks for place in inside.values())
    for depth in depths if counts and entry.blocks else ():
        if depth not in (0, entry.blocks):
            yield (
                f"published for {entry.blocks} blocks, and this model has {depth}, of which it keeps as many high; "
                f"{full}{SCALED} keeps the share"
            )


def _rendered(entry: Published, report: GraphReport, choices: Mapping[str, str], facts: Mapping[str, str]) -> Policy:
    """Return the policy in as few globs as say it exactly."""
    document = entry.around().to_dict() | {"model": dict(report.model), "evidence": dict(facts)}
    table, used, low = glob_table(tuple(layer.name for layer in report.layers)), set(choices.values()), entry.use
    document["layers"] = layer_rules(table, choices, choices)
    if entry.tail is not None:
        late = Choice.parse(low).model_copy(update={"gemms": {**Choice.parse(low).gemms, **entry.tail.gemms}}).name
        changed = {name: late if choice == low else choice for name, choice in choices.items()}
        document["phases"] = [{"from": entry.tail.start, "layers": layer_rules(table, changed, changed)}]
        used.add(late)
    document["recipes"] = {name: entry.all_recipes[name].to_dict() for name in sorted(recipes_in(used))}
    return Policy.model_validate(document)


def published_presets(problem: Problem, *, execution: str = "") -> list[tuple[str, Params]]:
    """Return (name, params) of published policies that the problem can express.

    Those are the defaults of libraries (:data:`LIBRARIES`), what was published for any model, and up to
    :data:`MOST_PRESETS` that were published for the family of this one, which follows from its class. A policy counts
    whose quantised recipes are choices of the space under some values of its parameters, so that the target runs them;
    its 16-bit layers take the space's baseline where they have no other. One that was published for another depth keeps
    the share of blocks. A policy with phases is not a point of a search.

    Args:
        problem: what is searched.
        execution: of the policies that are for compiled models, where that is searched; it is named behind theirs.
    """
    found: list[tuple[str, Params]] = []
    where, of_family = places(problem.report.layers), 0
    for entry in map(published, published_names()):
        if not _is_for(entry, problem) or (entry.families and of_family == MOST_PRESETS):
            continue
        try:
            params, _ = _point(problem, entry, where)
        except AutoPrecError:
            continue  # :func:`library_presets` says why
        of_family += bool(entry.families)
        name = _full_name(entry)
        if execution and entry.compiled:
            name, params = f"{name}, compiled", {**params, "execution": execution}
        found.append((name, params))
    return found


def library_presets(problem: Problem) -> tuple[dict[str, str], list[str]]:
    """Return what a reader should know of the defaults of libraries, as far as they are in formats of the space.

    Returns:
        Those that cannot be run here, with the reason; and a sentence for each that runs otherwise than in its library.
    """
    refused, otherwise, where = dict[str, str](), list[str](), places(problem.report.layers)
    formats = {problem.space.all_recipes[name].format for name in recipes_in(problem.choice_names)}
    for entry in map(published, LIBRARIES):
        full = _full_name(entry)
        if entry.all_recipes[Choice.parse(entry.use).recipe].format not in formats:
            continue
        try:
            _, moved = _point(problem, entry, where)
        except AutoPrecError as error:
            refused[full] = error.what.removeprefix(f"{full}: ")
            continue
        if moved:
            otherwise.append(f"{full}: {shown(moved)} run as their siblings do, with which a search moves them")
    return refused, otherwise


def _full_name(entry: Published) -> str:
    return f"{PREFIX}{entry.name}{SCALED if entry.blocks else ''}"


def _is_for(entry: Published, problem: Problem) -> bool:
    """Say whether a policy is for the family of a problem's model, and about nothing but its layers."""
    family = str(problem.report.model.get("class", "")).lower()
    apart = entry.optimizer == OptimizerPolicy() and entry.communication == CommunicationPolicy()
    return entry.tail is None and apart and (not entry.families or any(word in family for word in entry.families))


def _point(problem: Problem, entry: Published, where: Mapping[str, Place]) -> tuple[Params, list[str]]:
    """Return the point of a problem that runs a policy, and layers that run otherwise.

    Where a filter by size takes a group apart, the group runs what most of its products shall.

    Raises:
        PolicyMismatchError: there is none; the message begins with the policy's name.
    """
    full, depth = _full_name(entry), entry.blocks
    layers = {layer.name: layer for layer in problem.report.tunable}
    choices = {name: _choice(entry, layer, where[name], depth) for name, layer in layers.items()}
    _refuse_nothing(entry, full, choices)
    activations = {"activations": "bf16"} if "bf16" in problem.parameters.get("activations", ()) else {}
    params = problem.params_of(problem.baseline, **activations)
    narrow = problem.value(params, "activations") == "bf16"
    tuned, moved = dict[str, Any](), list[str]()
    offers: dict[tuple[str, tuple[str, ...]], tuple[str | None, Params]] = {}  # blocks are alike
    for group in problem.groups:
        weights: dict[str, int] = {}
        for name in group.layers:
            weights[choices[name]] = weights.get(choices[name], 0) + layers[name].total_flops
        most = max(weights, key=lambda one: weights[one])
        others = [name for name in group.layers if choices[name] != most]
        if others and entry.sizes is None:  # what was published for roles is run as it is, or not
            raise PolicyMismatchError(f"{full}: {shown(group.layers)} move together, and it takes them apart")
        moved += others
        wanted = _as_run(Choice.parse(most).plan(entry.all_recipes), narrow)
        if (most, group.choices) not in offers:
            offers[most, group.choices] = _offered(problem, group.choices, wanted, narrow)
        choice, values = offers[most, group.choices]
        if choice is None and not wanted.scaled:  # other 16 bits: those of the space
            choice = problem.choice_of({}, group)
        if choice is None or any(tuned.get(name, value) != value for name, value in values.items()):
            refused = {one: why for name, one, why in problem.refused if name == group.name}
            one, _ = _offered(problem, refused, wanted, narrow)
            why = f"the space '{problem.space.name}' offers {group.layers[0]} no {wanted.describe()}"
            why = why if one is None else refused[one]
            raise PolicyMismatchError(f"{full}: {why}", fix="`autoprec show published:` lists others")
        tuned |= values
        if len(group.choices) > 1:
            params[layer_key(group.name)] = choice
    return {**params, **{name: value for name, value in tuned.items() if name in problem.parameters}}, moved


def _as_run(plan: LayerPlan, narrow: bool) -> LayerPlan:
    """Return a plan with what autocast gives a GEMM that runs as written, where that is around the model."""
    bf16 = BUILTIN_RECIPES["bf16"]
    return LayerPlan(**{gemm: bf16 if narrow and plan.recipe(gemm) is None else plan.recipe(gemm) for gemm in GEMMS})


def _offered(
    problem: Problem, choices: Iterable[str], wanted: LayerPlan, narrow: bool
) -> tuple[str | None, Mapping[str, Any]]:
    """Return the one of some choices, and values of its recipes' parameters, that run a plan; None where none does."""
    for name in choices:
        choice = Choice.parse(name)
        values = dict(_values(problem, choice, wanted))
        if _as_run(choice.plan(problem.space.recipes_with(values)), narrow) == wanted:
            return name, values
    return None, {}


def _values(problem: Problem, choice: Choice, wanted: LayerPlan) -> Iterator[tuple[str, Any]]:
    """Yield the values that parameters of a choice's recipes have in a plan, as far as the space offers them."""
    for path, offered in problem.space.parameters.items():
        name, *fields = path.split(".")
        gemms = [gemm for gemm in GEMMS if choice.recipe_of(gemm) == name]
        if fields[0] == "accumulation" and len(fields) == 2:
            gemms, fields = [gemm for gemm in gemms if gemm == fields[1]], fields[:1]
        value: Any = wanted.recipe(gemms[0]) if gemms else None
        for field in fields:
            value = getattr(value, field, None)
        if value in offered:
            yield path, value
